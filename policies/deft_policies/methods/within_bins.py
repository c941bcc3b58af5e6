"""Within bins: drafts at most r bins away, on action tokens alone.

|d - t| <= r with both d and t action tokens: Spec-VLA's eq. 5 as one would write it. `radius` is
r.

Drafts: as `lossless`, with one fixed plan: a relaxed answer must not depend on a timing.

Left out of Spec-VLA: raw ids of the whole vocabulary, the first leaf as the tie-break, its loop and
its full-depth tree. `spec-vla` has them.

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
