"""Spec-VLA (Wang et al. 2025): drafts of an EAGLE-2 head, accepted within r bins.

In the paper's letters, with d a draft and t the target's token: d is accepted if |d - t| <= r (eq.
5), r = 9, or 5 for LIBERO-Long. The head grows a tree of 5 levels with 8 branches, of which the 49
likeliest drafts stay, all levels in every round. Of equally long paths the first leaf's wins.

As its code does, distances are of raw token ids, and any id of an action may be relaxed. Its own
loop (`spec-vla-published`) counts a draft of the seventh token, and needs a pass more where that
token is the bonus; ours ends with the seventh token, whichever it is.

Left out: the published code gives the nodes of a head's tree wrong positions. Here they are right;
`--draft-rope published` and `--draft-key-mask prefix-only` play published heads as they were
trained.

Numbers: docs/results.md, "The papers' methods on one engine" and docs/results/spec_vla.md.
"""

from dataclasses import dataclass

from deft_policies.decoding.acceptance.rule import LocalRule
from deft_policies.decoding.plan import TreeShape, plan


@dataclass(frozen=True)
class WithinIds(LocalRule):
    """|d - t| <= r on raw token ids over the whole vocabulary, as released.

    Kept because published numbers were made with it; `within-bins` is for anything else. It may
    relax a token of an action that is no action token. In text it is as any other rule: words are
    exact.
    """

    radius: int = 9

    radius_field = "radius"
    any_id = True

    def accepts(self, drafted: int, expected: int, place: int) -> bool:
        """Near enough."""
        return abs(drafted - expected) <= self.radius


METHODS = {
    "spec-vla": "autoregressive:rule=within-ids,radius=9,plans=spec-vla,ties=first-row,"
    "whole_vocabulary=on",
    "spec-vla-strict": "spec-vla:radius=0",
    "spec-vla-long": "spec-vla:radius=5",
    "spec-vla-published": "spec-vla:loop=published",
}
RULES = {"within-ids": WithinIds}
PLANS = {"spec-vla": (plan("spec-vla", "", "head", TreeShape(5, 8, 49, is_full_depth=True)),)}
