"""What LeRobot's pipelines do to the state before the prompt, and to actions behind the codec.

All of it in float32, in the order of LeRobot's own arithmetic: a number at the edge of a bin falls
into another one in float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float32]


class Mode(Enum):
    """How numbers were normalised, as LeRobot names it."""

    IDENTITY = "IDENTITY"
    MEAN_STD = "MEAN_STD"
    MIN_MAX = "MIN_MAX"
    QUANTILES = "QUANTILES"
    QUANTILE10 = "QUANTILE10"

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the two statistics that it reads."""
        return _NEEDS[self]


_NEEDS: Mapping[Mode, tuple[str, ...]] = {
    Mode.IDENTITY: (),
    Mode.MEAN_STD: ("mean", "std"),
    Mode.MIN_MAX: ("min", "max"),
    Mode.QUANTILES: ("q01", "q99"),
    Mode.QUANTILE10: ("q10", "q90"),
}


@dataclass(frozen=True, eq=False)
class Normalization:
    """Of one feature. `first` is the mean or the lower end, `second` std or the upper end."""

    mode: Mode
    first: Numbers  # [dim]
    second: Numbers
    eps: np.float32

    @property
    def dim(self) -> int:
        """Numbers of the feature."""
        return len(self.first)

    @property
    def _width(self) -> Numbers:
        """Between the two ends; LeRobot has a width of zero be a tiny one."""
        width = self.second - self.first
        return np.where(width == 0, self.eps, width)

    def normalise(self, values: Numbers) -> Numbers:
        """[..., dim] as the model was shown them."""
        match self.mode:
            case Mode.IDENTITY:
                return values
            case Mode.MEAN_STD:
                return (values - self.first) / (self.second + self.eps)
        return np.float32(2) * (values - self.first) / self._width - np.float32(1)

    def restore(self, values: Numbers) -> Numbers:
        """[..., dim] in the robot's units."""
        match self.mode:
            case Mode.IDENTITY:
                return values
            case Mode.MEAN_STD:
                return values * self.second + self.first
        return (values + np.float32(1)) * self._width / np.float32(2) + self.first
