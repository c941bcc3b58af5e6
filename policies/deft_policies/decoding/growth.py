"""Growing draft trees: EAGLE-2's dynamic ones, and templates, whose shape is known beforehand.

On the device and without a loop over nodes. A dynamic tree keeps the `top_k` likeliest nodes of
each level open and gives each of them `top_k` children; in the end the best `num_guesses` of all
candidates by cumulative log-probability stay. In a template nothing is sorted or searched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from deft_policies.decoding.plan import (
    MOST_BRANCHES,
    Path,
    TreeShape,
    TreeTemplate,
    source_number,
)
from deft_policies.decoding.sampling import Sampling, Stream, exponential, target_odds
from deft_policies.decoding.tree import DraftTree, DrawnOdds


@dataclass(frozen=True)
class GrowthStart:
    """What a tree grows from."""

    kind: str
    roots: Tensor  # [row]
    log_probs: Tensor  # [row, token], of the roots' children; column i is token `first_token + i`
    deepest: Tensor  # [row], levels that are of use
    first_token: int


@dataclass(frozen=True)
class OpenNodes:
    """The nodes of one level whose children are wanted next."""

    depth: int
    tokens: Tensor  # [row, node]
    above: Tensor  # [row, node], index among the open nodes of the level above; 0 for the root
    ancestors: Tensor  # [row, node, open node so far] bool, the level itself included


GoOn = Callable[[OpenNodes], Tensor]  # log-probabilities of the children [row, node, token]
Level = tuple[Tensor, Tensor, Tensor]


def grow_tree(shape: TreeShape, start: GrowthStart, go_on: GoOn) -> DraftTree:
    """Grow a tree, level by level. Levels that are of no use to a row are padding there."""
    if shape.template is not None:
        return _fill(shape.template, start, go_on)
    return _branch(shape, start, go_on)


def _branch(shape: TreeShape, start: GrowthStart, go_on: GoOn) -> DraftTree:
    num_rows, top_k = len(start.roots), shape.top_k
    itself = torch.eye(top_k, dtype=torch.bool, device=start.roots.device).expand(num_rows, -1, -1)
    best = start.log_probs.topk(top_k, dim=1)
    tokens, scores = best.indices + start.first_token, best.values
    # Of every level [row, candidate]: token, score, and parent among all candidates above.
    levels = [(tokens, scores, torch.full_like(tokens, -1))]
    indices = torch.arange(top_k, device=tokens.device).expand_as(tokens)  # among all candidates
    nodes = OpenNodes(1, tokens, torch.zeros_like(tokens), itself)
    num_candidates = top_k
    for depth in range(2, shape.levels + 1):
        children = go_on(nodes).topk(top_k, dim=2)
        tokens = (children.indices + start.first_token).flatten(1)
        totals = (scores[:, :, None] + children.values).flatten(1)
        levels.append((tokens, totals, indices.repeat_interleave(top_k, dim=1)))
        kept = totals.topk(top_k, dim=1)
        scores, indices = kept.values, num_candidates + kept.indices
        above = kept.indices // top_k
        so_far = nodes.ancestors.shape[2]
        inherited = nodes.ancestors.gather(1, above[:, :, None].expand(-1, -1, so_far))
        ancestors = torch.cat((inherited, itself), dim=2)
        nodes = OpenNodes(depth, tokens.gather(1, kept.indices), above, ancestors)
        num_candidates += top_k**2
    return _best_of(levels, shape.num_guesses, start)


def _best_of(levels: Sequence[Level], num_guesses: int, start: GrowthStart) -> DraftTree:
    """Keep the best candidates of all levels, in the order in which they were made."""
    scores = torch.cat(
        [
            totals.masked_fill((start.deepest < level)[:, None], -torch.inf)
            for level, (_, totals, _) in enumerate(levels, start=1)
        ],
        dim=1,
    )
    tokens = torch.cat([one for one, _, _ in levels], dim=1)
    parents = torch.cat([one for _, _, one in levels], dim=1)
    num_kept = min(num_guesses, scores.shape[1])
    # Stable, so that of equal scores the earlier wins: no child is ever kept without its parent.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_kept]
    kept = order.sort(dim=1).values
    places = torch.arange(1, num_kept + 1, device=kept.device).expand_as(kept)
    renumbered = torch.zeros_like(parents).scatter(1, kept, places)
    above = parents.gather(1, kept)
    log_probs = scores.gather(1, kept)
    is_real = log_probs > -torch.inf
    return DraftTree(
        tokens=tokens.gather(1, kept),
        parents=torch.where(above < 0, 0, renumbered.gather(1, above.clamp(min=0))),
        is_real=is_real,
        log_probs=log_probs.masked_fill(~is_real, 0.0),
        sources=torch.full_like(kept, source_number(start.kind)),
    ).below(start.roots)


def _fill(template: TreeTemplate, start: GrowthStart, go_on: GoOn) -> DraftTree:
    """Put tokens on the paths of a template."""
    indices = indices_of(template, start.roots.device)
    odds, scores = start.log_probs[:, None], torch.zeros_like(start.log_probs[:, :1])
    tokens, totals = [], []
    for depth, level in enumerate(indices.levels, start=1):
        best = odds.topk(level.num_ranks, dim=2)
        drafted = best.indices[:, level.above, level.ranks] + start.first_token
        total = scores[:, level.above] + best.values[:, level.above, level.ranks]
        tokens.append(drafted)
        totals.append(total)
        if depth < len(indices.levels):
            odds = go_on(level.open_nodes(depth, drafted))
            scores = total[:, level.open]
    return _laid_out(indices, start, tokens, torch.cat(totals, dim=1).float())


def draw_tree(
    template: TreeTemplate,
    start: GrowthStart,
    go_on: GoOn,
    sampling: Sampling,
    keys: Tensor,
    positions: Tensor,
) -> DraftTree:
    """Draw the tokens of a template's paths, and keep the odds for the ratio test.

    `keys` [row] are those of the batch's noise, `positions` [row] those of the roots' children. A
    draft has the noise of its position and of its rank among its siblings, which are drawn from the
    same odds, each for itself, so that two of them may be equal. Only one round judges the drafts
    of a position, and of two nodes with different parents only one is judged, so what decides is
    never drawn twice.
    """
    indices = indices_of(template, start.roots.device)
    log_probs = start.log_probs[:, None]
    tokens: list[Tensor] = []
    every = [torch.zeros_like(log_probs)]  # the root was not drawn
    for depth, level in enumerate(indices.levels, start=1):
        odds = target_odds(log_probs, sampling.temperature)[:, level.above]
        places = (positions + depth - 1)[:, None] * MOST_BRANCHES + level.ranks
        noise = exponential(keys, Stream.DRAFT, places, odds.shape[2])
        tokens.append((odds / noise).argmax(dim=-1) + start.first_token)
        every.append(odds)
        if depth < len(indices.levels):
            log_probs = go_on(level.open_nodes(depth, tokens[-1]))
    unknown = torch.zeros_like(torch.cat(tokens, dim=1), dtype=torch.float32)
    tree = _laid_out(indices, start, tokens, unknown)
    return replace(tree, drawn=DrawnOdds(torch.cat(every, dim=1), start.first_token))


def _laid_out(
    indices: "TemplateIndices", start: GrowthStart, tokens: Sequence[Tensor], log_probs: Tensor
) -> DraftTree:
    """The tokens of every level on the paths of a template."""
    every = torch.cat(tuple(tokens), dim=1)
    is_real = indices.depths <= start.deepest.clamp(min=0)[:, None]
    return DraftTree(
        tokens=every,
        parents=indices.parents.expand_as(every),
        is_real=is_real,
        log_probs=log_probs.masked_fill(~is_real, 0.0),
        sources=torch.full_like(every, source_number(start.kind)),
    ).below(start.roots)


@dataclass(frozen=True)
class LevelIndices:
    """Where the nodes of one level of a template come from, as indices on the device."""

    above: Tensor  # [node], index among the open nodes of the level above
    ranks: Tensor  # [node]
    num_ranks: int
    open: Tensor  # [open], those of the level that get children
    open_above: Tensor  # [open], index among the open nodes of the level above
    ancestors: Tensor  # [open, open node so far] bool

    def open_nodes(self, depth: int, drafted: Tensor) -> OpenNodes:
        """Those of the level's tokens [row, node] whose children are wanted next."""
        above = self.open_above.expand(len(drafted), -1)
        ancestors = self.ancestors.expand(len(drafted), -1, -1)
        return OpenNodes(depth, drafted[:, self.open], above, ancestors)


