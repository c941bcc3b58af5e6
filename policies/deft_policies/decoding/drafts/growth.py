"""Growing a dynamic draft tree as EAGLE-2 does, on the device and without a loop over nodes.

Each level keeps its `top_k` likeliest nodes as the frontier and gives each of them `top_k`
children. In the end the best `num_guesses` of all candidates by cumulative log-probability stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deft_policies.decoding.plan import DraftKind, TreeShape, TreeTemplate
from deft_policies.decoding.tree import DraftTree


@dataclass(frozen=True)
class Growth:
    """What fixes the shape of a tree."""

    kind: DraftKind
    levels: int
    top_k: int
    num_guesses: int
    template: TreeTemplate | None = None

    @staticmethod
    def of(kind: DraftKind, shape: TreeShape, levels: int) -> "Growth":
        """At most so many levels of a shape."""
        template = None if shape.template is None else shape.template.cut(levels)
        return Growth(kind, levels, shape.top_k, shape.num_guesses, template)

    @property
    def num_candidates(self) -> int:
        """Nodes that are considered at all."""
        return self.top_k + (self.levels - 1) * self.top_k**2


@dataclass(frozen=True)
class Candidates:
    """One level's nodes, [row, candidate] each."""

    tokens: Tensor
    scores: Tensor  # cumulative log-probability
    parents: Tensor  # index among all candidates of the levels above, -1 for the root


@dataclass(frozen=True)
class Frontier:
    """The nodes of a level that get children."""

    candidates: Candidates  # the whole level
    tokens: Tensor  # [row, top_k]
    scores: Tensor  # [row, top_k]
    indices: Tensor  # [row, top_k], among all candidates
    ancestors: Tensor  # [row, top_k, level * top_k] bool: frontier nodes above it and itself
    num_above: int  # candidates up to and including this level
    first_token: int

    def next_level(self, log_probs: Tensor, growth: Growth) -> tuple["Frontier", Tensor]:
        """Branch by [row, top_k, vocabulary] log-probabilities.

        Also returns which of the old frontier's nodes each new one hangs on, [row, top_k].
        """
        top_k = growth.top_k
        best = log_probs.topk(top_k, dim=2)
        scores = (self.scores[:, :, None] + best.values).flatten(1)
        tokens = (best.indices + self.first_token).flatten(1)
        parents = self.indices.repeat_interleave(top_k, dim=1)
        kept = scores.topk(top_k, dim=1)
        above = kept.indices // top_k
        inherited = self.ancestors.gather(
            1, above[:, :, None].expand(-1, -1, self.ancestors.shape[2])
        )
        itself = torch.eye(top_k, dtype=torch.bool, device=tokens.device)
        frontier = Frontier(
            candidates=Candidates(tokens, scores, parents),
            tokens=tokens.gather(1, kept.indices),
            scores=kept.values,
            indices=self.num_above + kept.indices,
            ancestors=torch.cat((inherited, itself.expand(len(tokens), -1, -1)), dim=2),
            num_above=self.num_above + tokens.shape[1],
            first_token=self.first_token,
        )
        return frontier, above


def first_level(log_probs: Tensor, growth: Growth, first_token: int) -> Frontier:
    """Children of the roots, by [row, vocabulary] log-probabilities."""
    best = log_probs.topk(growth.top_k, dim=1)
    tokens = best.indices + first_token
    itself = torch.eye(growth.top_k, dtype=torch.bool, device=tokens.device)
    order = torch.arange(growth.top_k, device=tokens.device)
    return Frontier(
        candidates=Candidates(tokens, best.values, torch.full_like(tokens, -1)),
        tokens=tokens,
        scores=best.values,
        indices=order.expand_as(tokens),
        ancestors=itself.expand(len(tokens), -1, -1),
        num_above=growth.top_k,
        first_token=first_token,
    )


def finish_tree(
    roots: Tensor, levels: Sequence[Candidates], growth: Growth, deepest: Tensor
) -> DraftTree:
    """Keep the best candidates of all levels, in the order in which they were made.

    Levels below `deepest` [row] are of no use to a row; what is left of its tree is padding.
    """
    scores = torch.cat(
        [
            one.scores.masked_fill((deepest < level)[:, None], -torch.inf)
            for level, one in enumerate(levels, start=1)
        ],
        dim=1,
    )
    tokens = torch.cat([one.tokens for one in levels], dim=1)
    parents = torch.cat([one.parents for one in levels], dim=1)
    num_kept = min(growth.num_guesses, scores.shape[1])
    # Stable, so that of equal scores the earlier wins: no child is ever kept without its parent.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_kept]
    kept = order.sort(dim=1).values
    places = torch.arange(1, num_kept + 1, device=kept.device).expand_as(kept)
    renumbered = torch.zeros_like(parents).scatter(1, kept, places)
    above = parents.gather(1, kept)
    above = torch.where(above < 0, 0, renumbered.gather(1, above.clamp(min=0)))
    log_probs = scores.gather(1, kept)
    is_real = log_probs > -torch.inf
    root = roots[:, None]
    return DraftTree(
        tokens=torch.cat((root, tokens.gather(1, kept)), dim=1),
        parents=torch.cat((torch.full_like(root, -1), above), dim=1),
        is_real=torch.cat((torch.ones_like(root, dtype=torch.bool), is_real), dim=1),
        log_probs=torch.cat(
            (torch.zeros_like(log_probs[:, :1]), log_probs.masked_fill(~is_real, 0.0)), dim=1
        ),
        sources=torch.cat(
            (torch.full_like(root, -1), torch.full_like(kept, growth.kind.number)), dim=1
        ),
    )
