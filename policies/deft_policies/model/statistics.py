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
    """Range of each action dimension over a data set; dimensions outside `mask` stay as they are.

    Only `q01`, `q99` and `mask` are used for acting. The others are what OpenVLA's files also
    hold; None where a file leaves them out.
    """

    q01: NDArray[np.float64]  # [action_dim]
    q99: NDArray[np.float64]  # [action_dim]
    mask: NDArray[np.bool_]  # [action_dim]
    mean: NDArray[np.float64] | None = None  # [action_dim]
    std: NDArray[np.float64] | None = None  # [action_dim]
    minimum: NDArray[np.float64] | None = None  # [action_dim]
    maximum: NDArray[np.float64] | None = None  # [action_dim]
    num_transitions: int = 0
    num_trajectories: int = 0

    def __post_init__(self) -> None:
        if self.q01.ndim != 1 or not self.q01.shape == self.q99.shape == self.mask.shape:
            raise ValueError(
                "q01, q99 and mask must have one length, got "
                f"{self.q01.shape}, {self.q99.shape} and {self.mask.shape}"
            )
        if not (np.isfinite(self.q01).all() and np.isfinite(self.q99).all()):
            raise ValueError("q01 and q99 must be finite")
        swapped = np.flatnonzero(self.mask & (self.q01 > self.q99))
        if swapped.size:
            raise ValueError(f"q01 must not be above q99, as it is in dimensions {swapped}")

    @property
    def action_dim(self) -> int:
        """Numbers in an action."""
        return len(self.q01)

    def means_the_same(self, other: "ActionStatistics") -> bool:
        """Whether a normalised action is the same action under both."""
        pairs = ((self.lowest, other.lowest), (self.highest, other.highest))
        return all(np.array_equal(ours, theirs) for ours, theirs in pairs)

    @property
    def lowest(self) -> NDArray[np.float64]:
        """Smallest value each dimension of an action can take, [action_dim]."""
        return np.where(self.mask, self.q01, -1.0)

    @property
    def highest(self) -> NDArray[np.float64]:
        """Largest value each dimension of an action can take, [action_dim]."""
        return np.where(self.mask, self.q99, 1.0)


def find_statistics_key(known: Sequence[str], key: str | None) -> str:
    """Return the key meant by the caller, or raise `UnknownStatisticsKeyError`.

    Without a key there must be exactly one to choose from. A suite's name also finds the
    statistics of its filtered data set (`libero_goal` finds `libero_goal_no_noops`).
    """
    if key is None and len(known) == 1:
        return known[0]
    if key is not None and key in known:
        return key
    if key is not None and key + FILTERED_SUFFIX in known:
        return key + FILTERED_SUFFIX
    raise UnknownStatisticsKeyError(key, known)
