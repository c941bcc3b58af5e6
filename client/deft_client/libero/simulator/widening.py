"""Initial states beyond the recorded ones: objects moved by a few centimetres where they stand.

Recorded initial states of a task differ by millimetres, so a policy can pass them by heart. Here
everything that stands on the floor or table by itself moves; what lies on or in something moves
with it, and what rests on a fixture stays. A pure function of positions and a generator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.simulator.scene import Box

_TRIES = 200
_GAP = 0.012  # metres kept free between things
_STACKED = 0.055  # nearer than this in the plane means one is on the other


@dataclass(frozen=True, eq=False)
class Footprint:
    """What an object or fixture covers of the plane: a rectangle with sides along x and y."""

    low: NDArray[np.float64]  # [2]
    high: NDArray[np.float64]  # [2]
    movable: bool

    @property
    def middle(self) -> NDArray[np.float64]:
        """The centre of the rectangle."""
        return np.asarray((self.low + self.high) / 2)

    def shifted(self, by: NDArray[np.float64]) -> "Footprint":
        """The rectangle elsewhere."""
        return Footprint(self.low + by, self.high + by, self.movable)

    def touches(self, other: "Footprint", gap: float) -> bool:
        """Whether less than `gap` is free between the two."""
        return bool((self.low < other.high + gap).all() and (other.low < self.high + gap).all())


def footprint(boxes: Sequence[Box], movable: bool) -> Footprint:
    """What boxes cover of the plane; nothing at all where there are none."""
    if not boxes:
        return Footprint(np.full(2, np.inf), np.full(2, np.inf), movable)
    reach = [np.abs(box.pose.rotation[:2]) @ box.half_size for box in boxes]
    middles = np.stack([box.pose.position[:2] for box in boxes])
    return Footprint((middles - reach).min(axis=0), (middles + reach).max(axis=0), movable)


def draw_shifts(
    footprints: Mapping[str, Footprint], most: float, generator: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    """How far each movable thing moves in the plane, at most `most` metres along x and y."""
    groups = _groups(footprints)
    shifts = {name: np.zeros(2) for name, one in footprints.items() if one.movable}
    placed = dict(footprints)
    for group in groups:
        others = {name: one for name, one in placed.items() if name not in group}
        for _ in range(_TRIES):
            by = generator.uniform(-most, most, 2)
            moved = {name: footprints[name].shifted(by) for name in group}
            if not _crowds(moved, others):
                placed.update(moved)
                shifts.update(dict.fromkeys(group, by))
                break
    return shifts


def _crowds(moved: Mapping[str, Footprint], others: Mapping[str, Footprint]) -> bool:
    """Whether a move brings things too near to others."""
    return any(one.touches(other, _GAP) for name, one in moved.items() for other in others.values())


def _groups(footprints: Mapping[str, Footprint]) -> list[list[str]]:
    """Movable things that stand on each other; none of those that rest on or in a fixture."""
    fixed = [one for one in footprints.values() if not one.movable]
    groups: list[list[str]] = []
    for name, one in footprints.items():
        if not one.movable:
            continue
        joined = [
            group
            for group in groups
            if any(
                np.linalg.norm(footprints[other].middle - one.middle) < _STACKED for other in group
            )
        ]
        groups = [group for group in groups if group not in joined]
        groups.append([*(member for group in joined for member in group), name])
    return [
        group
        for group in groups
        if not any(footprints[name].touches(fixture, 0.0) for name in group for fixture in fixed)
    ]
