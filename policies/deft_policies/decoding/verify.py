"""Judging a pass: which path of a scored draft tree is committed. No state.

Where tokens are drawn instead of taken greedily, the odds stay the target's in two exact ways.

Noise fixed per position: the target's token after a node is the maximum of p / E over the
vocabulary, E being exponential noise that belongs to the action position, not to the node. That is
an exact draw from p, and the same draw whatever was drafted, so the output equals plain sampling
with the same seed token by token.

Leviathan's ratio test: in a chain whose tokens were drawn from known odds q, a draft survives with
probability min(1, p / q), and the first that does not is replaced by a draw from max(0, p - q) / Z.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.rule import AcceptanceRule, ScoredTree
from deft_policies.decoding.sampling import first_maximum, target_odds
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree


class TieBreak(Enum):
    """Which of several longest accepted paths wins."""

    CLOSEST = "closest"  # smallest total distance in bins, then the likelier draft, then the first
    FIRST_ROW = "first-row"  # the path of the first leaf, in node order, below it (EAGLE, Spec-VLA)


@dataclass(frozen=True)
class AcceptedPath:
    """The path that won in every row, ready for `TargetModel.commit`.

    `path` starts with the root and is padded with any nodes; `num_accepted` counts the drafts on
    it. `bonus` is the target's own token after it. `own` is what the target would have said after
    each node of the path: it differs from the next draft on it where a rule was generous.
    """

    path: Tensor  # [row, step] node indices
    num_accepted: Tensor  # [row]
    bonus: Tensor  # [row]
    own: Tensor  # [row, step]


@dataclass(frozen=True)
class Verifier:
    """Judges passes by one rule; the target's own tokens are its likeliest."""

    rule: AcceptanceRule
    tie_break: TieBreak
    first_token: int  # the id of the logits' column 0

    def predict(self, tree: DraftTree, scores: Scores, num_committed: Tensor) -> Tensor:
        """The target's token after each node, [row, node]."""
        best = first_maximum(scores.logits)
        return best + self.first_token if self.first_token else best

    def judge(self, scored: ScoredTree) -> AcceptedPath:
        """Choose what is committed."""
        return longest_accepted_path(scored, self.rule, self.tie_break)


@dataclass(frozen=True)
class SampledVerifier(Verifier):
    """Draws the target's tokens with noise fixed per position; drawn chains take the ratio test."""

    temperature: float
    noise: Tensor  # [row, position, vocabulary]
    coins: Tensor  # [row, position], uniform

    def predict(self, tree: DraftTree, scores: Scores, num_committed: Tensor) -> Tensor:
        """Draw after each node, [row, node]."""
        places = num_committed[:, None] + tree.depths()
        places = places.clamp(max=self.noise.shape[1] - 1)
        rows = torch.arange(len(places), device=places.device)[:, None]
        odds = target_odds(scores.logits, self.temperature)
        return (odds / self.noise[rows, places]).argmax(dim=2) + self.first_token

    def judge(self, scored: ScoredTree) -> AcceptedPath:
        """Keep drawn drafts while their coins allow, then replace the first that falls."""
        tree = scored.tree
        if tree.drawn is None:
            return super().judge(scored)
        p = target_odds(scored.scores.logits, self.temperature)
        q = tree.drawn.over(p.shape[2], self.first_token)
        drafted = (tree.tokens[:, 1:] - self.first_token)[:, :, None]
        p_drafted = p[:, :-1].gather(2, drafted).squeeze(2)
        q_drafted = q[:, 1:].gather(2, drafted).squeeze(2)
        coins = scored.at_positions(self.coins)[:, 1:]
        is_judged = (tree.depths() <= scored.deepest[:, None]) & tree.is_real
        is_judged = is_judged[:, 1:]
        stands = ((coins * q_drafted < p_drafted) & is_judged).cummin(dim=1).values
        kept = stands.sum(dim=1)
        bonus = self._replacement(scored, p, q, kept, is_judged)
        own = torch.cat((tree.tokens[:, 1:], bonus[:, None]), dim=1)
        own = own.scatter(1, kept[:, None], bonus[:, None])
        steps = min(tree.num_nodes, scored.context.space.length)
        return AcceptedPath(tree.depths()[:, :steps], kept, bonus, own[:, :steps])

    def _replacement(
        self, scored: ScoredTree, p: Tensor, q: Tensor, kept: Tensor, is_judged: Tensor
    ) -> Tensor:
        """Draw the token behind the kept drafts: the residual where one fell, else p."""
        rows = torch.arange(len(kept), device=kept.device)
        p_here = p[rows, kept]
        after = (kept + 1).clamp(max=q.shape[1] - 1)
        residual = (p_here - q[rows, after]).clamp(min=0)
        fell = is_judged.sum(dim=1) > kept
        # Rounding can leave nothing of a residual whose mass is next to nothing; p is then as good.
        has_residual = fell & (residual.sum(dim=1) > 0)
        odds = torch.where(has_residual[:, None], residual, p_here)
        places = (scored.num_committed + kept).clamp(max=self.noise.shape[1] - 1)
        return (odds / self.noise[rows, places]).argmax(dim=1) + self.first_token


