"""Matrix products on a CPU: faster, and with the same bits for a token alone as among others.

Copies of weights lie in layouts that a CPU multiplies faster than torch's own. The operators are
private to torch, and not every build has them, so each is tried. Only small matrices are copied:
the memory of large ones is dear, and laying them out costs them little.

In bfloat16 a product or an attention may be computed by another routine, or sum in another order,
for one row than for several: then a token that is checked among drafts is not quite the token that
plain decoding computes, and answers differ. Two rules prevent that:

- Attention sums in float64. Whatever their order, sums then differ by so little that they round to
  the same bfloat16, but for one number in some ten billion that lies on the edge between two.
- Products get numbers of rows for which this machine computes equal bits. Which these are depends
  on the processor, the shapes, the number of threads and the version of torch, so nothing is
  assumed: the machine is asked when a model is loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.quantization import Matrix

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels

Product = Callable[[Tensor], Tensor]

_LARGE = 2**22  # numbers of a matrix; larger ones are not copied, and tried with fewer rows
_HALF_STEP = 2.0**-25  # float16 holds what it does not hold exactly to this at least, near zero
_AMONG = (4, 8, 12, 16, 24, 32, 52, 64, 84, 116, 160, 320)  # numbers of rows that are compared
_AMONG_OF_LARGE = (8, 64, 320)  # the same for matrices whose products take long
_ALONE = (0, 1, 3, 6, 11, 15, 30, 51, 63, 115, 319)  # rows that are also multiplied by themselves


@dataclass(frozen=True)
class Packed:
    """A packed weight."""

    product: Product  # of [..., in]
    least_rows: int  # fewer are multiplied as fast without


def pack(weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Packed | None:
    """Copy a weight [out, in]; None where that is of no use or not possible."""
    if weight.device.type != "cpu" or weight.numel() > _LARGE:
        return None
    if weight.dtype == torch.float32 and can_pack_halves() and _fits_halves(weight):
        return Packed(_pack_halves(weight), least_rows=1)
    if weight.dtype in (torch.float32, torch.bfloat16) and can_pack(weight.dtype):
        product = _pack(weight, bias, activation)
        return Packed(product, least_rows=1 if weight.dtype == torch.bfloat16 else 2)
    return None


class PackableLinear(nn.Linear):
    """A linear layer, perhaps with GELU behind it, that inference may pack in bfloat16."""

    def __init__(self, num_in: int, num_out: int, has_gelu: bool = False) -> None:
        super().__init__(num_in, num_out)
        self.has_gelu = has_gelu
        self.kernels: FusedKernels | None = None  # what multiplies in bfloat16 on a GPU
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
        if self.kernels is not None and self.kernels.multiplies(self.weight):
            matrix = Matrix(self.weight, self.bias)
            rows = self.kernels.look(inputs.flatten(0, -2), matrix, self.has_gelu)
            return rows.view(*inputs.shape[:-1], -1)
        outputs = super().forward(inputs)
        return functional.gelu(outputs) if self.has_gelu else outputs


def _pack(weight: Tensor, bias: Tensor | None, activation: str) -> Product:
    """In the layout of oneDNN."""
    operators = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight)

    def multiply(inputs: Tensor) -> Tensor:
        outputs: Tensor = operators._linear_pointwise(inputs, packed, bias, activation, [], "none")
        return outputs

    return multiply


def _pack_halves(weight: Tensor) -> Product:
    """In float16, in the layout of FBGEMM, which sums in float32: half the memory to read.

    With AVX-512 every row is computed alone, so it has the same bits among others. With AVX2 alone
    it has not; float32 promises equal answers but for near ties.
    """
    operators = torch.ops.quantized
    packed = operators.linear_prepack_fp16(weight.contiguous(), None)
    product = operators.linear_dynamic_fp16._op  # without a look at its arguments in Python

    def multiply(inputs: Tensor) -> Tensor:
        outputs: Tensor = product(inputs, packed)
        return outputs

    return multiply


def _fits_halves(weight: Tensor) -> bool:
    """Whether float16 holds every number: of a checkpoint in bfloat16 it does, but near zero."""
    return bool((weight.half().float() - weight).abs().max() <= _HALF_STEP)


@lru_cache(maxsize=2)
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch multiplies by weights in oneDNN's layout, on this processor."""
    return _works(lambda weight: _pack(weight, None, "none"), dtype)


@lru_cache(maxsize=1)
def can_pack_halves() -> bool:
    """Whether this torch multiplies by weights in float16."""
    return _works(_pack_halves)


def _works(packs: Callable[[Tensor], Product], dtype: torch.dtype = torch.float32) -> bool:
    weight = torch.eye(2, device="cpu", dtype=dtype)
    try:
        return torch.equal(packs(weight)(weight), weight)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


@dataclass(frozen=True)
class Rows:
    """How many rows a product gets, so that each has the bits that it has alone."""

    multiple: int = 1
    in_blocks: bool = False  # every product has exactly so many rows
    problem: str = ""  # what differs all the same

    def pad(self, rows: Tensor) -> Tensor:
        """[row, width] with zeros behind it."""
        missing = -rows.shape[0] % self.multiple
        return rows if missing == 0 else functional.pad(rows, (0, 0, 0, missing))

    def multiply(self, product: Product, rows: Tensor) -> Tensor:
        """The product of rows that were padded."""
        if not self.in_blocks or rows.shape[0] == self.multiple:
            return product(rows)
        return torch.cat([product(block) for block in torch.split(rows, self.multiple)])


AS_THEY_COME = (Rows(),)
PADDED = (Rows(4), Rows(8), Rows(16), Rows(32), Rows(64, in_blocks=True))


def can_be_batch_invariant(weight: Tensor) -> bool:
    """Whether passes over weights like this one can be.

    In float32 that would cost plain decoding a third of its speed, and near ties are rare.
    """
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def find_rows(
    products: Sequence[tuple[int, int, Product]],
    like: Tensor,
    ways: Sequence[Rows] = PADDED,
) -> Rows:
    """The fewest rows for which this machine computes equal bits. `products` come with widths in
    and out.

    The rows that are compared are in the format of `like` and on its device.
    """
    differing: list[str] = []
    for rows in ways:
        differing = [
            f"{num_in} to {num_out}"
            for num_in, num_out, product in products
            if not _are_alike(rows, num_in, num_out, product, like)
        ]
        if not differing:
            return rows
    return Rows(problem=f"products of {', '.join(differing)} differ with the number of rows")


def _are_alike(rows: Rows, num_in: int, num_out: int, product: Product, like: Tensor) -> bool:
    among = _AMONG if num_in * num_out <= _LARGE else _AMONG_OF_LARGE
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(among[-1], num_in, generator=generator).to(like)
    alone = {row: rows.multiply(product, rows.pad(inputs[row : row + 1]))[0] for row in _ALONE}
    for count in among:
        outputs = rows.multiply(product, rows.pad(inputs[:count]))
        if not all(outputs[row].equal(alone[row]) for row in _ALONE if row < count):
            return False
    return True
