"""Action statistics: what turns normalised actions into robot units, and which of them a key picks.

OpenVLA's files call them `norm_stats` and the key `unnorm_key`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError, UnknownStatisticsKeyError

STATISTICS_FILE = "dataset_statistics.json"
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


def load_statistics(config: JsonFields) -> Mapping[str, ActionStatistics]:
    """Read the statistics that belong to a `config.json`."""
    return parse_statistics(find_statistics(config))


def find_statistics(config: JsonFields) -> JsonFields:
    """The statistics that belong to a `config.json`, by key and as they are written.

    A `dataset_statistics.json` beside it replaces the config's own `norm_stats`.
    """
    path = config.path.parent / STATISTICS_FILE
    if path.exists():
        return JsonFields.load(path, f"restore {STATISTICS_FILE}")
    statistics = config.section("norm_stats")
    if not statistics.keys():
        raise CheckpointError(
            f"{config.path} has no norm_stats and there is no {STATISTICS_FILE} beside it; copy "
            f"the {STATISTICS_FILE} of the fine-tuning run into {config.path.parent}"
        )
    return statistics


def parse_statistics(fields: JsonFields) -> Mapping[str, ActionStatistics]:
    """Read statistics by key from an object in OpenVLA's layout."""
    if not fields.keys():
        raise CheckpointError(f"{fields.path} holds no statistics; expected one entry per data set")
    return {key: _parse_one(fields.section(key)) for key in fields.keys()}  # noqa: SIM118


def _parse_one(fields: JsonFields) -> ActionStatistics:
    action = fields.section("action")
    q01 = np.array(action.values("q01", float), dtype=np.float64)
    mask = action.values("mask", bool) if action.has("mask") else (True,) * len(q01)

    def optional(name: str) -> NDArray[np.float64] | None:
        return np.array(action.values(name, float), dtype=np.float64) if action.has(name) else None

    try:
        return ActionStatistics(
            q01=q01,
            q99=np.array(action.values("q99", float), dtype=np.float64),
            mask=np.array(mask, dtype=np.bool_),
            mean=optional("mean"),
            std=optional("std"),
            minimum=optional("min"),
            maximum=optional("max"),
            num_transitions=fields.value("num_transitions", int, 0),
            num_trajectories=fields.value("num_trajectories", int, 0),
        )
    except ValueError as error:
        raise fields.error("action", str(error)) from None