def longest_accepted_path(
    scored: ScoredTree, rule: AcceptanceRule, tie_break: TieBreak
) -> AcceptedPath:
    """Judge a tree and take the longest path that may be committed.

    The last token of an action is always the target's own, so guesses at its position (or beyond
    it, in a tree of fixed depth) never count.
    """
    if scored.tree.num_nodes == 1:
        none = torch.zeros_like(scored.predictions)
        return AcceptedPath(none, none[:, 0], scored.predictions[:, 0], scored.predictions)
    if scored.tree.is_chain and rule.is_exact:
        return _exact_chain(scored)
    depths = scored.tree.depths()
    accepted = rule.accepts(scored) & (depths <= scored.deepest.unsqueeze(1))
    length = depths.masked_fill(~accepted, -1)
    if rule.is_exact:  # equally long exact paths carry the same tokens
        return _walk(scored, length.argmax(dim=1))
    return _walk(scored, (length + 0.5 * _preference(scored, accepted, tie_break)).argmax(dim=1))


def _exact_chain(scored: ScoredTree) -> AcceptedPath:
    """The walk along a chain until its first miss, without looking for a path."""
    nodes = scored.tree.depths()
    fine = scored.is_equal & scored.tree.is_real & (nodes <= scored.deepest.unsqueeze(1))
    kept = fine[:, 1:].cummin(dim=1).values.sum(dim=1)
    steps = min(scored.tree.num_nodes, scored.context.space.length)
    bonus = scored.predictions.gather(1, kept.unsqueeze(1)).squeeze(1)
    return AcceptedPath(nodes[:, :steps], kept, bonus, scored.predictions[:, :steps])


def _walk(scored: ScoredTree, last: Tensor) -> AcceptedPath:
    """Collect the path that ends at node `last` of each row."""
    tree = scored.tree
    rows = torch.arange(last.shape[0], device=last.device)
    on_path = tree.ancestor_mask()[rows, last]  # [row, node]
    # Parents come before their children, so a path in node order is a path in depth order.
    nodes = torch.arange(tree.num_nodes, device=last.device)
    steps = min(tree.num_nodes, scored.context.space.length)
    path = torch.where(on_path, nodes, tree.num_nodes).sort(dim=1).values[:, :steps]
    num_accepted = on_path.sum(dim=1) - 1
    path = path.masked_fill(path == tree.num_nodes, 0)
    own = scored.predictions.gather(1, path)
    return AcceptedPath(path, num_accepted, scored.predictions[rows, last], own)


def _preference(scored: ScoredTree, accepted: Tensor, tie_break: TieBreak) -> Tensor:
    """Rank nodes of equal depth: larger is better, always in [0, 1). float64 [row, node]."""
    num_nodes = scored.tree.num_nodes
    if tie_break is TieBreak.FIRST_ROW:
        return 1.0 - _first_leaf(scored).double() / (num_nodes + 1)
    far = scored.deviations.abs().masked_fill(~accepted, 0)
    distance = scored.sum_along_paths(far).double()
    unlikely = torch.sigmoid(-scored.tree.log_probs.double())
    return 1.0 / (1.0 + distance + 0.5 * unlikely)


def _first_leaf(scored: ScoredTree) -> Tensor:
    """The smallest leaf index at or below each node, [row, node]."""
    tree = scored.tree
    nodes = torch.arange(tree.num_nodes, device=tree.tokens.device)
    inner = scored.parents.masked_fill(~tree.is_real, 0)  # padding makes nobody a parent
    is_leaf = torch.ones_like(tree.is_real).scatter(1, inner, False) & tree.is_real
    below = tree.ancestor_mask().transpose(1, 2) & is_leaf.unsqueeze(1)
    return torch.where(below, nodes, tree.num_nodes).amin(dim=2)
