"""LVSpec (ACL 2026): strict where a token depends on the image, loose elsewhere.

In the paper's letters: A_i is the mean of the N largest cosines between the hidden state of draft i
and those of the image patches (eq. 8). Of the K drafts of a branch the floor(lambda K) with the
smallest A_i are loose: they are accepted whatever the target says (eq. 9-10). So is a miss where
the target's own token is drafted elsewhere on the branch (eq. 11).

Drafts: a chain of a small model that looks at a tenth of the patches. Without a small model the
head or the last action drafts.

Defaults: N = 10 and lambda = 0.7 (`num_patches`, `share`), as in the paper. The tokens of an action
are different dimensions, so that the same token drafted four dimensions later excuses nothing: the
method bounds such a shift by 9 bins. `shift_cap=none` is the paper to the letter. `text=on` relaxes
words of a text.

Left out: videos, for which the paper was made (the patches are of one frame); its chain of ten
drafts, because an action has seven tokens; and sampling. Its tree of two branches is
`tree=branches+2+6`.

Numbers: docs/results/methods.md and docs/results/texts.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import (
    JudgedTree,
    ScoredNodes,
    TreeRule,
    at_least_one,
)
from deft_policies.decoding.knobs import read_share
from deft_policies.decoding.plan import TreeShape, plan

if TYPE_CHECKING:
    from torch import Tensor

    from deft_policies.decoding.sequence import Sequence
    from deft_policies.decoding.target import Prompt

PATCHES = "image patches"  # what the rule notes of an answer: [patch, width]


@dataclass(frozen=True)
class VisualRelevance(TreeRule):
    """d = t, or d is among the share of least visual drafts, or t is drafted nearby (LVSpec).

    A_i = mean of the N largest cos(h_i, v) over the image patches v, with h_i and v the target's
    last hidden states (eq. 8). Of the K drafts of a branch, from the root to a leaf, the
    floor(lambda K) with the smallest A_i are loose (eq. 9-10). With `shift_tolerant`, a miss is
    also accepted when the target's own token is drafted anywhere on the branch (eq. 11), and
    |d - t| is at most `shift_cap`: an action's tokens are different dimensions, so that the same
    token drafted four dimensions later excuses nothing. Every branch is judged for itself, and a
    path is accepted if it is in any branch. `cap`, if given, bounds |d - t| of every miss. The caps
    bound action tokens alone. With neither cap this is the paper to the letter, and a loose token
    may be any action token at all. With `text`, words of a text are relaxed, too.
    """

    num_patches: int = 10
    share: float = 0.7
    shift_tolerant: bool = True
    cap: int | None = None
    shift_cap: int | None = None
    text: bool = False

    radius_field = "cap"
    reads_prompts = True  # for the image patches: the cosines are taken with them

    def __post_init__(self) -> None:
        at_least_one("num_patches", self.num_patches)

    @property
    def needs_space(self) -> bool:
        """Only the caps are distances."""
        return self.cap is not None or self.shift_cap is not None

    def may_relax(self, drafted: int, expected: int, sequence: Sequence) -> bool:
        """Bins of an action, and words where `text` says so."""
        are_words = self.text and sequence.is_word(drafted) and sequence.is_word(expected)
        return are_words or super().may_relax(drafted, expected, sequence)

    def observe_prompt(self, sequence: Sequence, prompt: Prompt, hidden: Tensor) -> None:
        """Keep the hidden states v of the image patches."""
        sequence.notes[PATCHES] = hidden[prompt.patches].clone()

    def measure(self, scored: ScoredNodes) -> Tensor:
        """A_i of every node."""
        from torch.nn import functional

        nodes = functional.normalize(scored.hidden.float(), dim=1)
        patches = functional.normalize(scored.notes[PATCHES].float(), dim=1)
        cosines = nodes @ patches.t()
        return cosines.topk(min(self.num_patches, len(patches)), dim=1).values.mean(dim=1)

    def accepts(self, judged: JudgedTree) -> list[bool]:
        """Equal, loose or merely shifted all the way in one branch."""
        tree = judged.tree
        accepted = [True] * (tree.root + 1) + [False] * (tree.num_nodes - tree.root - 1)
        for branch in judged.branches():
            by_relevance = sorted(branch, key=lambda node: (judged.measured[node], node))
            loose = set(by_relevance[: int(len(branch) * self.share + 1e-6)])
            drafted = {tree.tokens[node] for node in branch}
            for node in branch:
                is_shifted = self.shift_tolerant and judged.expected[node] in drafted
                if not self._is_fine(judged, node, node in loose, is_shifted):
                    break
                accepted[node] = True
        return accepted

    def _is_fine(self, judged: JudgedTree, node: int, is_loose: bool, is_shifted: bool) -> bool:
        if judged.is_equal[node]:
            return True
        is_word = judged.sequence.is_word(judged.tree.tokens[node])
        far = 0 if is_word else judged.distance(node)
        is_shifted = is_shifted and (self.shift_cap is None or far <= self.shift_cap)
        is_near = self.cap is None or far <= self.cap
        return judged.is_relaxable[node] and (is_loose or is_shifted) and is_near


OPTIONS = {"patch_share": read_share}
METHODS = {
    "lvspec": "autoregressive:rule=visual-relevance,shift_cap=9,plans=lvspec,patch_share=0.1",
}
RULES = {"visual-relevance": VisualRelevance}
PLANS = {
    "lvspec": (
        plan("small-model", "", "small-model", TreeShape.chain(6)),
        plan("memory+chain", "previous", "head", TreeShape.chain(6)),
        plan("memory", "previous", "previous"),
    ),
}
