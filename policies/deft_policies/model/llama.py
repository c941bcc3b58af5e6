"""The Llama decoder as modules: every size from configuration, whole sequences, gradients.

The query, key and value weights are one matrix, and so are gate and up. Inference runs the same
weights through a cache: see `passes`. Draft heads use single layers, with a cache too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.kv_cache import CacheSizes, CacheWindow

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels


@dataclass(frozen=True)
class LlamaSizes:
    """Everything that tells one Llama from another."""

    vocabulary: int  # rows of the embedding and of the head, padding included
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 2048

    @property
    def cache(self) -> CacheSizes:
        """What one token leaves in the key/value cache."""
        return CacheSizes(self.num_layers, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class Rotation:
    """Rotary position embedding of the tokens of a pass; sin carries the sign of rotate-half."""

    cos: Tensor  # [row, token, 1, head_dim]
    sin: Tensor  # [row, token, 1, head_dim]

    def apply_(self, heads: Tensor) -> None:
        """Rotate [row, token, head, head_dim] in place."""
        turned = torch.roll(heads, heads.shape[-1] // 2, -1) * self.sin
        heads.mul_(self.cos).add_(turned)


class RotaryTable(nn.Module):
    """cos and sin of every position, computed in float32 and then cast, as Llama does."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self._table: Tensor | None = None  # [position, 2 * head_dim]

    def forward(self, positions: Tensor, like: Tensor) -> Rotation:
        """Look up [row, token] positions, on the device and in the dtype of `like`."""
        table = self._table
        if table is None or table.device != like.device or table.dtype != like.dtype:
            # An inference tensor could not be used in training afterwards.
            with torch.inference_mode(False):
                table = self._table = self._compute().to(like.device, like.dtype)
        found = functional.embedding(positions, table).unsqueeze(2)
        cos, sin = found.chunk(2, dim=3)
        return Rotation(cos, sin)

    def _compute(self) -> Tensor:
        half = self.sizes.head_dim // 2
        exponents = torch.arange(0, self.sizes.head_dim, 2, dtype=torch.float32) / (2 * half)
        frequencies = 1.0 / self.sizes.rope_theta**exponents
        positions = torch.arange(self.sizes.max_positions, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos, -sin, sin), dim=1)


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
class PassContext:
    """What every layer of one pass shares.

    Without a mask, attention is causal when `is_causal`, else it sees every slot that is read.
    `rows_out`, if given, are the token indices [row, kept] whose output is wanted.
    """

    rotation: Rotation
    mask: Tensor | None = None  # [row, 1, token, slot] bool
    is_causal: bool = False
    rows_out: Tensor | None = None


class Attention(nn.Module):
    """Self-attention with fused projections."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = sizes.num_heads, sizes.num_kv_heads
        self.head_dim = sizes.head_dim
        inner = sizes.num_heads * sizes.head_dim
        fused = inner + 2 * sizes.num_kv_heads * sizes.head_dim
        self.qkv = nn.Linear(sizes.width, fused, bias=False)
        self.out = nn.Linear(inner, sizes.width, bias=False)

    def append(
        self, hidden: Tensor, rotation: Rotation, cache: CacheWindow | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of [row, token, width], and the keys and values that they may look at.

        [row, token, head, head_dim], then [row, head, slot, head_dim] of the cache's only layer.
        """
        fused = self.qkv(hidden).unflatten(2, (-1, self.head_dim))
        rotation.apply_(fused[:, :, : self.num_heads + self.num_kv_heads])
        queries, seen = fused[:, :, : self.num_heads], fused[:, :, self.num_heads :]
        if cache is None:
            keys, values = seen.transpose(1, 2).chunk(2, dim=1)
            return queries, keys, values
        cache.write(0, seen)
        return queries, cache.keys[0], cache.values[0]

    def forward(
        self, hidden: Tensor, context: PassContext, cache: CacheWindow | None = None
    ) -> Tensor:
        """Attend from every token to those before it, in the cache or in `hidden` alone."""
        queries, keys, values = self.append(hidden, context.rotation, cache)
        if context.rows_out is not None:
            queries = take_rows(queries, context.rows_out)
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys,
            values,
            attn_mask=context.mask,
            is_causal=context.is_causal,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class GatedMLP(nn.Module):
    """SwiGLU with gate and up in one matrix."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply to each token."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        lowered: Tensor = self.down(functional.silu(gate) * up)
        return lowered


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.attention = Attention(sizes)
        self.mlp_norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.mlp = GatedMLP(sizes.width, sizes.mlp_width)

    def forward(self, hidden: Tensor, context: PassContext) -> Tensor:
        """Return the new residual stream."""
        mixed: Tensor = self.attention(self.attention_norm(hidden), context)
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
        context = PassContext(self.rotary(positions, embeds), mask, is_causal=mask is None)
        for layer in self.layers:
            embeds = layer(embeds, context)
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


def take_rows(values: Tensor, indices: Tensor) -> Tensor:
    """Pick [row, kept] indices along the second axis of [row, token, ...]."""
    shape = (*indices.shape, *(1,) * (values.dim() - 2))
    return values.gather(1, indices.view(shape).expand(-1, -1, *values.shape[2:]))
