"""Rules that measure how far a drafted action token is from the target's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import (
    NO_CLASS,
    AcceptanceRule,
    DimensionGroup,
    ScoredTree,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WithinBins(AcceptanceRule):
    """d = t, or |d - t| <= r with both d and t action tokens (Spec-VLA, eq. 5, on action ids)."""

    radius: int = 9

    radius_field = "radius"

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Near all the way."""
        return scored.relaxed_paths(scored.deviations.abs() <= self.radius)


@dataclass(frozen=True)
class WithinIds(AcceptanceRule):
    """|d - t| <= r on raw token ids over the whole vocabulary (Spec-VLA as released).

    Kept because published numbers were made with it; `WithinBins` is for anything else. It may
    relax a token of an action that is no action token. In text it is as any other rule: words are
    exact.
    """

    radius: int = 9

    radius_field = "radius"

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Near all the way."""
        near = scored.deviations.abs() <= self.radius
        if scored.is_text is not None:
            near = near & (scored.is_relaxable | ~scored.is_text)
        return scored.whole_paths(scored.is_equal | near)


@dataclass(frozen=True)
class ScheduledRadius(AcceptanceRule):
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

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Near all the way, by the radius of this step."""
        steps = scored.context.num_steps.float()
        radius = self.low + (self.high - self.low) * (-((steps / self.tau) ** self.beta)).exp()
        return scored.relaxed_paths(scored.deviations.abs() <= radius.unsqueeze(1))

    def with_radius(self, radius: int) -> AcceptanceRule:
        """A constant radius."""
        return replace(self, high=radius, low=radius)


@dataclass(frozen=True)
class WithinLimits(AcceptanceRule):
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

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Near enough in its own unit all the way."""
        radii = self._radii(scored)
        context = scored.context
        near = scored.deviations.abs() <= scored.at_positions(radii)
        near = near & (scored.at_positions(context.groups) != DimensionGroup.GRIP)
        boundary = scored.at_positions(context.class_boundary)
        same_class = (scored.tree.tokens >= boundary) == (scored.expected >= boundary)
        return scored.relaxed_paths(near.where(boundary == NO_CLASS, same_class))

    def _radii(self, scored: ScoredTree) -> Tensor:
        """Limits in bins, [row, position]."""
        return radii_in_bins(scored, self.move, self.turn).clamp(max=float(self.cap))


@dataclass(frozen=True)
class WithinBudget(AcceptanceRule):
    """|d - t| <= each, and sum over the group's positions of one action <= total (HeiSD).

    Groups are the space's: translation and rotation are budgeted apart, a gripper must be equal.
    What earlier passes of the same action have spent counts.
    """

    each: int = 15
    total: int = 30

    radius_field = "each"

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Near all the way, with every group inside its budget."""
        group = scored.at_positions(scored.context.groups)
        far = scored.deviations.abs()
        near = (far <= self.each) & scored.is_relaxable & (group != DimensionGroup.GRIP)
        fine = scored.is_equal | near
        for one in (DimensionGroup.MOVE, DimensionGroup.TURN):
            # Equal tokens outside the action range have no deviation, so all may be summed.
            here = scored.sum_along_paths(far * (group == one))
            before = (scored.spent.abs() * (scored.context.groups == one)).sum(dim=1)
            within = here + before.unsqueeze(1) <= self.total
            fine = fine & (within | scored.is_equal | (group != one))
        return scored.whole_paths(fine)


@dataclass(frozen=True)
class WithinDrift(AcceptanceRule):
    """`rule`, and |leak * D_k + (d - t)| u_k <= budget of k's group wherever d != t (ours).

    D_k is the session's drift at position k: executed minus own over all past steps, each step
    keeping `leak` of it. With leak = 1 the sum of everything that was executed never differs from
    the sum of what the target answered by more than the budget, so accepted drafts can neither
    freeze a robot nor drag it along; when a budget is spent only exact tokens, or ones that pay
    back, are accepted. With leak < 1 a steady deviation of (1 - leak) * budget per step survives.
    `cap` is the budget in bins where the size of a bin is unknown.
    """

    rule: AcceptanceRule = WithinLimits()
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
    def needs_patches(self) -> bool:
        """As the inner rule does."""
        return self.rule.needs_patches

    @property
    def drift_leak(self) -> float:
        """The leak of the budget."""
        return self.leak

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Accepted by the rule, and inside the drift budget all the way."""
        budget = radii_in_bins(scored, self.move, self.turn)
        unknown = scored.context.unit_per_bin == 0
        budget = budget.masked_fill(unknown, float(self.cap))
        after = self.leak * scored.at_positions(scored.context.drift) + scored.deviations
        boundary = scored.at_positions(scored.context.class_boundary)
        inside = after.abs() <= scored.at_positions(budget)
        fine = scored.is_equal | inside | (boundary != NO_CLASS)
        return scored.whole_paths(fine) & self.rule.accepts(scored)

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Replace the inner rule's radius; the budget stays."""
        return replace(self, rule=self.rule.with_radius(radius))


def radii_in_bins(scored: ScoredTree, move: float, turn: float) -> Tensor:
    """Limits in bins, [row, position]; infinite where the size of a bin is unknown."""
    import torch

    context = scored.context
    limit = torch.where(context.groups == DimensionGroup.TURN, turn, move)
    # A hair more than the quotient, so that a limit of exactly k bins admits k bins.
    return limit / context.unit_per_bin * (1 + 1e-6)
