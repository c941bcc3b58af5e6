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

from deft_policies.model.kernels.fp8 import Fp8Linear, Fp8Rows
from deft_policies.model.kv_cache import Append, CacheWindow, KVCache
from deft_policies.model.llama import Layer, LlamaDecoder, LlamaSizes, RMSNorm, Rotation

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels

_ALIGNMENT = 16  # of the rows of a mask: attention copies others, in every layer
_MOST_PACKED = 2**22  # numbers of a matrix that may lie in memory twice
_MOST_QUERIES = 64  # tokens of a row whose attention is split: more fill a device by themselves


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
    """Runs passes of a decoder whose weights do not change any more.

    What `packs` cannot be recorded: see `Projection`.
    """

    def __init__(self, decoder: LlamaDecoder, packs: bool = False) -> None:
        self._sizes = decoder.sizes
        self._kernels = kernels = decoder.kernels
        self._rotary = decoder.rotary
        self._layers = [_LayerWeights(layer, kernels, packs) for layer in decoder.layers]
        self._norm = _Norm(decoder.norm, kernels)

    def run(self, tokens: PassInput, cache: KVCache | None) -> Tensor:
        """Hidden states after the final norm, [row, token, width], of `rows_out` if given.

        Every layer but the last computes every token, because later layers read their keys.
        Without a cache the tokens see each other alone, and nothing is kept of them.
        """
        num_rows, _, width = tokens.embeds.shape
        attend = self._attention(tokens, cache)
        # A copy, because layers add to it in place.
        hidden, branch = tokens.embeds.reshape(-1, width).clone(), None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if index == last and tokens.rows_out is not None:
                attend = attend.of_rows_out(tokens.rows_out)
            fused = layer.qkv.apply(layer.attention_norm.apply(hidden, branch))
            mixed = attend.mix(index, fused)
            hidden = attend.keep(hidden)
            branch = layer.out.add_to(hidden, mixed)
            gate_up = layer.gate_up.apply(layer.mlp_norm.apply(hidden, branch))
            branch = layer.down.add_to(hidden, self._open(gate_up, layer.down))
        return self._norm.plain(hidden, branch).view(num_rows, -1, width)

    def _attention(self, tokens: PassInput, cache: KVCache | None) -> "_Attention":
        num_rows, num_tokens = tokens.positions.shape
        heads = self._sizes
        rotation = self._rotary(tokens.positions, tokens.embeds)
        tokens = replace(tokens, mask=_added(tokens.mask, tokens.embeds.dtype))
        if cache is None:
            return _Attention(heads, rotation, tokens, None)
        append = tokens.append
        if self._kernels is not None and append.slots is None:
            rows = torch.arange(num_rows, device=rotation.cos.device)[:, None] + append.first_row
            rows = rows * cache.length
            here = append.start + torch.arange(num_tokens, device=rows.device)
            append = replace(append, slots=(rows + here).flatten())
        window = cache.open(num_rows, num_tokens, append)
        if self._kernels is None:
            return _Attention(heads, rotation, tokens, window)
        return _FusedAttention(heads, rotation, tokens, window, kernels=self._kernels)

    def _open(self, gate_up: Tensor, reader: "Projection") -> "Tensor | Fp8Rows":
        """silu(gate) * up."""
        if self._kernels is not None:
            fused = self._kernels
            return (fused.silu_times_fp8 if reader.is_fp8 else fused.silu_times)(gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate).mul_(up)


class Projection:
    """A weight, ready to multiply [token, in] from the right. Without a bias.

    One in fp8 takes rows that are quantised, or quantises them.
    """

    def __init__(
        self, linear: nn.Module, kernels: "FusedKernels | None" = None, packs: bool = False
    ) -> None:
        """Remember the weight; it must not be replaced afterwards, nor changed if it is packed.

        A small one in float32 that `packs` is copied into the layout of oneDNN on a CPU: half the
        time of torch's own product, which lays the weight out in every call.
        """
        self._fp8 = linear if isinstance(linear, Fp8Linear) else None
        self._quantise = Fp8Rows.of if kernels is None else kernels.quantise_rows
        if self._fp8 is not None:
            return
        assert isinstance(linear, nn.Linear)
        self._weight = linear.weight
        # Quantised weights are tensors of another class, and only know `linear`.
        is_plain = type(linear.weight) is nn.Parameter and type(linear.weight.data) is Tensor
        self._turned = linear.weight.detach().t() if is_plain else None
        self._packed: Tensor | None = None
        is_small = is_plain and linear.weight.numel() <= _MOST_PACKED
        is_float32 = linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32
        has_layout = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if packs and is_small and is_float32 and has_layout:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @property
    def is_fp8(self) -> bool:
        """Whether it is best given rows in fp8."""
        return self._fp8 is not None

    def apply(self, inputs: Tensor | Fp8Rows) -> Tensor:
        """Multiply [token, in]."""
        if self._fp8 is not None:
            rows = inputs if isinstance(inputs, Fp8Rows) else self._quantise(inputs)
            return self._fp8.multiply(rows)
        assert isinstance(inputs, Tensor)
        if self._packed is not None:
            pointwise = torch.ops.mkldnn._linear_pointwise
            multiplied: Tensor = pointwise(inputs, self._packed, None, "none", [], "")
            return multiplied
        if self._turned is None:
            return functional.linear(inputs, self._weight)
        return torch.mm(inputs, self._turned)

    def add_to(self, residual: Tensor, inputs: Tensor | Fp8Rows) -> Tensor | None:
        """Multiply [token, in] and add to [token, out] in place: else that is copied first.

        Returns what is still to be added: not every product can add at once.
        """
        if isinstance(inputs, Fp8Rows) or self._fp8 is not None or self._packed is not None:
            return self.apply(inputs)
        if self._turned is None:
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
        self.attention_norm = _Norm(layer.attention_norm, kernels, self.qkv.is_fp8)
        self.mlp_norm = _Norm(layer.mlp_norm, kernels, self.gate_up.is_fp8)


