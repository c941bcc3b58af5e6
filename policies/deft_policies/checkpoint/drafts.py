"""Draft heads on disk: directories with weights and `config.json`.

An EAGLE-style head has `pytorch_model.bin` (the published Spec-VLA layout) or `model.safetensors`
(ours) with the same tensor names. Its shapes come from the tensors, because the published
configuration does not tell them all. Medusa's heads and block heads are in our layout alone.
"""

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.tensor_file import (
    describe_misfits,
    fill_module,
    read_tensors,
    shapes_of,
    write_tensors,
)
from deft_policies.errors import CheckpointError
from deft_policies.model.block_head import BlockHead, BlockSizes, block_sizes
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.sizes import LlamaSizes, TokenRange
from deft_policies.model.tensor_names import layer_places

_MEDUSA_FORMAT, _BLOCK_FORMAT = "deft-medusa-1", "deft-block-1"
_MOST_HEADS = 64
_MOST_LAYERS, _MOST_PLACES, _MOST_RANK = 8, 16, 4096  # of a block head
_LAYER = "layers.0."
_ATTENTION = _LAYER + "self_attn."
# Besides the head's own tensors a published file repeats the target's embedding, and older ones
# store the rotary frequencies; neither is used.
_IGNORED = ("embed_tokens.weight", "lm_head.weight", _ATTENTION + "rotary_emb.inv_freq")


class HeadLayout(Enum):
    """How the weights are stored; the value is the file's name."""

    SAFETENSORS = "model.safetensors"
    PUBLISHED = "pytorch_model.bin"


def load_head(directory: Path, width: int, like: Tensor) -> EagleHead:
    """Read a draft head for a target of `width`, on the device and in the dtype of `like`."""
    ours, published = (directory / layout.value for layout in HeadLayout)
    if not (ours.exists() or published.exists()):
        raise CheckpointError(
            f"{directory} holds neither {ours.name} nor {published.name}: not a draft head"
        )
    read = read_tensors(ours if ours.exists() else published)
    tensors = {name: tensor for name, tensor in read.items() if name not in _IGNORED}
    sizes = _read_sizes(directory, tensors)
    _check_width(directory, sizes.width, width)
    with torch.device("meta"):
        head = EagleHead(sizes)
    head.to_empty(device=like.device).to(like.dtype)
    weights = dict(named_weights(head))
    if misfits := describe_misfits(shapes_of(weights), shapes_of(tensors)):
        raise CheckpointError(f"{directory}: not a draft head of this layout; {misfits}")
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(tensors[name])
    return head.requires_grad_(False).eval()


def _check_width(directory: Path, found: int, expected: int) -> None:
    if found != expected:
        raise CheckpointError(
            f"{directory}: what it holds is {found} wide, but the target is {expected}; "
            "heads only fit the model they were trained for"
        )


