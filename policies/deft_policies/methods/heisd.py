"""HeiSD (2026): a budget of bins for each group of dimensions.

Within one action a draft d is accepted if |d - t| <= 15 and the sum of such distances over its
group is at most 30. Translation and rotation are groups of their own; the gripper is exact. What
earlier passes of the action have spent counts.

Drafts: the last action in the prefill and the head in later passes.

Left out, and so named `heisd-like`: the paper drafts from a database of demonstrations, switches
between that and a head by the curvature of the motion, and executes some actions without verifying
them. Here every token is verified.

Numbers: docs/results/methods.md, where the row says "without its index".
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import DimensionGroup, Guess, PathRule
from deft_policies.decoding.plan import plan

if TYPE_CHECKING:
    from deft_policies.decoding.sequence import Sequence


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


METHODS = {"heisd-like": "autoregressive:rule=within-budget,plans=heisd"}
RULES = {"within-budget": WithinBudget}
PLANS = {
    "heisd": (
        plan("memory+tree", "previous", "head"),
        plan("memory", "previous", "previous"),
    ),
}