@dataclass(frozen=True)
class _Attention:
    """The attention of one pass: everything its layers share."""

    heads: LlamaSizes
    rotation: Rotation
    tokens: PassInput
    window: CacheWindow | None
    kept: Tensor | None = None  # [row * kept], flat indices of the tokens whose output is wanted

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """From fused projections [row * token, ...] to mixed values [row * kept, ...]."""
        num_rows, num_tokens = self.tokens.positions.shape
        num_heads, num_kv_heads = self.heads.num_heads, self.heads.num_kv_heads
        split = fused.view(num_rows, num_tokens, num_heads + 2 * num_kv_heads, -1)
        keys, values = self.append(layer, split)
        queries = split[:, :, :num_heads]
        if self.kept is not None:
            queries = queries.flatten(2).flatten(0, 1).index_select(0, self.kept)
            queries = queries.view(num_rows, -1, num_heads, split.shape[3])
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys,
            values,
            attn_mask=self.tokens.mask,
            is_causal=self.tokens.is_causal,
            enable_gqa=num_kv_heads != num_heads,
        )
        return mixed.transpose(1, 2).reshape(-1, num_heads * split.shape[3])

    def append(self, layer: int, split: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate [row, token, head, head_dim] in place and append keys and values to the cache.

        Returns what is attended to, [row, head, slot, head_dim], the tokens of this pass included.
        """
        num_rotated = self.heads.num_heads + self.heads.num_kv_heads
        self.rotation.apply_(split[:, :, :num_rotated])
        keys_values = split[:, :, self.heads.num_heads :]
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
        if self.tokens.mask is None:
            mask = _added((slots <= rows_out[:, :, None]).unsqueeze(1), self.tokens.embeds.dtype)
        else:
            index = rows_out[:, None, :, None].expand(-1, -1, -1, len(slots))
            mask = self.tokens.mask.expand(len(rows_out), -1, -1, -1).gather(2, index)
        tokens = replace(self.tokens, mask=mask, is_causal=False)
        return replace(self, tokens=tokens, kept=kept)


@dataclass(frozen=True)
class _FusedAttention(_Attention):
    """The same in fewer launches: one to rotate and append, two to look where queries are few."""

    window: CacheWindow
    kernels: "FusedKernels" = field(kw_only=True)

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """Split the slots among programs, unless there are queries enough to fill the device."""
        mask, num_tokens = self.tokens.mask, self.tokens.positions.shape[1]
        if mask is None or self.kept is not None or num_tokens > _MOST_QUERIES:
            return super().mix(layer, fused)
        self._append(layer, fused)
        return self.kernels.attend(fused, self.window.layers[layer], mask, self.heads)

    def append(self, layer: int, split: Tensor) -> tuple[Tensor, Tensor]:
        """In one launch."""
        self._append(layer, split.view(-1, split.shape[2] * split.shape[3]))
        return self.window.keys[layer], self.window.values[layer]

    def _append(self, layer: int, fused: Tensor) -> None:
        assert self.window.slots is not None
        head_dim = self.heads.head_dim
        rotation = (
            self.rotation.cos.reshape(-1, head_dim),
            self.rotation.sin.reshape(-1, head_dim),
        )
        cache = self.window.targets[layer]  # all rows: slots are counted from the first
        self.kernels.rotate_append(fused, rotation, cache, self.window.slots, self.heads)


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores, made once for all layers; rows lie at multiples of 16."""
    if mask is None:
        return None
    *shape, width = mask.shape
    room = torch.zeros(*shape, width + -width % _ALIGNMENT, dtype=dtype, device=mask.device)
    return room[..., :width].masked_fill_(~mask, float("-inf"))
