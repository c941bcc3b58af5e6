"""The Llama decoder as modules: every size from configuration, whole sequences, gradients.

The query, key and value weights are one matrix, and so are gate and up. Inference runs the same
weights through a cache: see `passes`. Draft heads are single layers with the same attention.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.errors import CheckpointError
from deft_policies.model.kv_cache import CacheWindow
from deft_policies.model.sizes import Gate, LlamaSizes

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels

GATES: Mapping[Gate, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
_ALIGNMENT = 16  # of the rows of a mask: attention copies others, in every layer


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate [row, token, head, head_dim] in place; sin carries the sign of rotate-half."""
    turned = torch.roll(heads, heads.shape[-1] // 2, -1) * sin
    heads.mul_(cos).add_(turned)


class RotaryTable(nn.Module):
    """cos and sin of every position, computed in float32 and then cast, as Llama does."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self._table: Tensor | None = None  # [position, 2 * head_dim]

    def forward(self, positions: Tensor | int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [row, token, 1, head_dim] of [row, token] positions, as `like` lies.

        Or positions from a number on, the same in every row of `like` [row, token, width].
        """
        table = self._table
        if table is None or table.device != like.device or table.dtype != like.dtype:
            # An inference tensor could not be used in training afterwards.
            with torch.inference_mode(False):
                table = self._table = self._compute().to(like.device, like.dtype)
        if isinstance(positions, int):
            num_rows, num_tokens = like.shape[:2]
            rotation = table[positions : positions + num_tokens].expand(num_rows, -1, -1)
        else:
            rotation = functional.embedding(positions, table)
        cos, sin = rotation.unsqueeze(2).chunk(2, dim=3)
        return cos, sin

    def _compute(self) -> Tensor:
        angles = self._angles()
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos, -sin, sin), dim=1)

    def _angles(self) -> Tensor:
        """[position, head_dim / 2]."""
        positions = torch.arange(self.sizes.max_positions, dtype=torch.float32)
        return torch.outer(positions, self.frequencies())

    def frequencies(self) -> Tensor:
        """[head_dim / 2]."""
        half = self.sizes.head_dim // 2
        exponents = torch.arange(0, self.sizes.head_dim, 2, dtype=torch.float32) / (2 * half)
        return 1.0 / self.sizes.rope_theta**exponents


class MRopeTable(RotaryTable):
    """M-RoPE of Qwen2.5-VL, where pictures have the same slots in every sequence.

    A token has three positions: time, row and column; sections of the frequencies turn by one each.
    What slot a token is in says all three, so passes go on counting slots.
    """

    def __init__(self, sizes: LlamaSizes, positions: Tensor, mrope_section: Sequence[int]) -> None:
        """`positions` [3, slot] of a prompt; the slots behind it go on counting."""
        super().__init__(sizes)
        more = torch.arange(1, sizes.max_positions - positions.shape[1] + 1)
        self._positions = torch.cat((positions, (positions.max() + more).expand(3, -1)), dim=1)
        self._mrope_section = torch.tensor(mrope_section)

    def _angles(self) -> Tensor:
        kinds = torch.arange(3).repeat_interleave(self._mrope_section)
        return self._positions[kinds].t().float() * self.frequencies()


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32; the weight multiplies after the cast back."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale).to(hidden.dtype) * self.weight


