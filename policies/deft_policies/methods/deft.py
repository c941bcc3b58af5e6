"""Deft: drafts within physical limits, inside a drift budget of the episode.

Let d be the draft at position k, t the target's token, u_k the size of a bin in millimetres or
degrees, and D_k the drift: executed minus the target's own, summed over past steps. A draft is
accepted if both hold:

    |d - t| u_k <= limit of k's group
    |leak D_k + (d - t)| u_k <= budget of k's group

A gripper is judged by its class, open or closed, which is all the robot acts on. With leak = 1 the
sum of what was executed never differs from the sum of what the target answered by more than the
budget. So accepted drafts can neither hold a robot still nor drag it along.

Drafts: the last action in every pass, with recycled predictions in later ones. They come from the
target's own tokens, never from executed ones.

Defaults: `move` is in millimetres and `turn` in degrees; `cap` is in bins, for dimensions whose
bins have no known size. They were chosen on tiny-libero.

Left out: limits that follow the motion, as in KERV and HeiSD: these hold for the whole episode. And
the draft head, which saves few passes that the last action does not: docs/results/methods.md has
both.

Numbers: docs/results.md and docs/results/methods.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import (
    AcceptanceRule,
    ActionSpace,
    DimensionGroup,
    Guess,
    LocalRule,
    PathRule,
)

if TYPE_CHECKING:
    from deft_policies.decoding.sequence import Sequence

# A hair more than a quotient, so that a limit of exactly k bins admits k bins.
_HAIR = 1 + 1e-6


@dataclass(frozen=True)
class WithinLimits(PathRule):
    """|d - t| u_k <= limit of k's group, with u_k the size of one bin at position k (ours).

    Limits are physical: `move` in millimetres and `turn` in degrees per step, so a dimension whose
    bins are small may be off by more of them. `cap` bounds the distance in bins as well, and is the
    whole rule where the size of a bin is unknown. A gripper accepts any token of the target's own
    class, which is all the robot acts on, and must be equal where the space names no classes.
    """

    move: float = 3.5
    turn: float = 0.5
    cap: int = 15

    radius_field = "cap"

    def accepts(self, path: Items[Guess], sequence: Sequence) -> bool:
        """Near enough in its own unit."""
        drafted, expected, place = path[-1]
        space = sequence.action_space
        boundary = space.class_boundary[place]
        if boundary is not None:
            return (drafted >= boundary) == (expected >= boundary)
        if space.groups[place] is DimensionGroup.GRIP:
            return False
        limit = _in_bins(space, place, self.move, self.turn)
        return abs(drafted - expected) <= (self.cap if limit is None else min(limit, self.cap))


@dataclass(frozen=True)
class WithinDrift(PathRule):
    """`rule`, and |leak * D_k + (d - t)| u_k <= budget of k's group wherever d != t (ours).

    D_k is the session's drift at position k: executed minus own over all past steps, each step
    keeping `leak` of it. With leak = 1 the sum of everything that was executed never differs from
    the sum of what the target answered by more than the budget, so accepted drafts can neither
    freeze a robot nor drag it along; when a budget is spent only exact tokens, or ones that pay
    back, are accepted. With leak < 1 a steady deviation of (1 - leak) * budget per step survives.
    `cap` is the budget in bins where the size of a bin is unknown.
    """

    rule: LocalRule | PathRule = WithinLimits()
    move: float = 9.0
    turn: float = 1.5
    cap: int = 30
    leak: float = 1.0

    def __post_init__(self) -> None:
        if self.leak > 1:
            raise ValueError(
                f"leak is the share of the drift that stays, at most 1, got {self.leak}"
            )

    @property
    def drift_leak(self) -> float:
        """The leak of the budget."""
        return self.leak

    def accepts(self, path: Items[Guess], sequence: Sequence) -> bool:
        """Accepted by the rule, and inside the drift budget."""
        drafted, expected, place = path[-1]
        space = sequence.action_space
        if space.class_boundary[place] is None:
            budget = _in_bins(space, place, self.move, self.turn)
            after = self.leak * sequence.drift[place] + (drafted - expected)
            if abs(after) > (self.cap if budget is None else budget):
                return False
        if isinstance(self.rule, LocalRule):
            return self.rule.accepts(drafted, expected, place)
        return self.rule.accepts(path, sequence)

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Replace the inner rule's radius; the budget stays."""
        rule = self.rule.with_radius(radius)
        assert isinstance(rule, (LocalRule, PathRule))
        return replace(self, rule=rule)


def _in_bins(space: ActionSpace, place: int, move: float, turn: float) -> float | None:
    """The limit of a position in bins; None where the size of a bin is unknown."""
    unit = space.unit_per_bin[place]
    if unit == 0:
        return None
    return (turn if space.groups[place] is DimensionGroup.TURN else move) / unit * _HAIR


METHODS = {"deft": "autoregressive:rule=within-drift,plans=steady"}
RULES = {"within-limits": WithinLimits, "within-drift": WithinDrift}
