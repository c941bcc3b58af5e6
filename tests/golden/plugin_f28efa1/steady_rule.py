"""An acceptance rule of one's own: near misses stand, but only while the arm has just moved."""

from dataclasses import dataclass

from torch import Tensor

from deft_policies.decoding.acceptance.rule import AcceptanceRule, ScoredTree


@dataclass(frozen=True)
class SteadyRule(AcceptanceRule):
    """|d - t| <= limit, and nothing but t once `steps` steps of the episode have passed."""

    limit: int = 4
    steps: int = 40

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Near all the way; tensors stay on the device, so that nobody waits for them."""
        is_early = (scored.context.num_steps < self.steps)[:, None]
        near = (scored.deviations.abs() <= self.limit) & is_early & scored.is_relaxable
        return scored.whole_paths(scored.is_equal | near)
