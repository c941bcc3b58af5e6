"""Inference passes of a Llama decoder through its cache: the fast twin of `LlamaDecoder.forward`.

The arithmetic is the same. What is left out is what costs time on small models: module calls,
views made anew in every layer, separate additions. Weights are looked up once, so parameters must
not be replaced afterwards.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.cpu_products import (
    AS_THEY_COME,
    PADDED,
    Rows,
    can_be_batch_invariant,
    find_rows,
    pack,
)
from deft_policies.model.kv_cache import CacheWindow
from deft_policies.model.llama import Attention, Layer, LlamaDecoder, RMSNorm, added_mask
from deft_policies.model.quantization import Fp8Linear, Fp8Rows

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels


class LlamaPasses:
    """Runs passes of a decoder whose weights do not change any more.

    What `packs` cannot be recorded: see `Projection`. In bfloat16 it is batch-invariant, too, as
    passes with fused kernels are.
    """

    def __init__(self, decoder: LlamaDecoder, packs: bool = False) -> None:
        self._sizes = decoder.sizes
        self._kernels = kernels = decoder.kernels
        self._rotary = decoder.rotary
        self._layers = [_LayerWeights(layer, kernels, packs) for layer in decoder.layers]
        self._norm = _Norm(decoder.norm, kernels)
        is_invariant = packs and can_be_batch_invariant(decoder.embedding.weight)
        self.head = Projection(decoder.head, kernels, packs=is_invariant)
        # None: products get the rows that there are.
        self.rows = self._find_rows(decoder) if is_invariant or self.head.is_fused else None
        if self.rows is not None and self.rows.in_blocks:
            for one in (self.head, *(one for layer in self._layers for one in layer.projections)):
                one.rows = self.rows

    def run(
        self,
        embeds: Tensor,
        positions: Tensor | int,
        window: CacheWindow | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        rows_out: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [row, token, width], of tokens [row, token, width].

        `positions` are int64 [row, token], or that of the first token in every row; what tokens may
        see, by a bool `mask` [row, 1, token or 1, slot], is said by `Attention`. With `rows_out`
        [row, kept], only those tokens' output is wanted, and the last layer computes no others.
        Every layer but the last computes every token, because later layers read their keys.
        """
        attend = self._attention(embeds, positions, window, mask, is_causal)
        # A copy, because layers add to it in place.
        hidden, branch = self.padded(embeds.flatten(0, 1).clone()), None
        num_out = len(embeds) * embeds.shape[1]
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            fused = layer.qkv.apply(layer.attention_norm.apply(hidden, branch))
            if index == last and rows_out is not None:
                attend = attend.of_rows_out(rows_out)
                num_out = rows_out.numel()
                hidden = attend.keep(hidden)
            branch = layer.out.add_to(hidden, attend.mix(index, fused))
            gate_up = layer.gate_up.apply(layer.mlp_norm.apply(hidden, branch))
            branch = layer.down.add_to(hidden, self._open(gate_up, layer.down))
        normed = self._norm.plain(hidden, branch)[:num_out]
        return normed.view(len(embeds), -1, normed.shape[1])

    def padded(self, rows: Tensor) -> Tensor:
        """[row, width] as its products need it."""
        return rows if self.rows is None else self.rows.pad(rows)

    def _find_rows(self, decoder: LlamaDecoder) -> Rows:
        layer = self._layers[0]
        sizes = decoder.sizes
        inner = sizes.num_heads * sizes.head_dim
        fused = inner + 2 * sizes.num_kv_heads * sizes.head_dim
        return find_rows(
            (
                (sizes.width, fused, layer.qkv.apply),
                (inner, sizes.width, layer.out.apply),
                (sizes.width, 2 * sizes.mlp_width, layer.gate_up.apply),
                (sizes.mlp_width, sizes.width, layer.down.apply),
                (sizes.width, decoder.head.out_features, self.head.apply),
            ),
            decoder.embedding.weight,
            AS_THEY_COME if self.head.is_fused else PADDED,
        )

    def _attention(
        self,
        embeds: Tensor,
        positions: Tensor | int,
        window: CacheWindow | None,
        mask: Tensor | None,
        is_causal: bool,
    ) -> Attention:
        sizes, kernels = self._sizes, self._kernels
        cos, sin = self._rotary(positions, embeds)
        if kernels is not None and window is not None:
            seen = _seen(embeds.shape[1], window, mask, is_causal)
            ends = (seen * torch.arange(1, seen.shape[3] + 1, device=seen.device)).amax(3)
            mask = added_mask(seen, torch.float32)
            return _FusedAttention(
                sizes, cos, sin, mask=mask, ends=ends[:, 0], window=window, kernels=kernels
            )
        rows = self.rows if kernels is None else None
        if mask is not None:
            mask = added_mask(mask, embeds.dtype if rows is None else torch.float64)
        shared = (sizes, cos, sin, mask, is_causal)
        if rows is not None:
            num_tokens = embeds.shape[0] * embeds.shape[1]
            mixed = self.padded(embeds.new_zeros(num_tokens, sizes.num_heads * sizes.head_dim))
            return _InvariantAttention(*shared, window, rows=rows, mixed=mixed)
        return Attention(*shared, window)

    def _open(self, gate_up: Tensor, reader: "Projection") -> "Tensor | Fp8Rows":
        """silu(gate) * up."""
        if self._kernels is not None:
            fused = self._kernels
            return (fused.silu_times_fp8 if reader.is_fp8 else fused.silu_times)(gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate).mul_(up)