@dataclass(frozen=True)
class TemplateIndices:
    """A template on a device."""

    levels: tuple[LevelIndices, ...]
    parents: Tensor  # [guess], 0 for the root
    depths: Tensor  # [guess]


@lru_cache(maxsize=64)
def indices_of(template: TreeTemplate, device: torch.device) -> TemplateIndices:
    """Indices of every level; remembered, so that nothing is copied to the device twice."""
    numbers = {(): 0} | {path: index for index, path in enumerate(template.paths, start=1)}
    with torch.inference_mode(False):
        parents = [numbers[path[:-1]] for path in template.paths]
        depths = [len(path) for path in template.paths]
        return TemplateIndices(
            levels=tuple(
                _level_indices(template, depth, device) for depth in range(1, template.levels + 1)
            ),
            parents=torch.tensor(parents, device=device),
            depths=torch.tensor(depths, device=device),
        )


def _level_indices(template: TreeTemplate, depth: int, device: torch.device) -> LevelIndices:
    nodes, inner = template.level(depth), template.inner(depth)
    above: tuple[Path, ...] = template.inner(depth - 1) if depth > 1 else ((),)
    so_far = [path for level in range(1, depth + 1) for path in template.inner(level)]
    lineage = [[path[: len(one)] == one for one in so_far] for path in inner]

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return LevelIndices(
        above=numbers([above.index(path[:-1]) for path in nodes]),
        ranks=numbers([path[-1] for path in nodes]),
        num_ranks=1 + max(path[-1] for path in nodes),
        open=numbers([nodes.index(path) for path in inner]),
        open_above=numbers([above.index(path[:-1]) for path in inner]),
        ancestors=torch.tensor(lineage, dtype=torch.bool, device=device),
    )