@dataclass(frozen=True)
class Attention:
    """The attention of one pass: what its layers share, through the cache or without one.

    Without a mask, attention is causal when `is_causal`, else it sees every slot that is read.
    Without a `window` the tokens see each other alone, and nothing is kept of them.
    """

    sizes: LlamaSizes
    cos: Tensor  # [row, token, 1, head_dim], the rotary embedding of its tokens
    sin: Tensor
    mask: Tensor | None = None  # [row, 1, token or 1, slot], bool or what is added to the scores
    is_causal: bool = False
    window: CacheWindow | None = None
    kept: Tensor | None = None  # [row * kept], flat indices of the tokens whose output is wanted

    @property
    def sums_in(self) -> torch.dtype:
        """The format that scores and values are summed in."""
        return self.cos.dtype

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """From queries, keys and values of every token to mixed values [row * kept, inner]."""
        mixed = self.attend(layer, fused).transpose(1, 2)
        return mixed.reshape(-1, self.sizes.num_heads * self.sizes.head_dim)

    def attend(self, layer: int, fused: Tensor) -> Tensor:
        """Mixed values [row, head, kept, head_dim] in the format of the sums."""
        num_rows, num_tokens = self.cos.shape[:2]
        num_heads, num_kv_heads = self.sizes.num_heads, self.sizes.num_kv_heads
        split = fused.view(num_rows, num_tokens, num_heads + 2 * num_kv_heads, -1)
        keys, values = self.append(layer, split)
        queries = split[:, :, :num_heads]
        if self.kept is not None:
            queries = queries.flatten(2).flatten(0, 1).index_select(0, self.kept)
            queries = queries.view(num_rows, -1, num_heads, split.shape[3])
        return functional.scaled_dot_product_attention(
            queries.transpose(1, 2).to(self.sums_in),
            keys.to(self.sums_in),
            values.to(self.sums_in),
            attn_mask=self.mask,
            is_causal=self.is_causal,
            enable_gqa=num_kv_heads != num_heads,
        )

    def append(self, layer: int, split: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate [row, token, head, head_dim] in place and append keys and values to the cache.

        Returns what is attended to, [row, head, slot, head_dim], the tokens of this pass included.
        """
        num_rotated = self.sizes.num_heads + self.sizes.num_kv_heads
        rotate_(split[:, :, :num_rotated], self.cos, self.sin)
        keys_values = split[:, :, self.sizes.num_heads :]
        if self.window is None:
            keys, values = keys_values.transpose(1, 2).chunk(2, dim=1)
            return keys, values
        self.window.write(layer, keys_values)
        return self.window.seen(layer)

    @property
    def num_out(self) -> int:
        """Tokens whose output is wanted."""
        return self.cos.shape[0] * self.cos.shape[1] if self.kept is None else len(self.kept)

    def keep(self, hidden: Tensor) -> Tensor:
        """Of [row * token, width] the tokens whose output is wanted."""
        return hidden if self.kept is None else hidden.index_select(0, self.kept)

    def of_rows_out(self, rows_out: Tensor) -> "Attention":
        """That of a layer which computes the tokens [row, kept] only.

        Fewer queries than slots are not causal by shape any more, so the mask is spelt out.
        """
        num_tokens = self.cos.shape[1]
        kept = rows_out.flatten()
        if len(rows_out) > 1:
            first = torch.arange(len(rows_out), device=rows_out.device)[:, None] * num_tokens
            kept = (rows_out + first).flatten()
        if not self.is_causal and (self.mask is None or self.mask.shape[2] == 1):
            return replace(self, kept=kept)  # all tokens of a row see the same
        if self.mask is None:
            slots = torch.arange(num_tokens, device=rows_out.device)
            causal = (slots <= rows_out[:, :, None]).unsqueeze(1)
            mask = added_mask(causal, self.sums_in)
        else:
            index = rows_out[:, None, :, None].expand(-1, -1, -1, self.mask.shape[3])
            mask = self.mask.expand(len(rows_out), -1, -1, -1).gather(2, index)
        return replace(self, mask=mask, is_causal=False, kept=kept)


def added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores, made once for all layers; rows lie at multiples of 16."""
    *shape, width = mask.shape
    room = torch.zeros(*shape, width + -width % _ALIGNMENT, dtype=dtype, device=mask.device)
    return room[..., :width].masked_fill_(~mask, float("-inf"))


class LlamaAttention(nn.Module):
    """The projections around attention, queries, keys and values in one matrix."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        inner = sizes.num_heads * sizes.head_dim
        fused = inner + 2 * sizes.num_kv_heads * sizes.head_dim
        self.qkv = nn.Linear(sizes.width, fused, bias=sizes.has_qkv_bias)
        self.out = nn.Linear(inner, sizes.width, bias=False)

    def forward(self, hidden: Tensor, attention: Attention) -> Tensor:
        """From [row, token, width] to [row, kept, width], in a decoder's only layer."""
        mixed = attention.mix(0, self.qkv(hidden))
        projected: Tensor = self.out(mixed.view(len(hidden), -1, mixed.shape[1]))
        return projected


class GatedMLP(nn.Module):
    """SwiGLU, or its like of another gate, with gate and up in one matrix."""

    def __init__(self, width: int, mlp_width: int, gate: Gate = "silu") -> None:
        super().__init__()
        self.gate = GATES[gate]
        self.gate_up = nn.Linear(width, 2 * mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply to each token."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        lowered: Tensor = self.down(self.gate(gate) * up)
        return lowered


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.attention = LlamaAttention(sizes)
        self.mlp_norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.mlp = GatedMLP(sizes.width, sizes.mlp_width, sizes.gate)

    def forward(self, hidden: Tensor, attention: Attention) -> Tensor:
        """Return the new residual stream."""
        mixed: Tensor = self.attention(self.attention_norm(hidden), attention)
        hidden = hidden + mixed
        lowered: Tensor = self.mlp(self.mlp_norm(hidden))
        return hidden + lowered


class LlamaDecoder(nn.Module):
    """Embeddings, layers, final norm and head."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        # Not drawn at random, unlike nn.Embedding's own: on the meta device, where models are laid
        # out before loading, that would import torch's compiler, which takes seconds.
        table = torch.empty(sizes.vocabulary, sizes.width)
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width, _weight=table)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.rotary = RotaryTable(sizes)
        self.kernels: FusedKernels | None = None  # what inference passes run with

    def forward(self, embeds: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, of whole sequences at once and without a cache.

        For training and for tests: causal unless a mask [row, 1, token, token] says otherwise.
        """
        positions = torch.arange(embeds.shape[1], device=embeds.device).expand(embeds.shape[:2])
        cos, sin = self.rotary(positions, embeds)
        attention = Attention(self.sizes, cos, sin, mask, is_causal=mask is None)
        for layer in self.layers:
            embeds = layer(embeds, attention)
        hidden: Tensor = self.norm(embeds)
        return hidden

    @torch.no_grad()
    def prefer_columns(self) -> None:
        """Store every matrix column by column, which multiplies single tokens faster on a CPU.

        Values, shapes and names stay; only strides change.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                turned = module.weight.t().contiguous().t()
                module.weight = nn.Parameter(turned, module.weight.requires_grad)


def first_layers(decoder: LlamaDecoder, num_layers: int) -> LlamaDecoder:
    """A decoder of the first layers, sharing every weight with the whole one."""
    if not 1 <= num_layers <= len(decoder.layers):
        raise CheckpointError(
            f"the decoder has {len(decoder.layers)} layers, cannot draft with its first "
            f"{num_layers}; use fewer"
        )
    with torch.device("meta"):
        shallow = LlamaDecoder(replace(decoder.sizes, num_layers=num_layers))
    shallow.embedding, shallow.norm, shallow.head = decoder.embedding, decoder.norm, decoder.head
    shallow.layers, shallow.rotary = decoder.layers[:num_layers], decoder.rotary
    shallow.kernels = decoder.kernels
    return shallow


def take_rows(values: Tensor, indices: Tensor) -> Tensor:
    """Pick [row, kept] indices along the second axis of [row, token, ...]."""
    shape = (*indices.shape, *(1,) * (values.dim() - 2))
    return values.gather(1, indices.view(shape).expand(-1, -1, *values.shape[2:]))