class Projection:
    """A weight, ready to multiply [token, in] from the right, and a bias where there is one.

    One in fp8 takes rows that are quantised, or quantises them.
    """

    def __init__(
        self, linear: nn.Module, kernels: "FusedKernels | None" = None, packs: bool = False
    ) -> None:
        """Remember the weight; it must not be replaced afterwards, nor changed if it is packed.

        A small one that `packs` is copied into a layout that a CPU multiplies faster, half the size
        in float32 where float16 holds its numbers. In bfloat16 it is then multiplied in that layout
        always, and added afterwards, so that rows can be computed alike.
        """
        self.rows: Rows | None = None  # None: products get the rows that there are
        self._fused: FusedKernels | None = None  # what multiplies
        self._fp8 = linear if isinstance(linear, Fp8Linear) else None
        self._quantise = Fp8Rows.of if kernels is None else kernels.quantise_rows
        if self._fp8 is not None:
            return
        assert isinstance(linear, nn.Linear)
        self._weight, self._bias = linear.weight, linear.bias
        # Quantised weights are tensors of another class, and only know `linear`.
        is_plain = type(linear.weight) is nn.Parameter and type(linear.weight.data) is Tensor
        self._turned = linear.weight.detach().t() if is_plain else None
        self._packed = pack(linear.weight.detach()) if packs and is_plain else None
        self._adds_later = packs and can_be_batch_invariant(linear.weight)
        if is_plain and kernels is not None and kernels.multiplies(linear.weight):
            self._fused = kernels

    @property
    def is_fp8(self) -> bool:
        """Whether it is best given rows in fp8."""
        return self._fp8 is not None

    @property
    def is_fused(self) -> bool:
        """Whether a fused kernel multiplies."""
        return self._fused is not None

    def apply(self, inputs: Tensor | Fp8Rows) -> Tensor:
        """Multiply [token, in]."""
        if self._fp8 is not None:
            rows = inputs if isinstance(inputs, Fp8Rows) else self._quantise(inputs)
            return self._fp8.multiply(rows)
        assert isinstance(inputs, Tensor)
        if self.rows is not None:
            return self.rows.multiply(self._multiply, inputs)
        return self._multiply(inputs)

    def apply_some(self, inputs: Tensor, rows: slice) -> Tensor:
        """Multiply [token, in] by some rows of a weight that is as it was."""
        if self._fused is not None:
            return self._fused.product(inputs, self._weight[rows])
        return functional.linear(inputs, self._weight[rows])

    def _multiply(self, inputs: Tensor) -> Tensor:
        if self._fused is not None:
            return self._fused.product(inputs, self._weight, self._bias)
        if self._packed is not None and inputs.shape[0] >= self._packed.least_rows:
            found = self._packed.product(inputs)
        elif self._turned is None:
            found = functional.linear(inputs, self._weight)
        else:
            found = torch.mm(inputs, self._turned)
        return found if self._bias is None else found.add_(self._bias)

    def add_to(self, residual: Tensor, inputs: Tensor | Fp8Rows) -> Tensor | None:
        """Multiply [token, in] and add to [token, out] in place: else that is copied first.

        Returns what is still to be added: not every product can add at once.
        """
        if isinstance(inputs, Fp8Rows) or self._fp8 is not None or self._turned is None:
            return self.apply(inputs)
        if self._fused is not None:
            self._fused.product(inputs, self._weight, residual=residual)
            return None
        if self._adds_later or (
            self._packed is not None and inputs.shape[0] >= self._packed.least_rows
        ):
            return self.apply(inputs)
        residual.addmm_(inputs, self._turned)
        return None


