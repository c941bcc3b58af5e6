"""Inference passes of a Llama decoder through its cache: the fast twin of `LlamaDecoder.forward`.

The arithmetic is the same. What is left out is what costs time on small models: module calls,
views made anew in every layer, separate additions. Weights are looked up once, so parameters must
not be replaced afterwards.
"""

from typing import TYPE_CHECKING, Protocol

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
from deft_policies.model.fused_attention import FusedAttention
from deft_policies.model.llama import GATES, Layer, LlamaDecoder, RMSNorm
from deft_policies.model.quantization import Fp8Linear, Matrix

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels


class MixesTokens(Protocol):
    """The attention of a pass, whatever its tokens are laid out by."""

    @property
    def num_out(self) -> int:
        """Tokens whose output is wanted."""

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """From queries, keys and values of every token to mixed values [token out, inner].

        Appends keys and values to the cache. More rows may stand behind, given and returned.
        """

    def keep(self, hidden: Tensor) -> Tensor:
        """Of [token, width] the tokens whose output is wanted."""


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
        # Layers, counted from 1, behind which hidden states are kept for who reads several.
        self.read_layers: tuple[int, ...] = ()
        self.is_fused = decoder.sizes.gate == "silu" and all(
            one.is_fused for layer in self._layers for one in layer.projections
        )
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
        attention: MixesTokens,
        last: MixesTokens | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [token, width], of tokens [token, width].

        `last` is the attention of the last layer, where that computes only some tokens. Every other
        layer computes every token, because later layers read their keys. The hidden states behind
        each of `read_layers` are appended to `states`, of the same tokens.
        """
        if isinstance(attention, FusedAttention) and self.is_fused:
            assert last is None or isinstance(last, FusedAttention)
            return self._run_fused(attention.kernels, embeds, attention, last, states)
        # A copy, because layers add to it in place.
        hidden, branch = self.padded(embeds.clone()), None
        final = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            fused = layer.qkv.apply(layer.attention_norm.apply(hidden, branch))
            self._note(index, hidden, last or attention, states)
            if index == final and last is not None:
                attention = last
                hidden = self.padded(attention.keep(hidden))
            branch = layer.out.add_to(hidden, attention.mix(index, fused))
            gate_up = layer.gate_up.apply(layer.mlp_norm.apply(hidden, branch))
            branch = layer.down.add_to(hidden, self._open(gate_up))
        return self._norm.apply(hidden, branch)[: attention.num_out]

    def _run_fused(
        self,
        kernels: "FusedKernels",
        embeds: Tensor,
        attention: FusedAttention,
        last: FusedAttention | None,
        states: list[Tensor] | None,
    ) -> Tensor:
        """`run` where every matrix is multiplied by a fused kernel: seven launches a layer."""
        hidden = embeds.clone()
        final = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            self._note(index, hidden, last or attention, states)
            normed = layer.attention_norm.apply(hidden, None)
            queries = attention.project(index, normed, layer.qkv.matrix)
            if index == final and last is not None:
                attention, hidden = last, last.keep(hidden)
            kernels.product(attention.attend(index, queries), layer.out.matrix, residual=hidden)
            opened = kernels.open(layer.mlp_norm.apply(hidden, None), layer.gate_up.matrix)
            kernels.product(opened, layer.down.matrix, residual=hidden)
        return self._norm.apply(hidden, None)

    def _note(
        self, layer: int, hidden: Tensor, wanted: MixesTokens, states: list[Tensor] | None
    ) -> None:
        """Copy the hidden states in front of a layer, counted from 0, where somebody reads them."""
        if states is not None and layer in self.read_layers:
            kept = wanted.keep(hidden)
            states.append((kept.clone() if kept is hidden else kept)[: wanted.num_out])

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

    def _open(self, gate_up: Tensor) -> Tensor:
        """gate(gate) * up; fused kernels know SiLU alone."""
        if self._kernels is not None and self._sizes.gate == "silu":
            return self._kernels.silu_times(gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        return GATES[self._sizes.gate](gate).mul_(up)


class Projection:
    """A weight, ready to multiply [token, in] from the right, and a bias where there is one."""

    def __init__(
        self, linear: nn.Module, kernels: "FusedKernels | None" = None, packs: bool = False
    ) -> None:
        """Remember the weight; it must not be replaced afterwards, nor changed if it is packed.

        A small one that `packs` is copied into a layout that a CPU multiplies faster, half the size
        in float32 where float16 holds its numbers. In bfloat16 it is then multiplied in that layout
        always, and added afterwards, so that rows can be computed alike.
        """
        self.rows: Rows | None = None  # None: products get the rows that there are
        self._kernels = kernels
        self._matrix: Matrix | None = None  # what a fused kernel multiplies
        self._turned: Tensor | None = None
        self._packed = None
        self._adds_later = False
        self._linear = linear
        if isinstance(linear, Fp8Linear):
            self._matrix = None if kernels is None else linear.matrix
            return
        assert isinstance(linear, nn.Linear)
        self._weight, self._bias = linear.weight, linear.bias
        # Weights that torchao has quantised are tensors of another class, and only know `linear`.
        if type(linear.weight) is not nn.Parameter or type(linear.weight.data) is not Tensor:
            return
        weight = linear.weight.detach()
        self._turned = weight.t()
        self._packed = pack(weight) if packs else None
        self._adds_later = packs and can_be_batch_invariant(linear.weight)
        if kernels is not None and kernels.multiplies(linear.weight):
            self._matrix = Matrix(weight, None if linear.bias is None else linear.bias.detach())

    @property
    def is_fused(self) -> bool:
        """Whether a fused kernel multiplies."""
        return self._matrix is not None

    @property
    def matrix(self) -> Matrix:
        """What a fused kernel multiplies."""
        assert self._matrix is not None
        return self._matrix

    def apply(self, inputs: Tensor) -> Tensor:
        """Multiply [token, in]."""
        if self.rows is not None:
            return self.rows.multiply(self._multiply, inputs)
        return self._multiply(inputs)

    def apply_some(self, inputs: Tensor, rows: slice) -> Tensor:
        """Multiply [token, in] by some rows of a weight that is as it was."""
        if self._matrix is not None and self._kernels is not None:
            return self._kernels.product(inputs, Matrix(self._matrix.weight[rows]))
        return functional.linear(inputs, self._weight[rows])

    def _multiply(self, inputs: Tensor) -> Tensor:
        if self._matrix is not None and self._kernels is not None:
            return self._kernels.product(inputs, self._matrix)
        if isinstance(self._linear, Fp8Linear):
            return self._linear.multiply(inputs)
        if self._packed is not None and inputs.shape[0] >= self._packed.least_rows:
            found = self._packed.product(inputs)
        elif self._turned is None:
            found = functional.linear(inputs, self._weight)
        else:
            found = torch.mm(inputs, self._turned)
        return found if self._bias is None else found.add_(self._bias)

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor | None:
        """Multiply [token, in] and add to [token, out] in place.

        Returns what is still to be added: not every product can add at once.
        """
        if self._matrix is not None and self._kernels is not None:
            self._kernels.product(inputs, self._matrix, residual=residual)
            return None
        if (
            self._turned is None
            or self._adds_later
            or (self._packed is not None and inputs.shape[0] >= self._packed.least_rows)
        ):
            return self.apply(inputs)
        residual.addmm_(inputs, self._turned)
        return None


class _Norm:
    """`RMSNorm` with as few kernels as it takes: on a CPU they cost more than the arithmetic."""

    def __init__(self, norm: nn.Module, kernels: "FusedKernels | None") -> None:
        assert isinstance(norm, RMSNorm)
        weight, eps = norm.weight, norm.eps
        self._kernels = kernels
        self._number = eps
        self._weight = weight.detach()
        self._eps = torch.tensor(eps, device=weight.device, dtype=torch.float32)
        self._share = 1.0 / len(weight)
        self._is_float32 = weight.dtype == torch.float32

    def apply(self, hidden: Tensor, branch: Tensor | None) -> Tensor:
        """Add what is still to be added, in place, and normalise."""
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
        self.attention_norm = _Norm(layer.attention_norm, kernels)
        self.mlp_norm = _Norm(layer.mlp_norm, kernels)
