"""Copies of weights in layouts that a CPU multiplies faster than torch's own.

The operators are private to torch, and not every build has them, so each is tried. Only small
matrices are copied: the memory of large ones is dear, and laying them out costs them little.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

_LARGEST = 2**22  # numbers of a matrix that may lie in memory twice
_HALF_STEP = 2.0**-25  # float16 holds what it does not hold exactly to this at least, near zero


@dataclass(frozen=True)
class Packed:
    """A packed weight."""

    product: Callable[[Tensor], Tensor]  # of [..., in]
    least_rows: int  # fewer are multiplied as fast without


def pack(weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Packed | None:
    """Copy a weight [out, in]; None where that is of no use or not possible."""
    if weight.device.type != "cpu" or weight.numel() > _LARGEST:
        return None
    if weight.dtype == torch.float32 and can_pack_halves() and _fits_halves(weight):
        return Packed(_pack_halves(weight), least_rows=1)
    if weight.dtype in (torch.float32, torch.bfloat16) and can_pack():
        product = _pack(weight, bias, activation)
        return Packed(product, least_rows=1 if weight.dtype == torch.bfloat16 else 2)
    return None


class PackableLinear(nn.Linear):
    """A linear layer, perhaps with GELU behind it, that inference may pack in bfloat16."""

    def __init__(self, num_in: int, num_out: int, has_gelu: bool = False) -> None:
        super().__init__(num_in, num_out)
        self.has_gelu = has_gelu
        self._packed: Packed | None = None

    def pack(self) -> None:
        """From now on multiply by a copy of the weight."""
        if self.weight.dtype == torch.bfloat16:
            activation = "gelu" if self.has_gelu else "none"
            self._packed = pack(self.weight.detach(), self.bias.detach(), activation)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply [..., in] and add the bias."""
        if self._packed is not None and inputs.dtype == torch.bfloat16:
            return self._packed.product(inputs)
        found = super().forward(inputs)
        return functional.gelu(found) if self.has_gelu else found


def _pack(weight: Tensor, bias: Tensor | None, activation: str) -> Callable[[Tensor], Tensor]:
    """In the layout of oneDNN."""
    operators = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight)

    def multiply(inputs: Tensor) -> Tensor:
        found: Tensor = operators._linear_pointwise(inputs, packed, bias, activation, [], "none")
        return found

    return multiply


def _pack_halves(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """In float16, in the layout of FBGEMM, which sums in float32: half the memory to read.

    Every row is computed alone, so it has the same bits among others.
    """
    operators = torch.ops.quantized
    packed = operators.linear_prepack_fp16(weight.contiguous(), None)
    product = operators.linear_dynamic_fp16._op  # without a look at its arguments in Python

    def multiply(inputs: Tensor) -> Tensor:
        found: Tensor = product(inputs, packed)
        return found

    return multiply


def _fits_halves(weight: Tensor) -> bool:
    """Whether float16 holds every number: of a checkpoint in bfloat16 it does, but near zero."""
    return bool((weight.half().float() - weight).abs().max() <= _HALF_STEP)


@lru_cache(maxsize=1)
def can_pack() -> bool:
    """Whether this torch multiplies by weights in oneDNN's layout."""
    return _works(lambda weight: _pack(weight, None, "none"))


@lru_cache(maxsize=1)
def can_pack_halves() -> bool:
    """Whether this torch multiplies by weights in float16."""
    return _works(_pack_halves)


def _works(packs: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> bool:
    weight = torch.eye(2, device="cpu")
    try:
        return torch.equal(packs(weight)(weight), weight)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
