"""Inference passes of a Llama decoder through its cache: the fast twin of `LlamaDecoder.forward`.

The arithmetic is the same. What is left out is what costs time on small models: module calls,
views made anew in every layer, separate additions. Weights are looked up once, so parameters must
not be replaced afterwards.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.kv_cache import Append, CacheWindow, KVCache
from deft_policies.model.llama import Layer, LlamaDecoder, Rotation


@dataclass(frozen=True)
class PassInput:
    """The tokens of one pass, where they stand and what they may see.

    Without a mask, attention is causal when `is_causal`, else it sees every slot that is read.
    With `rows_out`, only those tokens' output is wanted, and the last layer computes no others.
    """

    embeds: Tensor  # [row, token, width]
    positions: Tensor  # [row, token] int64
    append: Append
    mask: Tensor | None = None  # [row, 1, token or 1, slot] bool
    is_causal: bool = False
    rows_out: Tensor | None = None  # [row, kept] int64

    @property
    def sees_alike(self) -> bool:
        """True if every token of a row sees the same slots, so that some need no other mask."""
        return not self.is_causal and (self.mask is None or self.mask.shape[2] == 1)


class LlamaPasses:
    """Runs passes of a decoder whose weights do not change any more."""

    def __init__(self, decoder: LlamaDecoder) -> None:
        self._sizes = decoder.sizes
        self._rotary = decoder.rotary
        self._layers = [_LayerWeights(layer) for layer in decoder.layers]
        self._norm = _Norm(decoder.norm)

    def run(self, tokens: PassInput, cache: KVCache | None) -> Tensor:
        """Hidden states after the final norm, [row, token, width], of `rows_out` if given.

        Every layer but the last computes every token, because later layers read their keys.
        Without a cache the tokens see each other alone, and nothing is kept of them.
        """
        num_rows, num_tokens, width = tokens.embeds.shape
        attend = _Attention(
            self._sizes.num_heads,
            self._sizes.num_kv_heads,
            self._rotary(tokens.positions, tokens.embeds),
            tokens,
            None if cache is None else cache.open(num_rows, num_tokens, tokens.append),
        )
        hidden = tokens.embeds.reshape(-1, width)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if index == last and tokens.rows_out is not None:
                attend = attend.of_rows_out(tokens.rows_out)
            fused = layer.qkv.apply(layer.attention_norm.apply(hidden))
            mixed = attend.mix(index, fused)
            hidden = layer.out.add_to(attend.keep(hidden), mixed)
            gate, up = layer.gate_up.apply(layer.mlp_norm.apply(hidden)).chunk(2, dim=1)
            hidden = layer.down.add_to(hidden, functional.silu(gate).mul_(up))
        return self._norm.apply(hidden).view(num_rows, -1, width)


class Projection:
    """A weight, ready to multiply [token, in] from the right. Without a bias."""

    def __init__(self, linear: nn.Linear) -> None:
        """Remember the weight; it must not be replaced afterwards."""
        self._weight = linear.weight
        # Quantised weights are tensors of another class, and only know `linear`.
        is_plain = type(linear.weight) is nn.Parameter and type(linear.weight.data) is Tensor
        self._turned = linear.weight.detach().t() if is_plain else None

    def apply(self, inputs: Tensor) -> Tensor:
        """Multiply [token, in]."""
        if self._turned is None:
            return functional.linear(inputs, self._weight)
        return torch.mm(inputs, self._turned)

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """Multiply [token, in] and add [token, out]."""
        if self._turned is None:
            return residual + functional.linear(inputs, self._weight)
        return torch.addmm(residual, inputs, self._turned)


class _Norm:
    """`RMSNorm` with as few kernels as it takes: on a CPU they cost more than the arithmetic."""

    def __init__(self, norm: nn.Module) -> None:
        weight, eps = norm.weight, norm.eps
        assert isinstance(weight, Tensor)
        self._weight = weight.detach()
        self._eps = torch.tensor(eps, device=weight.device, dtype=torch.float32)
        self._share = 1.0 / len(weight)
        self._is_float32 = weight.dtype == torch.float32

    def apply(self, hidden: Tensor) -> Tensor:
        wide = hidden if self._is_float32 else hidden.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()
        if self._is_float32:
            return wide.mul(scale).mul_(self._weight)
        return wide.mul_(scale).to(hidden.dtype).mul_(self._weight)


class _LayerWeights:
    """What one layer multiplies with."""

    def __init__(self, layer: nn.Module) -> None:
        assert isinstance(layer, Layer)
        self.attention_norm = _Norm(layer.attention_norm)
        self.qkv = Projection(layer.attention.qkv)
        self.out = Projection(layer.attention.out)
        self.mlp_norm = _Norm(layer.mlp_norm)
        self.gate_up = Projection(layer.mlp.gate_up)
        self.down = Projection(layer.mlp.down)


@dataclass(frozen=True)
class _Attention:
    """The attention of one pass: everything its layers share."""

    num_heads: int
    num_kv_heads: int
    rotation: Rotation
    tokens: PassInput
    window: CacheWindow | None
    kept: Tensor | None = None  # [row * kept], flat indices of the tokens whose output is wanted

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """From fused projections [row * token, ...] to mixed values [row * kept, ...]."""
        num_rows, num_tokens = self.tokens.positions.shape
        fused = fused.view(num_rows, num_tokens, self.num_heads + 2 * self.num_kv_heads, -1)
        num_rotated = self.num_heads + self.num_kv_heads
        self.rotation.apply_(fused[:, :, :num_rotated])
        keys, values = self._seen(layer, fused[:, :, self.num_heads :])
        queries = fused[:, :, : self.num_heads]
        if self.kept is not None:
            queries = queries.flatten(2).flatten(0, 1).index_select(0, self.kept)
            queries = queries.view(num_rows, -1, self.num_heads, fused.shape[3])
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys,
            values,
            attn_mask=self.tokens.mask,
            is_causal=self.tokens.is_causal,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        return mixed.transpose(1, 2).reshape(-1, self.num_heads * fused.shape[3])

    def _seen(self, layer: int, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """What is attended to, [row, head, slot, head_dim], the tokens of this pass included."""
        if self.window is None:
            keys, values = keys_values.transpose(1, 2).chunk(2, dim=1)
            return keys, values
        self.window.write(layer, keys_values)
        return self.window.keys[layer], self.window.values[layer]

    def keep(self, hidden: Tensor) -> Tensor:
        """The residual stream [row * token, width] of the tokens whose output is wanted."""
        return hidden if self.kept is None else hidden.index_select(0, self.kept)

    def of_rows_out(self, rows_out: Tensor) -> "_Attention":
        """The attention of the layer that computes the wanted tokens only.

        Fewer queries than slots are not causal by shape any more, so the mask is spelt out.
        """
        num_tokens = self.tokens.positions.shape[1]
        rows = torch.arange(len(rows_out), device=rows_out.device)[:, None] * num_tokens
        kept = (rows_out + rows).flatten()
        if self.tokens.sees_alike:
            return replace(self, kept=kept)
        slots = torch.arange(self.tokens.append.read, device=rows_out.device)
        mask = slots <= rows_out[:, :, None]
        if self.tokens.mask is not None:
            every = self.tokens.mask.expand(len(rows_out), -1, -1, -1)
            mask = every.flatten(0, 2).index_select(0, kept).view(mask.shape)
        tokens = replace(self.tokens, mask=mask.unsqueeze(1), is_causal=False)
        return replace(self, tokens=tokens, kept=kept)
