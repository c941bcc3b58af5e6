"""The Llama decoder: sizes from configuration, one forward for every kind of pass.

Prefill, decode, tree verification and training differ only in positions, mask and cache. The
query, key and value weights are one matrix, and so are gate and up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.decoding.kv_cache import Append, CacheSizes, KVCache, LayerCache


@dataclass(frozen=True)
class LlamaSizes:
    """Everything that tells one Llama from another."""

    vocabulary: int
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

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        empty = torch.empty(0, sizes.head_dim)
        self.register_buffer("cos", empty, persistent=False)
        self.register_buffer("sin", empty.clone(), persistent=False)

    def fill(self, like: Tensor) -> None:
        """Compute the table on the device and in the dtype of `like`, whatever the default is."""
        half = self.sizes.head_dim // 2
        exponents = torch.arange(0, self.sizes.head_dim, 2, dtype=torch.float32) / (2 * half)
        frequencies = 1.0 / self.sizes.rope_theta**exponents
        positions = torch.arange(self.sizes.max_positions, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), dim=1).to(like)
        self.sin = torch.cat((-sin, sin), dim=1).to(like)

    def forward(self, positions: Tensor, like: Tensor) -> Rotation:
        """Look up [row, token] positions."""
        if len(self.cos) == 0 or self.cos.device != like.device or self.cos.dtype != like.dtype:
            self.fill(like)
        return Rotation(self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2))


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32; the weight multiplies after the cast back."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(self.eps))
        return (wide * scale).to(hidden.dtype) * self.weight


@dataclass(frozen=True)
class PassContext:
    """What every layer of one pass shares.

    Without a mask, attention is causal when `is_causal`, else it sees every slot that is read.
    `rows_out`, if given, are the token indices [row, kept] whose output is wanted: the last layer
    then computes only those.
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

    def forward(self, hidden: Tensor, context: PassContext, cache: LayerCache | None) -> Tensor:
        """Attend from every token to itself, the cache and its predecessors."""
        split = self.num_heads + self.num_kv_heads
        fused = self.qkv(hidden).unflatten(2, (-1, self.head_dim))
        context.rotation.apply_(fused[:, :, :split])
        queries = fused[:, :, : self.num_heads]
        keys_values = fused[:, :, self.num_heads :].unflatten(2, (2, self.num_kv_heads))
        if cache is None:
            keys, values = keys_values[:, :, 0], keys_values[:, :, 1]
        else:
            keys, values = cache.append(keys_values)
        if context.rows_out is not None:
            queries = take_rows(queries, context.rows_out)
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
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

    def forward(self, hidden: Tensor, context: PassContext, cache: LayerCache | None) -> Tensor:
        """Return the new residual stream, of the wanted rows only if the context names some."""
        mixed = self.attention(self.attention_norm(hidden), context, cache)
        if context.rows_out is not None:
            hidden = take_rows(hidden, context.rows_out)
        hidden = hidden + mixed
        lowered: Tensor = self.mlp(self.mlp_norm(hidden))
        return hidden + lowered


class LlamaDecoder(nn.Module):
    """Embeddings, layers, final norm and head."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.rotary = RotaryTable(sizes)

    def forward(self, embeds: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, of whole sequences at once and without a cache.

        For training and for tests: causal unless a mask [row, 1, token, token] says otherwise.
        """
        positions = torch.arange(embeds.shape[1], device=embeds.device).expand(embeds.shape[:2])
        rotation = self.rotary(positions, embeds)
        context = PassContext(rotation, mask=mask, is_causal=mask is None)
        for layer in self.layers:
            embeds = layer(embeds, context, None)
        hidden: Tensor = self.norm(embeds)
        return hidden

    def run(self, tokens: "PassInput", cache: KVCache) -> Tensor:
        """One pass through the cache; hidden states after the final norm, of `rows_out` if given.

        Every layer but the last computes every token, because later layers read their keys.
        """
        hidden = tokens.embeds
        num_rows, last = hidden.shape[0], len(self.layers) - 1
        rotation = self.rotary(tokens.positions, hidden)
        context = PassContext(rotation, tokens.mask, tokens.is_causal)
        for index, layer in enumerate(self.layers):
            if index == last and tokens.rows_out is not None:
                context = tokens.last_layer(rotation)
            hidden = layer(hidden, context, cache.layer(index, num_rows, tokens.append))
        normed: Tensor = self.norm(hidden)
        return normed


@dataclass(frozen=True)
class PassInput:
    """The tokens of one pass, where they stand and what they may see."""

    embeds: Tensor  # [row, token, width]
    positions: Tensor  # [row, token] int64
    append: Append
    mask: Tensor | None = None  # [row, 1, token, slot] bool
    is_causal: bool = False
    rows_out: Tensor | None = None  # [row, kept] int64

    def last_layer(self, rotation: Rotation) -> PassContext:
        """The context of the layer that computes the wanted rows only.

        Fewer queries than slots are no longer causal by shape, so the mask is spelt out.
        """
        if self.rows_out is None:
            return PassContext(rotation, self.mask, self.is_causal)
        if self.mask is not None:
            mask = take_rows(self.mask.squeeze(1), self.rows_out).unsqueeze(1)
        else:
            slots = torch.arange(self.append.read, device=self.embeds.device)
            mask = (slots <= self.rows_out[:, :, None]).unsqueeze(1)
        return PassContext(rotation, mask, rows_out=self.rows_out)


def take_rows(values: Tensor, indices: Tensor) -> Tensor:
    """Pick [row, kept] indices along the second axis of [row, token, ...]."""
    shape = (*indices.shape, *(1,) * (values.dim() - 2))
    return values.gather(1, indices.view(shape).expand(-1, -1, *values.shape[2:]))
