"""Spec-VLA (Wang et al. 2025): drafts of an EAGLE-2 head, accepted within r bins.

In the paper's letters: the draft token a^_i is accepted if its distance D from the verification
model's token a_i is at most the relaxation threshold r (eq. 5). r = 9, or 5 for LIBERO-Long. What
is kept is the draft, not a_i.

Drafts: the head's tree of 5 levels with 8 branches, of which the 49 likeliest drafts stay, all
levels in every round. Nothing is drafted in the prefill.

As its code does, the head drafts over all tokens, distances are of raw token ids, and any id of an
action may be relaxed. Of equally long paths the first leaf's wins (`ties=first-row`, because its
code has a row for each leaf) or the one with the smallest sum of distances (`ties=closest`). Its
own loop (`loop=published`) stops only when it has seen a token behind the action: a draft may be
the seventh token, and where the bonus is the seventh one more pass runs. Ours (`loop=lean`) stops
at the seventh token, which is always a bonus.

Left out: two slips of the published code. It gives the nodes of a head's tree wrong positions; here
they are right, and `--draft-rope published` and `--draft-key-mask prefix-only` play published heads
as they were trained. Where it commits an eighth token it executes the last seven; here the action
is the first seven. Also left out: the speed-up beside its own plain loop, which runs a pass more
than is needed.

Numbers: docs/results.md, "The papers' methods on one engine" and docs/results/spec_vla.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from deft_policies.decoding.acceptance.rule import JudgedTree, LocalRule
from deft_policies.decoding.plan import TreeShape, plan

if TYPE_CHECKING:
    from deft_policies.decoding.sequence import Sequence
    from deft_policies.decoding.tree import DraftTree


@dataclass(frozen=True)
class WithinIds(LocalRule):
    """|d - t| <= r on raw token ids over the whole vocabulary, as released.

    Kept because published numbers were made with it; `within-bins` is for anything else. It may
    relax a token of an action that is no action token. In text it is as any other rule: words are
    exact.

    `ties` says which of equally long paths wins: that of the first leaf in node order, or the
    closest, as with every other rule. With the `published` loop a draft of the last token counts:
    the longest path wins however deep it is, and then it is cut where the action ends.
    """

    radius: int = 9
    ties: Literal["first-row", "closest"] = "first-row"
    loop: Literal["lean", "published"] = "lean"

    radius_field = "radius"

    def accepts(self, drafted: int, expected: int, place: int) -> bool:
        """Whether the two token ids are at most `radius` apart."""
        return abs(drafted - expected) <= self.radius

    def may_relax(self, drafted: int, expected: int, sequence: Sequence) -> bool:
        """Any two ids of an action."""
        return sequence.spec.is_action or super().may_relax(drafted, expected, sequence)

    @property
    def tokens_behind(self) -> int:
        """The published loop ends when it has seen a token behind the action."""
        return 1 if self.loop == "published" else 0

    def best_path(self, judged: JudgedTree, accepted: list[bool]) -> list[int]:
        """The longest by this loop; of equally long ones that by `ties`."""
        tree, is_published = judged.tree, self.loop == "published"
        longest = judged.longest(accepted if is_published else judged.within_answer(accepted))
        if self.ties == "closest":
            best = min(longest, key=lambda node: judged.distance_to(node, accepted))
        else:
            leaves = first_leaves(tree)
            best = min(longest, key=lambda node: leaves[node])
        path = tree.path_to(best)
        return path[: tree.root + 1 + max(judged.deepest, 0)] if is_published else path


def first_leaves(tree: DraftTree) -> list[int]:
    """The smallest leaf at or below each node, [node]."""
    first = [tree.num_nodes] * tree.num_nodes
    inner = set(tree.parents)
    for node in reversed(range(tree.num_nodes)):
        if node not in inner:
            first[node] = node
        parent = tree.parents[node]
        if parent >= 0:
            first[parent] = min(first[parent], first[node])
    return first


# By name: a known method, a colon, and what is changed about it (docs/decoding.md).
METHODS = {
    "spec-vla": "autoregressive:rule=within-ids,radius=9,plans=spec-vla,whole_vocabulary=on",
    "spec-vla-strict": "spec-vla:radius=0",
    "spec-vla-long": "spec-vla:radius=5",
    "spec-vla-published": "spec-vla:loop=published",
}
RULES = {"within-ids": WithinIds}
_SHAPE = TreeShape(5, 8, 49, is_full_depth=True)
PLANS = {"spec-vla": (plan("spec-vla", prefill="", rounds="head", shape=_SHAPE),)}
