"""LVSpec: strict where a token depends on the image, loose elsewhere."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.acceptance.rule import AcceptanceRule, ScoredTree


@dataclass(frozen=True)
class VisualRelevance(AcceptanceRule):
    """d = t, or d is among the share of least visual drafts, or t is drafted nearby (LVSpec).

    A_i = mean of the N largest cos(h_i, v) over the image patches v, with h_i and v the target's
    last hidden states (eq. 8). Of the K drafts of the pass, the floor(lambda K) with the smallest
    A_i are loose (eq. 9-10). With `shift_tolerant`, a miss also stands when the target's own token
    appears on a common path of the tree, before or after it (eq. 11). For a chain this is the paper
    to the letter. `cap`, if given, also bounds |d - t|; LVSpec has no such bound, and without it a
    loose token may be any action token at all.
    """

    num_patches: int
    share: float
    shift_tolerant: bool
    cap: int | None = None

    @property
    def needs_patches(self) -> bool:
        """The cosines are taken with them."""
        return True

    def accepts(self, scored: ScoredTree) -> Tensor:
        """Equal, loose or merely shifted all the way."""
        fine = self._is_loose(scored)
        if self.shift_tolerant:
            fine = fine | _is_shifted(scored)
        if self.cap is not None:
            fine = fine & (scored.deviations.abs() <= self.cap)
        return scored.whole_paths(scored.is_equal | (fine & scored.is_relaxable))

    def _is_loose(self, scored: ScoredTree) -> Tensor:
        """True for the least visual share of each row's real guesses, [row, node]."""
        is_guess = scored.tree.is_real & (scored.tree.parents >= 0)
        relevance = self.relevance(scored).masked_fill(~is_guess, torch.inf)
        order = relevance.argsort(dim=1, stable=True)
        rank = order.argsort(dim=1)
        num_loose = (is_guess.sum(dim=1) * self.share + 1e-6).floor()
        return is_guess & (rank < num_loose.unsqueeze(1))

    def relevance(self, scored: ScoredTree) -> Tensor:
        """A_i of every node, [row, node]."""
        if scored.context.patches is None:
            raise ValueError("LVSpec needs the hidden states of the image patches")
        nodes = functional.normalize(scored.scores.hidden.float(), dim=2)
        patches = functional.normalize(scored.context.patches.float(), dim=2)
        cosines = nodes @ patches.transpose(1, 2)
        return cosines.topk(min(self.num_patches, cosines.shape[2]), dim=2).values.mean(dim=2)

    def with_radius(self, radius: int) -> AcceptanceRule:
        """Bound the distance of a miss."""
        return replace(self, cap=radius)


def _is_shifted(scored: ScoredTree) -> Tensor:
    """True where the expected token is drafted on a path through the node, [row, node]."""
    ancestors = scored.tree.ancestor_mask()
    related = (ancestors | ancestors.transpose(1, 2)) & scored.tree.is_real.unsqueeze(1)
    related[:, :, 0] = False
    same = scored.expected.unsqueeze(2) == scored.tree.tokens.unsqueeze(1)
    return (same & related).any(dim=2)
