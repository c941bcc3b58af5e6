"""What acceptance rules need to know of the numbers behind action tokens, position by position.

Plain numbers only: which group a position belongs to, how large one bin is in that group's unit,
and where a two-way position changes class. The robot's policy fills them in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor


class DimensionGroup(IntEnum):
    """Positions that share a unit and a limit."""

    MOVE = 0  # unit: millimetres per step
    TURN = 1  # unit: degrees per step
    GRIP = 2  # judged by its class where the space names a boundary


@dataclass(frozen=True)
class ActionSpace:
    """One action, token by token. All tuples are [position].

    `unit_per_bin` is how far the robot moves when a token moves by one bin, 0.0 where that is
    unknown or nothing. Tokens at or above `class_boundary` belong to one class and tokens below it
    to the other; None where a position has no classes.
    """

    groups: tuple[DimensionGroup, ...]
    unit_per_bin: tuple[float, ...]
    class_boundary: tuple[int | None, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.groups), len(self.unit_per_bin), len(self.class_boundary)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"the tuples of an action space differ in length: {sorted(lengths)}")
        if any(size < 0 or size != size for size in self.unit_per_bin):
            raise ValueError(f"unit_per_bin must be >= 0, got {self.unit_per_bin}")

    @property
    def length(self) -> int:
        """Tokens of one action."""
        return len(self.groups)

    @staticmethod
    def in_bins(length: int) -> "ActionSpace":
        """A space whose units are unknown: every limit is then a number of bins."""
        return ActionSpace((DimensionGroup.MOVE,) * length, (0.0,) * length, (None,) * length)


def common_length(spaces: Sequence[ActionSpace]) -> int:
    """Tokens of every action of a batch; `ValueError` where they differ."""
    lengths = sorted({space.length for space in spaces})
    if len(lengths) != 1:
        raise ValueError(f"one batch decodes actions of one length, got {lengths}")
    return lengths[0]


NO_CLASS = -1  # stands for None in `SpaceTensors.class_boundary`


@dataclass(frozen=True)
class SpaceTensors:
    """The action spaces of a batch on the device, [row, position] each."""

    groups: Tensor  # int64
    unit_per_bin: Tensor  # float32
    class_boundary: Tensor  # int64, NO_CLASS where there are no classes

    @property
    def length(self) -> int:
        """Tokens of one action."""
        return self.groups.shape[1]

    @staticmethod
    def of(spaces: Sequence[ActionSpace], device: torch.device) -> "SpaceTensors":
        """Stack the spaces of a batch; they must have the same length. Not to be written to."""
        return _stack(tuple(spaces), device)


@lru_cache(maxsize=64)
def _stack(spaces: tuple[ActionSpace, ...], device: torch.device) -> SpaceTensors:
    """Remembered, because sessions act in the same space again and again."""
    common_length(spaces)
    boundaries = [
        [NO_CLASS if edge is None else edge for edge in space.class_boundary] for space in spaces
    ]
    with torch.inference_mode(False):
        return SpaceTensors(
            groups=torch.tensor([space.groups for space in spaces], device=device),
            unit_per_bin=torch.tensor(
                [space.unit_per_bin for space in spaces], dtype=torch.float32, device=device
            ),
            class_boundary=torch.tensor(boundaries, device=device),
        )
