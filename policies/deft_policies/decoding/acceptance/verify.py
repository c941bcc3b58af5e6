"""Choosing what to commit once the target model has scored a draft tree. Pure functions."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.rule import AcceptanceRule
from deft_policies.decoding.acceptance.scored import ScoredTree
from deft_policies.decoding.choosing import first_maximum
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree


class TieBreak(Enum):
    """Which of several longest accepted paths wins."""

    CLOSEST = "closest"  # smallest total distance in bins, then the likelier draft, then the first
    FIRST_ROW = "first-row"  # the path of the first leaf, in node order, below it (EAGLE, Spec-VLA)


@dataclass(frozen=True)
class Verdict:
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
    """Judges passes by one rule. Greedy unless `chooser` draws."""

    rule: AcceptanceRule
    tie_break: TieBreak
    first_token: int  # the id of the logits' column 0

    @property
    def needs_patches(self) -> bool:
        """Whether the rule reads hidden states of the image patches."""
        return self.rule.needs_patches

    def predict(self, tree: DraftTree, scores: Scores, num_committed: Tensor) -> Tensor:
        """The target's token after each node, [row, node]."""
        best = first_maximum(scores.logits)
        return best + self.first_token if self.first_token else best

    def judge(self, scored: ScoredTree) -> Verdict:
        """Choose what is committed."""
        return longest_accepted_path(scored, self.rule, self.tie_break)


def longest_accepted_path(scored: ScoredTree, rule: AcceptanceRule, tie_break: TieBreak) -> Verdict:
    """Judge a tree and take the longest path that may be committed.

    The last token of an action is always the target's own, so guesses at its position (or beyond
    it, in a tree of fixed depth) never count.
    """
    if scored.tree.num_nodes == 1:
        return verdict_without_guesses(scored.predictions)
    deepest = scored.context.space.length - 1 - scored.num_committed
    if scored.tree.is_chain and rule.is_exact:
        return _exact_chain(scored, deepest)
    depths = scored.tree.depths()
    accepted = rule.accepts(scored) & (depths <= deepest.unsqueeze(1))
    length = depths.masked_fill(~accepted, -1)
    if rule.is_exact:  # equally long exact paths carry the same tokens
        return _walk(scored, length.argmax(dim=1))
    return _walk(scored, (length + 0.5 * _preference(scored, accepted, tie_break)).argmax(dim=1))


def verdict_without_guesses(predictions: Tensor) -> Verdict:
    """What a pass over the roots alone commits: their predictions, [row, 1]."""
    none = torch.zeros_like(predictions)
    return Verdict(none, none[:, 0], predictions[:, 0], predictions)


def _exact_chain(scored: ScoredTree, deepest: Tensor) -> Verdict:
    """The walk along a chain until its first miss, without looking for a path."""
    nodes = scored.tree.depths()
    fine = scored.is_equal & scored.tree.is_real & (nodes <= deepest.unsqueeze(1))
    kept = fine[:, 1:].cummin(dim=1).values.sum(dim=1)
    steps = min(scored.tree.num_nodes, scored.context.space.length)
    bonus = scored.predictions.gather(1, kept.unsqueeze(1)).squeeze(1)
    return Verdict(nodes[:, :steps], kept, bonus, scored.predictions[:, :steps])


def _walk(scored: ScoredTree, last: Tensor) -> Verdict:
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
    return Verdict(path, num_accepted, scored.predictions[rows, last], own)


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
