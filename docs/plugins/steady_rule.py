"""An acceptance rule of one's own: near misses stand, but only early in an episode."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from deft_policies.decoding.acceptance.rule import Guess, PathRule
from deft_policies.decoding.sequence import Sequence


@dataclass(frozen=True)
class SteadyRule(PathRule):
    """|d - t| <= limit, and nothing but t once `steps` steps of the episode have passed."""

    limit: int = 4
    steps: int = 40

    def accepts(self, path: Items[Guess], sequence: Sequence) -> bool:
        """The last guess of the path is judged; all before it stand already."""
        drafted, expected, _ = path[-1]
        is_early = sequence.memory.num_steps < self.steps
        return is_early and abs(drafted - expected) <= self.limit
