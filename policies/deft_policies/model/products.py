"""Products: weights that are ready to multiply [token, in] from the right, and biases with them.

How a weight is multiplied is chosen once, by `product_of`, when a model is loaded: by a kernel of
ours on a GPU, in a layout that a CPU multiplies faster, or by torch. It must not be replaced or
changed afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.cpu_products import Packed, Rows, can_be_batch_invariant, pack
from deft_policies.model.quantization import Matrix, NarrowLinear

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels


def product_of(
    linear: nn.Module, kernels: FusedKernels | None = None, packs: bool = False
) -> Product:
    """The product of a linear layer.

    With `packs` a small weight is copied into a layout that a CPU multiplies faster, half the size
    in float32 where float16 holds its numbers. Such products cannot be captured.
    """
    if isinstance(linear, NarrowLinear):
        return NarrowProduct(linear) if kernels is None else FusedProduct(kernels, linear.matrix)
    assert isinstance(linear, nn.Linear)
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    # Weights that torchao has quantised are tensors of another class, and only know `linear`.
    if type(linear.weight) is not nn.Parameter or type(linear.weight.data) is not Tensor:
        return QuantizedProduct(linear.weight, bias)
    if kernels is not None and kernels.multiplies(linear.weight):
        return FusedProduct(kernels, Matrix(weight, bias))
    adds_later = packs and can_be_batch_invariant(weight)
    packed = pack(weight) if packs else None
    if packed is None:
        return DenseProduct(weight, bias, adds_later)
    return PackedProduct(weight, bias, adds_later, packed)


class Product(ABC):
    """A weight and a bias, ready to multiply."""

    rows: Rows | None = None  # how many rows a product gets; None: those that there are

    @abstractmethod
    def multiply(self, inputs: Tensor) -> Tensor:
        """Multiply [token, in], whatever the number of tokens; add the bias."""

    def apply(self, inputs: Tensor) -> Tensor:
        """Multiply [token, in]."""
        if self.rows is None:
            return self.multiply(inputs)
        return self.rows.multiply(self.multiply, inputs)

    def apply_some(self, inputs: Tensor, rows: slice) -> Tensor:
        """Multiply [token, in] by some rows of the weight."""
        return self.apply(inputs)[:, rows]

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor | None:
        """Multiply [token, in] and add to [token, out] in place, where a product can.

        Returns what the caller has to add otherwise.
        """
        return self.apply(inputs)


class FusedProduct(Product):
    """By our own kernel on a GPU."""

    def __init__(self, kernels: FusedKernels, matrix: Matrix) -> None:
        self._kernels, self.matrix = kernels, matrix

    def multiply(self, inputs: Tensor) -> Tensor:
        """One launch."""
        return self._kernels.product(inputs, self.matrix)

    def apply_some(self, inputs: Tensor, rows: slice) -> Tensor:
        """The same, without a bias."""
        return self._kernels.product(inputs, Matrix(self.matrix.weight[rows]))

    def add_to(self, residual: Tensor, inputs: Tensor) -> None:
        """One launch, too."""
        self._kernels.product(inputs, self.matrix, residual=residual)


class DenseProduct(Product):
    """By torch, from the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None, adds_later: bool) -> None:
        """With `adds_later` nothing is added in place, so that rows can be computed like others."""
        self._weight, self._bias = weight, bias
        self._turned = weight.t()
        self._adds_later = adds_later or bias is not None

    def multiply(self, inputs: Tensor) -> Tensor:
        """Multiply by the turned weight, which is a view."""
        return _with_bias(torch.mm(inputs, self._turned), self._bias)

    def apply_some(self, inputs: Tensor, rows: slice) -> Tensor:
        """Without a bias."""
        return functional.linear(inputs, self._weight[rows])

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor | None:
        """In one call where it may."""
        if self._adds_later:
            return self.apply(inputs)
        residual.addmm_(inputs, self._turned)
        return None


class PackedProduct(DenseProduct):
    """On a CPU, from a copy of the weight that it multiplies faster, where tokens are enough."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, adds_later: bool, packed: Packed
    ) -> None:
        super().__init__(weight, bias, adds_later)
        self._packed = packed

    def multiply(self, inputs: Tensor) -> Tensor:
        """By the copy, or the weight as it is for fewer tokens."""
        if inputs.shape[0] < self._packed.least_rows:
            return super().multiply(inputs)
        return _with_bias(self._packed.product(inputs), self._bias)

    def add_to(self, residual: Tensor, inputs: Tensor) -> Tensor | None:
        """The copy's product is added by the caller."""
        if inputs.shape[0] < self._packed.least_rows:
            return super().add_to(residual, inputs)
        return self.apply(inputs)


class QuantizedProduct(Product):
    """By torchao, from a weight of few bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def multiply(self, inputs: Tensor) -> Tensor:
        """As the weight's class does."""
        return _with_bias(functional.linear(inputs, self._weight), self._bias)


class NarrowProduct(Product):
    """From a weight in few bits, without our kernels."""

    def __init__(self, linear: NarrowLinear) -> None:
        self._linear = linear

    def multiply(self, inputs: Tensor) -> Tensor:
        """In float32."""
        return self._linear.multiply(inputs)


def _with_bias(found: Tensor, bias: Tensor | None) -> Tensor:
    return found if bias is None else found.add_(bias)
