"""Within bins: drafts at most r bins away, on action tokens alone.

|d - t| <= r with both d and t action tokens: Spec-VLA's eq. 5 as one would write it. `radius` is
r.

Numbers: docs/results/methods.md.
"""

from dataclasses import dataclass

from deft_policies.decoding.acceptance.rule import LocalRule


@dataclass(frozen=True)
class WithinBins(LocalRule):
    """d = t, or |d - t| <= r with both d and t action tokens (Spec-VLA, eq. 5, on action ids)."""

    radius: int = 9

    radius_field = "radius"

    def accepts(self, drafted: int, expected: int, place: int) -> bool:
        """Near enough."""
        return abs(drafted - expected) <= self.radius


METHODS = {"within-bins": "autoregressive:rule=within-bins,plans=ours"}
RULES = {"within-bins": WithinBins}
