"""Rules that measure how far a drafted action token is from the target's own."""

from __future__ import annotations

import math
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
class WithinBins(LocalRule):
    """d = t, or |d - t| <= r with both d and t action tokens (Spec-VLA, eq. 5, on action ids)."""

    radius: int = 9

    radius_field = "radius"

    def accepts(self, drafted: int, expected: int, place: int) -> bool:
        """Near enough."""
        return abs(drafted - expected) <= self.radius


@dataclass(frozen=True)
class WithinIds(WithinBins):
    """|d - t| <= r on raw token ids over the whole vocabulary (Spec-VLA as released).

    Kept because published numbers were made with it; `WithinBins` is for anything else. It may
    relax a token of an action that is no action token. In text it is as any other rule: words are
    exact.
    """

    any_id = True


@dataclass(frozen=True)
class ScheduledRadius(PathRule):
    """|d - t| <= r(s) with r(s) = low + (high - low) exp(-(s / tau)^beta) at step s (KERV).

    A stretched exponential over the episode, as in KERV's released code: loose while the arm
    travels, tight near the end. Action tokens only.
    """

    high: int = 15
    low: int = 5
    tau: float = 100.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        if self.tau <= 0:
            raise ValueError(f"tau must be above 0 steps, got {self.tau}")

    def accepts(self, path: Items[Guess], sequence: Sequence) -> bool:
        """Near enough by the radius of this step."""
        drafted, expected, _ = path[-1]
        share = math.exp(-((sequence.memory.num_steps / self.tau) ** self.beta))
        return abs(drafted - expected) <= self.low + (self.high - self.low) * share

    def with_radius(self, radius: int) -> AcceptanceRule:
        """A constant radius."""
        return replace(self, high=radius, low=radius)


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
class WithinBudget(PathRule):
    """|d - t| <= each, and sum over the group's positions of one action <= total (HeiSD).

    Groups are the space's: translation and rotation are budgeted apart, a gripper must be equal.
    What earlier passes of the same action have spent counts.
    """

    each: int = 15
    total: int = 30

    radius_field = "each"

    def accepts(self, path: Items[Guess], sequence: Sequence) -> bool:
        """Near enough, with its group inside its budget."""
        drafted, expected, place = path[-1]
        space = sequence.action_space
        group = space.groups[place]
        if group is DimensionGroup.GRIP or abs(drafted - expected) > self.each:
            return False
        before = enumerate(sequence.spent(path[0][2]))
        spent = sum(abs(bins) for at, bins in before if space.groups[at] is group)
        here = sum(abs(d - t) for d, t, at in path if space.groups[at] is group)
        return spent + here <= self.total


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
