"""Inference passes of a Llama decoder through its cache: the fast twin of `LlamaDecoder.forward`.

The arithmetic is the same. What is left out is what costs time on small models: module calls,
views made anew in every layer, separate additions. `LlamaPasses.run` is a pass by torch's own
operations, a CPU's and that of a GPU without fused kernels; `_run_fused` is a GPU's with them.
What multiplies and what normalises is chosen once, when a model is loaded.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from deft_policies.model.cpu_products import (
    AS_THEY_COME,
    PADDED,
    Rows,
    can_be_batch_invariant,
    find_rows,
)
from deft_policies.model.fused_attention import FusedAttention
from deft_policies.model.llama import GATES, Layer, LlamaDecoder, RMSNorm
from deft_policies.model.products import FusedProduct, Product, product_of
from deft_policies.model.quantization import Matrix

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels


class MixesTokens(Protocol):
    """The attention of a pass, whatever its tokens are laid out by."""

    @property
    def num_out(self) -> int:
        """Tokens whose output is wanted."""

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """From queries, keys and values of every token to mixed values [token out, inner].

        Appends keys and values to the cache. More rows may follow; they are returned, too.
        """

    def keep(self, hidden: Tensor) -> Tensor:
        """Of [token, width] the tokens whose output is wanted."""


@dataclass(frozen=True)
class _Layer:
    """What one layer computes with."""

    attention_norm: "Norm"
    qkv: Product
    out: Product
    mlp_norm: "Norm"
    gate_up: Product
    down: Product

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True)
class _FusedLayer:
    """The same where fused kernels compute all of it."""

    attention_norm: "Norm"
    qkv: Matrix
    out: Matrix
    mlp_norm: "Norm"
    gate_up: Matrix
    down: Matrix


class LlamaPasses:
    """Runs passes of a decoder whose weights do not change any more.

    What `packs` cannot be captured: see `product_of`. In bfloat16 it is batch-invariant, too, as
    passes with fused kernels are.
    """

    def __init__(self, decoder: LlamaDecoder, packs: bool = False) -> None:
        self._sizes = decoder.sizes
        self._kernels = kernels = decoder.kernels
        self._layers = [_layer_of(layer, kernels, packs) for layer in decoder.layers]
        self._norm = norm_of(decoder.norm, kernels)
        # Layers, counted from 1, behind which hidden states are kept for who reads several.
        self.read_layers: tuple[int, ...] = ()
        self._fused = _fused_layers(self._layers)
        is_invariant = packs and can_be_batch_invariant(decoder.embedding.weight)
        self.head = product_of(decoder.head, kernels, packs=is_invariant)
        self._head_is_fused = isinstance(self.head, FusedProduct)
        # None: products get the rows that there are.
        self.rows = self._find_rows(decoder) if is_invariant or self._head_is_fused else None
        if self.rows is not None and self.rows.in_blocks:
            for one in (
                self.head,
                *(product for layer in self._layers for product in layer.products),
            ):
                one.rows = self.rows

    @property
    def is_fused(self) -> bool:
        """Whether fused kernels multiply by every matrix of the layers."""
        return self._fused is not None

    def run(
        self,
        embeds: Tensor,
        attention: MixesTokens,
        last: MixesTokens | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [token, width], of tokens [token, width].

        Layers add to `embeds` in place.
        `last` is the attention of the last layer, where that computes only some tokens. Every other
        layer computes every token, because later layers read their keys. The hidden states behind
        each of `read_layers` are appended to `states`, of the same tokens.
        """
        if isinstance(attention, FusedAttention) and self._fused is not None:
            assert last is None or isinstance(last, FusedAttention)
            return self._run_fused(self._fused, embeds, attention, last, states)
        hidden, branch = self.padded(embeds), None
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
        layers: list[_FusedLayer],
        embeds: Tensor,
        attention: FusedAttention,
        last: FusedAttention | None,
        states: list[Tensor] | None,
    ) -> Tensor:
        """`run` where every matrix is multiplied by a fused kernel: seven launches a layer."""
        kernels, hidden = attention.kernels, embeds
        final = len(layers) - 1
        for index, layer in enumerate(layers):
            self._note(index, hidden, last or attention, states)
            normed = layer.attention_norm.apply(hidden, None)
            queries = attention.project(index, normed, layer.qkv)
            if index == final and last is not None:
                attention, hidden = last, last.keep(hidden)
            kernels.product(attention.attend(index, queries), layer.out, residual=hidden)
            normed = layer.mlp_norm.apply(hidden, None)
            opened = kernels.open(normed, layer.gate_up, self._sizes.gate)
            kernels.product(opened, layer.down, residual=hidden)
        return self._norm.apply(hidden, None)

    def _note(
        self, layer: int, hidden: Tensor, wanted: MixesTokens, states: list[Tensor] | None
    ) -> None:
        """Copy the hidden states in front of a layer, counted from 0, if they are read."""
        if states is not None and layer in self.read_layers:
            kept = wanted.keep(hidden)
            states.append((kept.clone() if kept is hidden else kept)[: wanted.num_out])

    def score(self, hidden: Tensor, columns: slice | None = None) -> Tensor:
        """The head over some columns or all, of [token, width]; in the format of the weights."""
        padded = self.padded(hidden)
        found = (
            self.head.apply(padded) if columns is None else self.head.apply_some(padded, columns)
        )
        return found[: len(hidden)]

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
            AS_THEY_COME if self._head_is_fused else PADDED,
        )

    def _open(self, gate_up: Tensor) -> Tensor:
        """gate(gate) * up."""
        if self._kernels is not None:
            return self._kernels.gate_times_up(gate_up, self._sizes.gate)
        gate, up = gate_up.chunk(2, dim=1)
        return GATES[self._sizes.gate](gate).mul_(up)


