"""What OFT's fine-tunes normalise by: the robot's actions and the state it reports.

Both lie in [-1, 1] inside the model. The order of operations is the original's, because another
one would differ in the last bit.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_policies.checkpoint.fields import JsonFields

Values = NDArray[np.float64]

_RANGE_EPS = 1e-8
QUANTILES, EXTREMES = ("q01", "q99"), ("min", "max")  # rows of the statistics: -1 and 1


@dataclass(frozen=True, eq=False)
class Ranges:
    """Where -1 and 1 of each dimension lie in robot units; outside `mask` values stay as they are.

    A model may answer beyond them: normalised values are not bounded by anything.
    """

    low: Values  # [dim]
    high: Values  # [dim]
    mask: NDArray[np.bool_]  # [dim]

    def unnormalise(self, actions: NDArray[np.floating]) -> Values:
        """[step, action_dim] to robot units; float32 is widened after its first two operations."""
        stretched = 0.5 * (actions + 1) * (self.high - self.low + _RANGE_EPS) + self.low
        return np.where(self.mask, stretched, actions).astype(np.float64)

    def normalise_state(self, state: Values) -> Values:
        """A robot's raw state [state_dim], cut off at -1 and 1."""
        squeezed = 2 * (state - self.low) / (self.high - self.low + _RANGE_EPS) - 1
        return np.clip(np.where(self.mask, squeezed, state), -1.0, 1.0)


def parse_ranges(statistics: JsonFields, block: str, rows: tuple[str, str]) -> dict[str, Ranges]:
    """The ranges of `action` or `proprio` by statistics key, where a data set has them."""
    data_sets = {key: statistics.section(key) for key in statistics.keys()}  # noqa: SIM118
    return {
        key: _parse_block(data_set, block, rows)
        for key, data_set in data_sets.items()
        if block == "action" or data_set.has(block)
    }


def _parse_block(data_set: JsonFields, name: str, rows: tuple[str, str]) -> Ranges:
    fields = data_set.section(name)
    low, high = (np.array(fields.values(row, float), dtype=np.float64) for row in rows)
    mask = np.array(fields.values("mask", bool) if fields.has("mask") else (True,) * len(low))
    if not low.shape == high.shape == mask.shape:
        raise data_set.error(
            name, f"must hold as many numbers in {rows[0]} as in {rows[1]} and mask"
        )
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise data_set.error(name, f"must hold finite numbers in {' and '.join(rows)}")
    if (mask & (low > high)).any():
        raise data_set.error(name, f"must not have {rows[0]} above {rows[1]}")
    return Ranges(low, high, mask)
