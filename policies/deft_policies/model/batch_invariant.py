"""Passes in which a token gets the same bits alone as among others, in bfloat16 on a CPU.

A product or an attention may be computed by another routine, or sum in another order, for one row
than for several: then a token that is checked among drafts is not quite the token that plain
decoding computes, and answers differ. Two rules prevent that:

- Attention sums in float64. Whatever their order, sums then differ by so little that they round to
  the same bfloat16, but for one number in some ten billion that lies on the edge between two.
- No product sees a number of rows that is not a multiple of four. Whether that is enough depends
  on the processor and on torch, so the tests ask each machine.
"""

import torch
from torch import Tensor
from torch.nn import functional

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
