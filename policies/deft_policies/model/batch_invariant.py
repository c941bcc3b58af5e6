"""Passes in which a token gets the same bits alone as among others, in bfloat16 on a CPU.

A product or an attention may be computed by another routine, or sum in another order, for one row
than for several: then a token that is checked among drafts is not quite the token that plain
decoding computes, and answers differ. Two rules prevent that:

- Attention sums in float64. Whatever their order, sums then differ by so little that they round to
  the same bfloat16, but for one number in some ten billion that lies on the edge between two.
- Products get numbers of rows that this machine computes alike. Which these are depends on the
  processor, the shapes, the number of threads and the version of torch, so nothing is assumed: the
  machine is asked when a model is loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]

_MULTIPLES = (4, 8, 16, 32)
_BLOCK = 64
_AMONG = (4, 8, 12, 16, 24, 32, 52, 64, 84, 116, 160, 320)  # numbers of rows that are compared
_AMONG_OF_LARGE = (8, 64, 320)  # the same for matrices whose products take long
_LARGE = 2**22  # numbers of a matrix
_ALONE = (0, 1, 3, 6, 11, 15, 30, 51, 63, 115, 319)  # rows that are also multiplied by themselves


@dataclass(frozen=True)
class Rows:
    """How many rows a product gets, so that each has the bits that it has alone."""

    multiple: int = _MULTIPLES[0]
    in_blocks: bool = False  # every product has exactly so many rows
    problem: str = ""  # what differs all the same

    def pad(self, rows: Tensor) -> Tensor:
        """[row, width] with zeros behind it."""
        missing = -len(rows) % self.multiple
        return rows if missing == 0 else functional.pad(rows, (0, 0, 0, missing))

    def multiply(self, product: Product, rows: Tensor) -> Tensor:
        """The product of rows that were padded."""
        if not self.in_blocks or len(rows) == self.multiple:
            return product(rows)
        return torch.cat([product(block) for block in torch.split(rows, self.multiple)])


def can_be_batch_invariant(weight: Tensor) -> bool:
    """Whether passes over weights like this one can be.

    In float32 that would cost plain decoding a third of its speed, and near ties are rare.
    """
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def find_rows(products: Sequence[tuple[int, int, Product]]) -> Rows:
    """The fewest rows that this machine computes alike. `products` come with widths in and out."""
    differing: list[str] = []
    for rows in (*map(Rows, _MULTIPLES), Rows(_BLOCK, in_blocks=True)):
        differing = [
            f"{num_in} to {num_out}"
            for num_in, num_out, product in products
            if not _are_alike(rows, num_in, num_out, product)
        ]
        if not differing:
            return rows
    return Rows(problem=f"products of {', '.join(differing)} differ with the number of rows")


def _are_alike(rows: Rows, num_in: int, num_out: int, product: Product) -> bool:
    among = _AMONG if num_in * num_out <= _LARGE else _AMONG_OF_LARGE
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(among[-1], num_in, generator=generator).bfloat16()
    alone = {one: rows.multiply(product, rows.pad(given[one : one + 1]))[0] for one in _ALONE}
    for count in among:
        found = rows.multiply(product, rows.pad(given[:count]))
        if not all(found[one].equal(alone[one]) for one in _ALONE if one < count):
            return False
    return True