def _layer_of(layer: nn.Module, kernels: "FusedKernels | None", packs: bool) -> _Layer:
    assert isinstance(layer, Layer)
    attention, mlp = layer.attention, layer.mlp
    return _Layer(
        norm_of(layer.attention_norm, kernels),
        product_of(attention.qkv, kernels, packs),
        product_of(attention.out, kernels, packs),
        norm_of(layer.mlp_norm, kernels),
        product_of(mlp.gate_up, kernels, packs),
        product_of(mlp.down, kernels, packs),
    )


def _fused_layers(layers: list[_Layer]) -> list[_FusedLayer] | None:
    """The layers' matrices; None where not all of them are multiplied by fused kernels."""
    fused = []
    for layer in layers:
        matrices = [
            product.matrix for product in layer.products if isinstance(product, FusedProduct)
        ]
        if len(matrices) < len(layer.products):
            return None
        qkv, out, gate_up, down = matrices
        norms = layer.attention_norm, layer.mlp_norm
        fused.append(_FusedLayer(norms[0], qkv, out, norms[1], gate_up, down))
    return fused


class Norm(Protocol):
    """`RMSNorm` of [token, width]."""

    def apply(self, hidden: Tensor, branch: Tensor | None) -> Tensor:
        """Add what is still to be added, in place, and normalise."""


def norm_of(norm: nn.Module, kernels: "FusedKernels | None") -> Norm:
    """By a fused kernel, or with as few of torch's as it takes, which cost more than arithmetic."""
    assert isinstance(norm, RMSNorm)
    if kernels is not None:
        return _FusedNorm(norm, kernels)
    return _Float32Norm(norm) if norm.weight.dtype == torch.float32 else _NarrowNorm(norm)


class _FusedNorm:
    def __init__(self, norm: RMSNorm, kernels: "FusedKernels") -> None:
        self._weight, self._eps, self._kernels = norm.weight.detach(), norm.eps, kernels

    def apply(self, hidden: Tensor, branch: Tensor | None) -> Tensor:
        if branch is not None:
            hidden.add_(branch)
        return self._kernels.rms_norm(hidden, self._weight, self._eps)


class _Float32Norm:
    def __init__(self, norm: RMSNorm) -> None:
        self._weight = weight = norm.weight.detach()
        self._eps = torch.tensor(norm.eps, device=weight.device, dtype=torch.float32)
        self._share = 1.0 / len(weight)

    def apply(self, hidden: Tensor, branch: Tensor | None) -> Tensor:
        if branch is not None:
            hidden.add_(branch)
        return hidden.mul(self._scale(hidden)).mul_(self._weight)

    def _scale(self, wide: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()


class _NarrowNorm(_Float32Norm):
    """Of numbers with fewer bits: in float32, and rounded before the weight, as Llama does."""

    def apply(self, hidden: Tensor, branch: Tensor | None) -> Tensor:
        if branch is not None:
            hidden.add_(branch)
        wide = hidden.float()
        return wide.mul_(self._scale(wide)).to(hidden.dtype).mul_(self._weight)