def save_head(head: EagleHead, directory: Path, layout: HeadLayout) -> None:
    """Write `config.json` and the weights. The published layout is in float16, as its peers are."""
    sizes, tensors = head.sizes, dict(named_weights(head))
    config = {
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
    _write_config(config, directory)
    if layout is HeadLayout.SAFETENSORS:
        write_tensors(tensors, directory / layout.value)
    else:
        halves = {
            name: tensor.detach().cpu().half().contiguous() for name, tensor in tensors.items()
        }
        torch.save(halves, directory / layout.value)


def _write_config(config: Mapping[str, object], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def named_weights(head: EagleHead) -> list[tuple[str, Tensor]]:
    """The head's tensors by their published names; fused matrices as views of their parts."""
    own = dict(head.named_parameters())
    named: list[tuple[str, Tensor]] = [(name, own[name]) for name in ("fc.weight", "fc.bias")]
    for place in layer_places(head.sizes):
        for kind in ("weight", "bias"):
            name = f"{place.parameter}.{kind}"
            if name in own:  # a head has no norm before its attention
                named.append((f"{_LAYER}{place.name}.{kind}", own[name][place.rows]))
    return named


def _read_sizes(directory: Path, tensors: Mapping[str, Tensor]) -> LlamaSizes:
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
    return head_sizes(
        width=width,
        mlp_width=tensors[_LAYER + "mlp.gate_proj.weight"].shape[0],
        num_heads=num_heads,
        num_kv_heads=tensors[_ATTENTION + "k_proj.weight"].shape[0] // (width // num_heads),
        norm_eps=config.value("rms_norm_eps", float, 1e-6),
        rope_theta=config.value("rope_theta", float, 10000.0),
        max_positions=config.value("max_position_embeddings", int),
        has_qkv_bias=_ATTENTION + "q_proj.bias" in tensors,
    )


def save_medusa(heads: MedusaHeads, directory: Path) -> None:
    """Write `config.json` and the weights."""
    config = {"format": _MEDUSA_FORMAT, "hidden_size": heads.width, "num_heads": heads.num_heads}
    _write_config(config, directory)
    write_tensors(dict(heads.named_parameters()), directory / HeadLayout.SAFETENSORS.value)


def is_medusa(directory: Path) -> bool:
    """Whether a draft-head directory holds Medusa heads; False if it cannot be read."""
    return _format_of(directory) == _MEDUSA_FORMAT


def is_block(directory: Path) -> bool:
    """Whether a draft-head directory holds a block head; False if it cannot be read."""
    return _format_of(directory) == _BLOCK_FORMAT


def _format_of(directory: Path) -> object:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config.get("format") if isinstance(config, dict) else None


def load_medusa(directory: Path, width: int, like: Tensor) -> MedusaHeads:
    """Read heads for a target of `width`, on the device and in the dtype of `like`."""
    if not is_medusa(directory):
        raise CheckpointError(f"{directory}/config.json does not describe Medusa heads")
    config = JsonFields.load(directory / "config.json", "export the heads again")
    _check_width(directory, config.value("hidden_size", int), width)
    path = directory / HeadLayout.SAFETENSORS.value
    with torch.device("meta"):
        heads = MedusaHeads(width, config.count("num_heads", _MOST_HEADS))
    fill_module(heads, read_tensors(path), path, "export the heads again")
    return heads.to(like.device, like.dtype)


def save_block(head: BlockHead, directory: Path) -> None:
    """Write `config.json` and the weights."""
    sizes = head.sizes
    config = {
        "format": _BLOCK_FORMAT,
        "hidden_size": head.width,
        "read_layers": list(sizes.read_layers),
        "places": sizes.places,
        "first_token": sizes.tokens.first,
        "last_token": sizes.tokens.last,
        "num_hidden_layers": sizes.backbone.num_layers,
        "intermediate_size": sizes.backbone.mlp_width,
        "rank": sizes.rank,
    }
    _write_config(config, directory)
    write_tensors(dict(head.named_parameters()), directory / HeadLayout.SAFETENSORS.value)


def load_block(directory: Path, target: LlamaSizes, like: Tensor) -> BlockHead:
    """Read a block head for a target, on the device and in the dtype of `like`."""
    sizes = read_block_sizes(directory, target)
    path = directory / HeadLayout.SAFETENSORS.value
    with torch.device("meta"):
        head = BlockHead(sizes)
    fill_module(head, read_tensors(path), path, "export the head again")
    return head.to(like.device, like.dtype).requires_grad_(False).eval()


def read_block_sizes(directory: Path, target: LlamaSizes) -> BlockSizes:
    """What a block head for a target is made of, without its weights."""
    if not is_block(directory):
        raise CheckpointError(f"{directory}/config.json does not describe a block head")
    config = JsonFields.load(directory / "config.json", "export the head again")
    _check_width(directory, config.value("hidden_size", int), target.width)
    tokens = TokenRange(config.value("first_token", int), config.value("last_token", int))
    if not 0 <= tokens.first < tokens.last < target.vocabulary:
        problem = f"tokens {tokens.first} to {tokens.last} are not among {target.vocabulary}"
        raise config.error("last_token", problem)
    layers = config.values("read_layers", int)
    if list(layers) != sorted({*layers} & {*range(1, target.num_layers)}):
        raise config.error(
            "read_layers", f"must be some of 1 to {target.num_layers - 1}, each once and in order"
        )
    mlp_width = config.count("intermediate_size", 16 * target.width)
    return block_sizes(
        target,
        tokens,
        layers,
        places=config.count("places", _MOST_PLACES),
        num_layers=config.count("num_hidden_layers", _MOST_LAYERS),
        mlp_width=mlp_width,
        rank=config.count("rank", _MOST_RANK),
    )
