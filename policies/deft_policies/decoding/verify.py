"""Judging a pass: which path of a scored draft tree is committed. No state.

Where tokens are drawn instead of taken greedily, the odds stay the target's in two exact ways.

Noise fixed per position: the target's token after a node is the maximum of p / E over the
vocabulary, E being exponential noise that belongs to the action position, not to the node. That is
an exact draw from p, and the same draw whatever was drafted, so the output equals plain sampling
with the same seed token by token.

Leviathan's ratio test: where tokens were drawn from known odds q, a draft survives with probability
min(1, p / q). One that falls leaves max(0, p - q) / Z to judge the next draft behind the same node
by, and to draw from when there is none: exact in distribution for trees as for chains.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.rule import AcceptanceRule, ScoredTree
from deft_policies.decoding.sampling import MOST_TRIES, first_maximum, target_odds
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree, DrawnOdds


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
    clamps_late: bool = field(default=False, kw_only=True)  # choose a path first, then cut it

    def predict(self, tree: DraftTree, scores: Scores, num_committed: Tensor) -> Tensor:
        """The target's token after each node, [row, node]."""
        best = first_maximum(scores.logits)
        return best + self.first_token if self.first_token else best

    def judge(self, scored: ScoredTree) -> AcceptedPath:
        """Choose what is committed."""
        if self.clamps_late:
            return longest_then_cut(scored, self.rule, self.tie_break)
        return longest_accepted_path(scored, self.rule, self.tie_break)


@dataclass(frozen=True)
class SampledVerifier(Verifier):
    """Draws the target's tokens with noise fixed per position; drawn trees take the ratio test."""

    temperature: float
    noise: Tensor  # [row, position, vocabulary]
    coins: Tensor  # [row, position, try], uniform

    def predict(self, tree: DraftTree, scores: Scores, num_committed: Tensor) -> Tensor:
        """Draw after each node, [row, node]."""
        places = num_committed[:, None] + tree.depths()
        places = places.clamp(max=self.noise.shape[1] - 1)
        rows = torch.arange(len(places), device=places.device)[:, None]
        odds = target_odds(scores.logits, self.temperature)
        return (odds / self.noise[rows, places]).argmax(dim=2) + self.first_token

    def judge(self, scored: ScoredTree) -> AcceptedPath:
        """Keep drawn drafts while their coins allow, then replace the last that fell."""
        if scored.tree.drawn is None:
            return super().judge(scored)
        return self._ratio_test(scored, scored.tree.drawn)

    def _ratio_test(self, scored: ScoredTree, drawn: DrawnOdds) -> AcceptedPath:
        """Walk down from the root: of the drafts behind a node the first whose coin allows stands.

        `odds` are p, less what drafts that fell could have been: max(0, odds - q) / Z for each.
        """
        tree, rows = scored.tree, torch.arange(len(scored.num_committed), device=self.coins.device)
        p = target_odds(scored.scores.logits, self.temperature)
        q = drawn.over(p.shape[2], self.first_token)
        is_judged = (tree.depths() <= scored.deepest[:, None]) & tree.is_real
        at, depth, tries = (torch.zeros_like(scored.num_committed) for _ in range(3))
        odds = p[:, 0]
        for node in range(1, tree.num_nodes):
            token = tree.tokens[:, node] - self.first_token
            coin = self.coins[rows, self._place(scored, depth), tries.clamp(max=MOST_TRIES - 1)]
            asked = (tree.parents[:, node] == at) & is_judged[:, node] & (tries < MOST_TRIES)
            stands = asked & (coin * q[rows, node, token] < odds[rows, token])
            left = _without_draft(odds, q[:, node])
            odds = torch.where((asked & ~stands)[:, None], left, odds)
            odds = torch.where(stands[:, None], p[:, node], odds)
            at, depth = torch.where(stands, node, at), depth + stands
            tries = torch.where(stands, 0, tries + asked)
        noise = self.noise[rows, self._place(scored, depth)]
        bonus = (odds / noise).argmax(dim=1) + self.first_token
        walked = _walk(scored, at)
        drafted = tree.tokens.gather(1, walked.path).roll(-1, dims=1)
        own = drafted.scatter(1, depth[:, None], bonus[:, None])
        return replace(walked, bonus=bonus, own=own)

    def _place(self, scored: ScoredTree, depth: Tensor) -> Tensor:
        """The position of the token behind a node of this depth, [row]."""
        return (scored.num_committed + depth).clamp(max=self.noise.shape[1] - 1)


def _without_draft(odds: Tensor, q: Tensor) -> Tensor:
    """What is left of the target's odds when a draft drawn by q has fallen, [row, token]."""
    residual = (odds - q).clamp(min=0)
    mass = residual.sum(dim=1, keepdim=True)
    # Rounding can leave nothing of a residual whose mass is next to nothing; the odds are as good.
    return torch.where(mass > 0, residual / mass, odds)


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
    inside = scored.tree.depths() <= scored.deepest.unsqueeze(1)
    return _longest(scored, rule.accepts(scored) & inside, rule.is_exact, tie_break)


def longest_then_cut(scored: ScoredTree, rule: AcceptanceRule, tie_break: TieBreak) -> AcceptedPath:
    """Take the longest path however deep it is, then cut it where the action ends (Spec-VLA).

    So a long path may win by guesses beyond the end, before another that is better up to there.
    """
    chosen = _longest(scored, rule.accepts(scored), is_exact=False, tie_break=tie_break)
    kept = torch.minimum(chosen.num_accepted, scored.deepest.clamp(min=0))
    bonus = chosen.own.gather(1, kept[:, None]).squeeze(1)
    return replace(chosen, num_accepted=kept, bonus=bonus)


def _longest(
    scored: ScoredTree, accepted: Tensor, is_exact: bool, tie_break: TieBreak
) -> AcceptedPath:
    length = scored.tree.depths().masked_fill(~accepted, -1)
    if is_exact:  # equally long exact paths carry the same tokens
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
