"""Action statistics: what turns normalised actions into robot units, and which of them a key picks.

OpenVLA's files call them `norm_stats` and the key `unnorm_key`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_policies.errors import UnknownStatisticsKeyError

# Fine-tunes on LIBERO data that was filtered of idle frames carry this behind the suite's name.
FILTERED_SUFFIX = "_no_noops"


@dataclass(frozen=True, eq=False)
class ActionStatistics:
    """Where -1 and 1 of each dimension lie in robot units; outside `mask` values stay as they are.

    Of an action, or of the state that a robot reports: quantiles of a data set, or its extremes.
    Only `low`, `high` and `mask` are used for acting. The others are what OpenVLA's files also
    hold; None where a file leaves them out.
    """

    low: NDArray[np.float64]  # [action_dim]
    high: NDArray[np.float64]  # [action_dim]
    mask: NDArray[np.bool_]  # [action_dim]
    mean: NDArray[np.float64] | None = None  # [action_dim]
    std: NDArray[np.float64] | None = None  # [action_dim]
    minimum: NDArray[np.float64] | None = None  # [action_dim]
    maximum: NDArray[np.float64] | None = None  # [action_dim]
    num_transitions: int = 0
    num_trajectories: int = 0

    def __post_init__(self) -> None:
        if self.low.ndim != 1 or not self.low.shape == self.high.shape == self.mask.shape:
            raise ValueError(
                "its two ends and its mask must have one length, got "
                f"{self.low.shape}, {self.high.shape} and {self.mask.shape}"
            )
        if not (np.isfinite(self.low).all() and np.isfinite(self.high).all()):
            raise ValueError("both ends must be finite")
        swapped = np.flatnonzero(self.mask & (self.low > self.high))
        if swapped.size:
            raise ValueError(
                f"the lower end must not be above the upper, as it is in dimensions {swapped}"
            )

    @property
    def action_dim(self) -> int:
        """Numbers in an action."""
        return len(self.low)

    def means_the_same(self, other: "ActionStatistics") -> bool:
        """Whether a normalised action is the same action under both."""
        pairs = ((self.lowest, other.lowest), (self.highest, other.highest))
        return all(np.array_equal(ours, theirs) for ours, theirs in pairs)

    @property
    def lowest(self) -> NDArray[np.float64]:
        """Smallest value each dimension of an action can take, [action_dim]."""
        return np.where(self.mask, self.low, -1.0)

    @property
    def highest(self) -> NDArray[np.float64]:
        """Largest value each dimension of an action can take, [action_dim]."""
        return np.where(self.mask, self.high, 1.0)


def find_statistics_key(keys: Sequence[str], key: str | None) -> str:
    """Return the key meant by the caller, or raise `UnknownStatisticsKeyError`.

    Without a key there must be exactly one to choose from. A suite's name also finds the
    statistics of its filtered data set (`libero_goal` finds `libero_goal_no_noops`).
    """
    if key is None and len(keys) == 1:
        return keys[0]
    if key is not None and key in keys:
        return key
    if key is not None and key + FILTERED_SUFFIX in keys:
        return key + FILTERED_SUFFIX
    raise UnknownStatisticsKeyError(key, keys)
