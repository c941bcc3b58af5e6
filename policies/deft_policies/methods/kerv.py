"""KERV (DAC 2026): a radius that shrinks over the episode.

With s the step of the episode, a draft d is accepted if |d - t| <= r(s), where

    r(s) = low + (high - low) exp(-(s / tau)^beta)

loose while the arm travels, tight near the end.

Drafts: the head's tree and the last action, side by side. In the code that was released, what
the paper calls a Kalman filter holds the last action.

Defaults: from 15 bins to 5, the paper's range; tau = 100 steps.

Left out, and so named `kerv-like`: the paper completes every fourth action without verifying it,
and its radius follows how the arm moves. Here every token is verified, and the radius goes by the
step alone, as in the released code.

Numbers: docs/results/methods.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import AcceptanceRule, Guess, PathRule
from deft_policies.decoding.plan import plan

if TYPE_CHECKING:
    from deft_policies.decoding.sequence import Sequence


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


METHODS = {"kerv-like": "autoregressive:rule=scheduled-radius,plans=kerv"}
RULES = {"scheduled-radius": ScheduledRadius}
PLANS = {"kerv": (plan("tree+hold", "", "head+previous"), plan("hold", "", "previous"))}
