"""FLy (ICLR 2026): a miss is accepted where the target is unsure and its next tokens agree.

In the paper's letters: h_j is the target's entropy at position j, as a share of the largest there
can be, theta the gate, W the window, K the drafts of a round, N_W(j) the misses among the W drafts
behind j. A draft that misses at j is kept if h_j >= theta, N_W(j) = 0 and j + W <= K.

Drafts: a chain of a small model, sped up by n-grams (`multi_level`). Without a small model the head
or the last action drafts.

Defaults: theta = 0.3 and W = 6, as in the paper. An action has seven tokens, so that a window of 6
nearly never fits: here the window ends where the action does. `clip=off` is the paper to the
letter, `gate=off` FLy without its gate, `window=0` its FLy-. `cap` also bounds the distance of
action tokens, and `text=on` relaxes words of a text, as the paper does.

Left out: the paper's long chains (K = 15 and 25), because an action has seven tokens; n-grams of
the prompt, which holds no action (those of the session's actions are used); and sampling: a relaxed
rule decodes greedily.

Numbers: docs/results/methods.md and docs/results/texts.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.rule import JudgedTree, ScoredNodes, TreeRule
from deft_policies.decoding.knobs import read_switch
from deft_policies.decoding.plan import TreeShape, plan

if TYPE_CHECKING:
    from torch import Tensor

    from deft_policies.decoding.sequence import Sequence


@dataclass(frozen=True)
class DeferredWindow(TreeRule):
    """A miss at depth j is kept if h_j >= theta and the next min(W, left) drafts match (FLy).

    h is the target's entropy over its whole vocabulary, as a share of the largest there can be.
    Without the gate every miss is deferred; with a window of 0 the gate alone decides (FLy-).

    FLy waits W tokens to see whether the target corrects itself, and rejects a miss whose window
    runs off the draft: j + W > K. An action has seven tokens, so the window ends where the action
    does; `clip=False` is the paper to the letter. `cap`, if given, also bounds |d - t| of action
    tokens; FLy has no such bound. With `text`, words of a text are relaxed, too.
    """

    theta: float = 0.3
    window: int = 6
    cap: int | None = None
    gate: bool = True
    clip: bool = True
    text: bool = False

    radius_field = "cap"

    @property
    def needs_space(self) -> bool:
        """Only a cap is a distance."""
        return self.cap is not None

    def may_relax(self, drafted: int, expected: int, sequence: Sequence) -> bool:
        """Bins of an action, and words where `text` says so."""
        are_words = self.text and sequence.is_word(drafted) and sequence.is_word(expected)
        return are_words or super().may_relax(drafted, expected, sequence)

    def measure(self, scored: ScoredNodes) -> Tensor | None:
        """h, where there is a gate."""
        return scored.whole_entropy if self.gate else None

    def accepts(self, judged: JudgedTree) -> list[bool]:
        """Every miss on the path gated, and its window on the path clean."""
        tree, num_nodes = judged.tree, judged.tree.num_nodes
        missed = [not equal for equal in judged.is_equal]
        fine = [
            not missed[node] or (judged.is_relaxable[node] and self._is_gated(judged, node))
            for node in range(num_nodes)
        ]
        accepted = judged.whole_paths(fine)
        for node in range(tree.root + 1, num_nodes):
            if accepted[node]:
                accepted[node] = self._has_clean_windows(judged, missed, node)
        return accepted

    def _is_gated(self, judged: JudgedTree, node: int) -> bool:
        if self.gate and judged.measured[node] < self.theta:
            return False
        is_word = judged.sequence.is_word(judged.tree.tokens[node])
        return self.cap is None or is_word or judged.distance(node) <= self.cap

    def _has_clean_windows(self, judged: JudgedTree, missed: list[bool], node: int) -> bool:
        """Whether every miss on the node's path has its window on that path, without a miss."""
        path = judged.tree.path_to(node)[judged.tree.root + 1 :]
        misses = [depth for depth, node in enumerate(path, start=1) if missed[node]]
        for miss in misses:
            end = miss + self.window
            if self.clip:
                end = min(end, judged.deepest)
            if end > len(path) or any(miss < other <= end for other in misses):
                return False
        return True


OPTIONS = {"multi_level": read_switch}
METHODS = {"fly": "autoregressive:rule=deferred-window,plans=fly,multi_level=on"}
RULES = {"deferred-window": DeferredWindow}
PLANS = {
    "fly": (
        plan("small-model", "", "small-model", TreeShape.chain(6)),
        plan("memory+chain", "previous", "head", TreeShape.chain(6)),
        plan("memory", "previous", "previous"),
    ),
}