class _Norm:
    """`RMSNorm` with as few kernels as it takes: on a CPU they cost more than the arithmetic."""

    def __init__(
        self, norm: nn.Module, kernels: "FusedKernels | None", is_fp8: bool = False
    ) -> None:
        """Where what reads it `is_fp8`, fused kernels quantise in the same launch."""
        assert isinstance(norm, RMSNorm)
        self._is_fp8 = is_fp8
        weight, eps = norm.weight, norm.eps
        self._kernels = kernels
        self._number = eps
        self._weight = weight.detach()
        self._eps = torch.tensor(eps, device=weight.device, dtype=torch.float32)
        self._share = 1.0 / len(weight)
        self._is_float32 = weight.dtype == torch.float32

    def apply(self, hidden: Tensor, branch: Tensor | None) -> Tensor | Fp8Rows:
        """Add what is still to be added, in place, and normalise."""
        if self._kernels is not None and self._is_fp8:
            return self._kernels.rms_norm_fp8(hidden, branch, self._weight, self._number)
        return self.plain(hidden, branch)

    def plain(self, hidden: Tensor, branch: Tensor | None) -> Tensor:
        """In the format of `hidden`."""
        if branch is not None:
            hidden.add_(branch)
        if self._kernels is not None:
            return self._kernels.rms_norm(hidden, self._weight, self._number)
        wide = hidden if self._is_float32 else hidden.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()
        if self._is_float32:
            return wide.mul(scale).mul_(self._weight)
        return wide.mul_(scale).to(hidden.dtype).mul_(self._weight)


class _LayerWeights:
    """What one layer multiplies with."""

    def __init__(self, layer: nn.Module, kernels: "FusedKernels | None", packs: bool) -> None:
        assert isinstance(layer, Layer)
        self.qkv = Projection(layer.attention.qkv, kernels, packs)
        self.out = Projection(layer.attention.out, kernels, packs)
        self.gate_up = Projection(layer.mlp.gate_up, kernels, packs)
        self.down = Projection(layer.mlp.down, kernels, packs)
        self.projections = (self.qkv, self.out, self.gate_up, self.down)
        self.attention_norm = _Norm(layer.attention_norm, kernels, self.qkv.is_fp8)
        self.mlp_norm = _Norm(layer.mlp_norm, kernels, self.gate_up.is_fp8)


@dataclass(frozen=True)
class _InvariantAttention(Attention):
    """The same with sums in float64. Tokens come and go padded."""

    rows: Rows = field(kw_only=True)
    mixed: Tensor = field(kw_only=True)  # [row * token, inner], padded: written in every layer

    @property
    def sums_in(self) -> torch.dtype:
        """Precise enough for any order of the sums."""
        return torch.float64

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """Round to the format of the values only at the end."""
        num_rows, num_tokens = self.cos.shape[:2]
        by_token = self.attend(layer, fused[: num_rows * num_tokens]).transpose(1, 2)
        num_mixed = num_rows * by_token.shape[1]
        self.mixed[:num_mixed].view(by_token.shape).copy_(by_token)
        return self.mixed[: num_mixed + -num_mixed % self.rows.multiple]

    def keep(self, hidden: Tensor) -> Tensor:
        """The same, padded."""
        return self.rows.pad(super().keep(hidden))


@dataclass(frozen=True)
class _FusedAttention(Attention):
    """The same in three launches, which have a mask always: one rotates and appends, two look."""

    mask: Tensor = field(kw_only=True)
    ends: Tensor = field(kw_only=True)  # [row, token]: no slot is seen from there on
    window: CacheWindow = field(kw_only=True)
    kernels: "FusedKernels" = field(kw_only=True)

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """Slots are split among programs where queries are few."""
        assert self.window.slots is not None
        head_dim = self.sizes.head_dim
        rotation = (self.cos.reshape(-1, head_dim), self.sin.reshape(-1, head_dim))
        cache = self.window.targets[layer]  # all rows: slots are counted from the first
        self.kernels.rotate_append(fused, rotation, cache, self.window.slots, self.sizes)
        cache = self.window.layers[layer]
        return self.kernels.attend(self.keep(fused), cache, self.mask, self.ends, self.sizes)

    def of_rows_out(self, rows_out: Tensor) -> Attention:
        """The same, with their ends."""
        found = super().of_rows_out(rows_out)
        assert isinstance(found, _FusedAttention)
        return replace(found, ends=self.ends.gather(1, rows_out))


def _seen(num_tokens: int, window: CacheWindow, mask: Tensor | None, is_causal: bool) -> Tensor:
    """[row, 1, token, slot]: what each token of a pass sees."""
    num_rows, _, read = window.keys[0].shape[:3]
    if mask is None:
        mask = torch.ones(num_tokens, read, dtype=torch.bool, device=window.keys[0].device)
        mask = mask.tril() if is_causal else mask
    return mask.expand(num_rows, 1, num_tokens, read)
