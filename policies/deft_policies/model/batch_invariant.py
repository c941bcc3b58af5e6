"""Passes in which a token gets the same bits alone as among others, in bfloat16 on a CPU.

A product or an attention may be computed by another routine, or sum in another order, for one row
than for several: then a token that is checked among drafts is not quite the token that plain
decoding computes, and answers differ. Two rules prevent that:

- Attention sums in float64. Whatever their order, sums then differ by so little that they round to
  the same bfloat16: one number in some ten billion may fall on the edge between two.
- No product sees a number of rows that is not a multiple of four. Whether that is enough depends
  on the processor and on torch, so the tests ask each machine.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.model.llama import Attention

_ROWS = 4


def can_be_batch_invariant(weight: Tensor) -> bool:
    """Whether passes over weights like this one can be.

    In float32 that would cost plain decoding a third of its speed, and near ties are rare.
    """
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def in_fours(rows: Tensor) -> Tensor:
    """[row, width] with rows of zeros behind it, up to a multiple of four."""
    missing = -len(rows) % _ROWS
    return rows if missing == 0 else functional.pad(rows, (0, 0, 0, missing))


@dataclass(frozen=True)
class Float64Attention(Attention):
    """Attention that sums in float64 and rounds once."""

    @property
    def scores_dtype(self) -> torch.dtype:
        """Its mask's, too."""
        return torch.float64

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As `Attention` does."""
        mixed = super().attend(queries.double(), keys.double(), values.double())
        return mixed.to(queries.dtype)
