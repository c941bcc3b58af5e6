"""Entropy radius: a radius that grows with the target's own uncertainty.

|d - t| <= low + (high - low) min(1, h / full), with h the target's entropy over action tokens as a
share of the largest there can be. Where the target is sure, the draft must be nearly right; where
many bins are as good as each other, a wider miss means nothing.

Drafts: as `within-bins`.

Left out: physical units. A bin is a bin, whatever it means to the robot.

Numbers: none: no study uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import AcceptanceRule, DeviceRule, ScoredNodes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EntropyRadius(DeviceRule):
    """|d - t| <= low + (high - low) min(1, h / full), h the target's normalised entropy (ours).

    The radius grows with the target's own uncertainty: where it is sure, the draft must be nearly
    right; where many bins are as good as each other, a wider miss means nothing.
    """

    low: int = 1
    high: int = 15
    full: float = 0.5

    def __post_init__(self) -> None:
        if self.full <= 0:
            raise ValueError(f"full must be above 0, got {self.full}")

    def accepts(self, scored: ScoredNodes) -> Tensor:
        """Near enough for the target's certainty."""
        share = (scored.entropy / self.full).clamp(max=1.0)
        radius = self.low + (self.high - self.low) * share
        return (scored.drafted - scored.expected).abs() <= radius

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Replace the largest radius."""
        return replace(self, high=radius, low=min(self.low, radius))


METHODS = {"entropy-radius": "autoregressive:rule=entropy-radius,plans=ours"}
RULES = {"entropy-radius": EntropyRadius}
