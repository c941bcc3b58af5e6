"""Action tokens to robot units and back, in float64 as OpenVLA computes them.

A token encodes a bin, a bin its centre in [-1, 1] (a normalised action), and the action
statistics stretch that to robot units. Ids grow as values fall.
"""

import numpy as np
from numpy.typing import NDArray

from deft_policies.decoding.acceptance.rule import ActionSpace, DimensionGroup
from deft_policies.model.sizes import TokenRange
from deft_policies.model.statistics import ActionStatistics

# An arm's action: three of translation, three of rotation, and the gripper.
POSE = (DimensionGroup.MOVE,) * 3 + (DimensionGroup.TURN,) * 3 + (DimensionGroup.GRIP,)
# In training the range is widened by this before dividing by it.
RANGE_EPS = 1e-8
# Millimetres and degrees that one robot unit of an arm's action means to its controller, by how the
# names of data sets begin: robosuite's, as LIBERO uses it, and metres and radians.
_UNITS = {
    "libero": (50.0, float(np.degrees(0.5))),
    "bridge": (1000.0, float(np.degrees(1.0))),
    "fractal": (1000.0, float(np.degrees(1.0))),
}
_OPEN_ABOVE = 0.5  # gripper values above it mean one class, others the other

Tokens = NDArray[np.int64]  # [..., action_dim]
Actions = NDArray[np.float64]  # [..., action_dim]


class ActionCodec:
    """Translates between action tokens, normalised actions and robot units."""

    def __init__(self, action_tokens: TokenRange) -> None:
        self._action_tokens = action_tokens
        self._edges = np.linspace(-1.0, 1.0, len(action_tokens))
        self._centres = (self._edges[:-1] + self._edges[1:]) / 2.0

    def normalised(self, tokens: Tokens) -> Actions:
        """Bin centres of tokens. An id outside the action range counts as the nearest inside."""
        bins = self._action_tokens.last - tokens
        return self._centres[np.clip(bins, 0, len(self._centres) - 1)]

    def decode(self, tokens: Tokens, statistics: ActionStatistics) -> Actions:
        """Tokens to robot units."""
        return unnormalise(self.normalised(tokens), statistics)

    def encode(self, actions: Actions, statistics: ActionStatistics) -> Tokens:
        """Robot units to the tokens that training would have taught for them.

        One id more than there are centres: the exact maximum gets the lowest id alone, which
        decodes like its neighbour.
        """
        normalised = np.clip(normalise(actions, statistics), -1.0, 1.0)
        return self._action_tokens.last + 1 - np.digitize(normalised, self._edges)

    def bin_widths(self, statistics: ActionStatistics) -> NDArray[np.float64]:
        """Robot units between the centres of neighbouring bins, [action_dim]."""
        step = self._edges[1] - self._edges[0]
        reach = np.abs(statistics.high - statistics.low) / 2.0
        widths: NDArray[np.float64] = np.where(statistics.mask, step * reach, step)
        return widths

    def action_space(self, statistics: ActionStatistics, key: str) -> ActionSpace:
        """What acceptance rules need to know; limits count in bins where units are unknown."""
        known = [units for name, units in _UNITS.items() if key.startswith(name)]
        if not known or statistics.action_dim != len(POSE):
            return ActionSpace.in_bins(statistics.action_dim)
        (mm, degrees), *_ = known
        unit = {DimensionGroup.MOVE: mm, DimensionGroup.TURN: degrees, DimensionGroup.GRIP: 0.0}
        widths = self.bin_widths(statistics)
        boundary = self._find_boundary(statistics)
        return ActionSpace(
            groups=POSE,
            unit_per_bin=tuple(
                float(width) * unit[group] for width, group in zip(widths, POSE, strict=True)
            ),
            class_boundary=tuple(
                boundary if group is DimensionGroup.GRIP else None for group in POSE
            ),
        )

    def _find_boundary(self, statistics: ActionStatistics) -> int:
        """The lowest token whose gripper value (the last dimension) is not above the threshold."""
        action_tokens = self._action_tokens
        ids = np.arange(action_tokens.first, action_tokens.last + 1)
        rows = np.repeat(ids[:, None], statistics.action_dim, axis=1)
        is_above = self.decode(rows, statistics)[:, -1] > _OPEN_ABOVE
        return int(action_tokens.first + is_above.sum())


def unnormalise(
    normalised: NDArray[np.floating], statistics: ActionStatistics, widened_by: float = 0.0
) -> Actions:
    """Stretch [-1, 1] to the statistics' range where the mask says so.

    float32 becomes float64 after the first two operations, as in the original: another order would
    differ in the last bit.
    """
    low, high = statistics.low, statistics.high
    stretched = 0.5 * (normalised + 1) * (high - low + widened_by) + low
    return np.where(statistics.mask, stretched, normalised)


def normalise(actions: Actions, statistics: ActionStatistics) -> Actions:
    """Robot units to [-1, 1] as in training; a dimension that never changes becomes 0."""
    low, high = statistics.low, statistics.high
    squeezed = 2 * (actions - low) / (high - low + RANGE_EPS) - 1
    squeezed = np.where(high == low, 0.0, squeezed)
    return np.where(statistics.mask, squeezed, actions)
