"""The EAGLE-style draft head: one decoder layer that continues the target's last hidden states.

Shared by serving and by training, so the two cannot disagree about it. Position t pairs the hidden
state f_t with the embedding of the token after it, e_{t+1}, and yields a guess of f_{t+1}, which
the target's own language-model head turns into tokens.

A head's directory holds `config.json` beside `pytorch_model.bin` (the published Spec-VLA layout) or
`model.safetensors` (ours); the tensor names are the same. Shapes come from the tensors, because the
published configuration does not tell them all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor, nn

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.tensor_file import read_tensors, write_tensors
from deft_policies.decoding.plan import KeyMask
from deft_policies.errors import CheckpointError
from deft_policies.model.kv_cache import CacheSizes, CacheWindow
from deft_policies.model.llama import (
    Attention,
    GatedMLP,
    LlamaSizes,
    PassContext,
    RMSNorm,
    RotaryTable,
    Rotation,
    take_rows,
)

_LAYER = "layers.0."
_ATTENTION = _LAYER + "self_attn."
_NORM = _LAYER + "post_attention_layernorm.weight"
_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
# Beside the head's own tensors a published file repeats the target's embedding, and older ones
# store the rotary frequencies; neither is used.
_IGNORED = ("embed_tokens.weight", "lm_head.weight", _ATTENTION + "rotary_emb.inv_freq")


@dataclass(frozen=True)
class HeadSizes:
    """Everything that tells one draft head from another."""

    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 4096
    has_qkv_bias: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads

    @property
    def cache(self) -> CacheSizes:
        """What one position leaves in a key/value cache."""
        return CacheSizes(1, self.num_kv_heads, self.head_dim)


class EagleHead(nn.Module):
    """fc, then one Llama layer without an input norm and without a final norm."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes, self.width = sizes, sizes.width
        llama = _llama_sizes(sizes)
        self.fc = nn.Linear(2 * sizes.width, sizes.width)
        self.attention = Attention(llama)
        if sizes.has_qkv_bias:
            fused = self.attention.qkv
            self.attention.qkv = nn.Linear(fused.in_features, fused.out_features)
        self.mlp_norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.mlp = GatedMLP(sizes.width, sizes.mlp_width)
        self.rotary = RotaryTable(llama)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Teacher-forced: guess f_{t+1} at every position of whole sequences, for training.

        `embeds` is e_{t+1} and `hidden` is f_t, both [row, position, width]. Causal unless a mask
        [row, 1, position, position] says otherwise; see `key_mask`. Rotary `positions` [row,
        position] count from 0 where none are given.
        """
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            positions = positions.expand(hidden.shape[:2])
        context = PassContext(self.rotary(positions, hidden), mask=mask, is_causal=mask is None)
        return self.run(embeds, hidden, context, None)

    def read(self, embeds: Tensor, hidden: Tensor, rotation: Rotation, cache: CacheWindow) -> None:
        """Append the keys and values of pairs whose output nobody asks for."""
        self.attention.append(self.fc(torch.cat((embeds, hidden), dim=-1)), rotation, cache)

    def run(
        self, embeds: Tensor, hidden: Tensor, context: PassContext, cache: CacheWindow | None
    ) -> Tensor:
        """One pass, through a cache if there is one; the output of `context.rows_out` if given."""
        mixed: Tensor = self.fc(torch.cat((embeds, hidden), dim=-1))
        attended = self.attention(mixed, context, cache)
        if context.rows_out is not None:
            mixed = take_rows(mixed, context.rows_out)
        mixed = mixed + attended
        out: Tensor = mixed + self.mlp(self.mlp_norm(mixed))
        return out


def key_mask(kind: KeyMask, prompt_lengths: Tensor, num_positions: int) -> Tensor:
    """The attention mask of whole sequences, [row, 1, position, position].

    With `PREFIX_ONLY`, action positions (from the prompt's last one on) see only the positions
    before the prompt's last one, not even themselves.
    """
    positions = torch.arange(num_positions, device=prompt_lengths.device)
    causal = positions <= positions[:, None]
    if kind is KeyMask.CAUSAL:
        return causal.expand(len(prompt_lengths), 1, -1, -1)
    edge = (prompt_lengths - 1)[:, None, None, None]
    is_action = positions[:, None] >= edge
    return torch.where(is_action, positions < edge, causal)


def _llama_sizes(sizes: HeadSizes) -> LlamaSizes:
    return LlamaSizes(
        vocabulary=1,
        width=sizes.width,
        mlp_width=sizes.mlp_width,
        num_layers=1,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        norm_eps=sizes.norm_eps,
        rope_theta=sizes.rope_theta,
        max_positions=sizes.max_positions,
    )


class HeadLayout(Enum):
    """How the weights are stored; the value is the file's name."""

    SAFETENSORS = "model.safetensors"
    PUBLISHED = "pytorch_model.bin"


def load_head(directory: Path, width: int, like: Tensor) -> EagleHead:
    """Read a draft head for a target of `width`, on the device and in the dtype of `like`."""
    tensors = _read_tensors(directory)
    sizes = _read_sizes(directory, tensors)
    if sizes.width != width:
        raise CheckpointError(
            f"{directory}: the draft head is {sizes.width} wide, but the target is {width}; "
            "a head only fits the model it was trained for"
        )
    with torch.device("meta"):
        head = EagleHead(sizes)
    head.to_empty(device=like.device).to(like.dtype)
    _fill(head, directory, tensors)
    return head.requires_grad_(False).eval()


def save_head(head: EagleHead, directory: Path, layout: HeadLayout) -> None:
    """Write `config.json` and the weights. The published layout is in float16, as its peers are."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(named_weights(head))
    config = json.dumps(_config_of(head.sizes), indent=2) + "\n"
    (directory / "config.json").write_text(config)
    if layout is HeadLayout.SAFETENSORS:
        write_tensors(tensors, directory / layout.value)
    else:
        halves = {name: one.detach().cpu().half().contiguous() for name, one in tensors.items()}
        torch.save(halves, directory / layout.value)


def named_weights(head: EagleHead) -> list[tuple[str, Tensor]]:
    """The head's tensors by their published names; fused matrices as views of their parts."""
    attention, mlp, sizes = head.attention, head.mlp, head.sizes
    parts = [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads]
    rows = [heads * sizes.head_dim for heads in parts]
    named = [("fc.weight", head.fc.weight), ("fc.bias", head.fc.bias)]
    kinds = ["weight", "bias"] if sizes.has_qkv_bias else ["weight"]
    for kind in kinds:
        fused: Tensor = getattr(attention.qkv, kind)
        pieces = torch.split(fused, rows)
        named += [
            (f"{_ATTENTION}{part}.{kind}", piece) for part, piece in zip(_QKV, pieces, strict=True)
        ]
    named.append((_ATTENTION + "o_proj.weight", attention.out.weight))
    halves = torch.split(mlp.gate_up.weight, sizes.mlp_width)
    named += [
        (f"{_LAYER}mlp.{part}.weight", piece) for part, piece in zip(_GATE_UP, halves, strict=True)
    ]
    named.append((_LAYER + "mlp.down_proj.weight", mlp.down.weight))
    named.append((_NORM, head.mlp_norm.weight))
    return named


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    ours, published = (directory / layout.value for layout in HeadLayout)
    path = ours if ours.exists() else published
    if not path.exists():
        raise CheckpointError(
            f"{directory} holds neither {ours.name} nor {published.name}: not a draft head"
        )
    return read_tensors(path)


def _read_sizes(directory: Path, tensors: Mapping[str, Tensor]) -> HeadSizes:
    config = JsonFields.load(
        directory / "config.json",
        "training does not always write it: copy the config.json that belongs to the draft head "
        "beside its weights",
    )
    if config.has("rope_scaling"):
        raise config.error("rope_scaling", "is not supported, remove it or set it to null")
    needed = ("fc.weight", _ATTENTION + "k_proj.weight", _LAYER + "mlp.gate_proj.weight")
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise CheckpointError(f"{directory}: tensors are missing: {', '.join(missing)}")
    width = tensors["fc.weight"].shape[0]
    num_heads = config.value("num_attention_heads", int)
    if num_heads < 1 or width % num_heads:
        raise config.error("num_attention_heads", f"{num_heads} does not divide the width {width}")
    return HeadSizes(
        width=width,
        mlp_width=tensors[_LAYER + "mlp.gate_proj.weight"].shape[0],
        num_heads=num_heads,
        num_kv_heads=tensors[_ATTENTION + "k_proj.weight"].shape[0] // (width // num_heads),
        norm_eps=config.value("rms_norm_eps", float, 1e-6),
        rope_theta=config.value("rope_theta", float, 10000.0),
        max_positions=config.value("max_position_embeddings", int),
        has_qkv_bias=_ATTENTION + "q_proj.bias" in tensors,
    )


def _fill(head: EagleHead, directory: Path, tensors: Mapping[str, Tensor]) -> None:
    named = named_weights(head)
    unknown = sorted(set(tensors) - {name for name, _ in named} - set(_IGNORED))
    missing = [name for name, _ in named if name not in tensors]
    if missing or unknown:
        raise CheckpointError(
            f"{directory}: not a draft head of this layout; missing: {', '.join(missing) or '-'}; "
            f"unexpected: {', '.join(unknown) or '-'}"
        )
    with torch.no_grad():
        for name, parameter in named:
            given = tensors[name]
            if given.shape != parameter.shape:
                raise CheckpointError(
                    f"{directory}: {name} must be {list(parameter.shape)}, got {list(given.shape)}"
                )
            parameter.copy_(given)


def _config_of(sizes: HeadSizes) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": sizes.width,
        "intermediate_size": sizes.mlp_width,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "num_hidden_layers": 1,
        "max_position_embeddings": sizes.max_positions,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": None,
        "qkv_bias": sizes.has_qkv_bias,
    }
