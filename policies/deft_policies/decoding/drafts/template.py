"""Growing a tree of fixed shape: every index is known beforehand, nothing is sorted or searched."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from deft_policies.decoding.plan import DraftKind, Path, TreeTemplate
from deft_policies.decoding.tree import DraftTree


@dataclass(frozen=True)
class LevelPlan:
    """Where the nodes of one level come from, as indices on the device."""

    above: Tensor  # [node], index among the inner nodes of the level above
    ranks: Tensor  # [node]
    num_ranks: int
    inner: Tensor  # [inner], those of the level that get children
    inner_above: Tensor  # [inner], index among the inner nodes of the level above
    ancestors: Tensor  # [inner, inner node so far] bool


@dataclass(frozen=True)
class TemplatePlan:
    """A template on a device."""

    levels: tuple[LevelPlan, ...]
    parents: Tensor  # [node], -1 for the root
    depths: Tensor  # [node]


@dataclass(frozen=True)
class InnerNodes:
    """The nodes of a level whose children are wanted next."""

    depth: int
    tokens: Tensor  # [row, inner]
    above: Tensor  # [inner], index among the inner nodes of the level above
    ancestors: Tensor  # [inner, inner node so far] bool, the level itself included


Continue = Callable[[InnerNodes], Tensor]  # log-probabilities [row, inner, token]


def fill_template(
    template: TreeTemplate, roots: Tensor, log_probs: Tensor, go_on: Continue, first_token: int
) -> DraftTree:
    """Put tokens on the paths of a template; all nodes are real.

    `log_probs` is [row, token], behind the roots. Column i is token `first_token + i`.
    """
    plan = plan_of_template(template, roots.device)
    odds, scores = log_probs[:, None], torch.zeros_like(log_probs[:, :1])
    tokens, totals = [roots[:, None]], [scores]
    for depth, level in enumerate(plan.levels, start=1):
        best = odds.topk(level.num_ranks, dim=2)
        drafted = best.indices[:, level.above, level.ranks] + first_token
        total = scores[:, level.above] + best.values[:, level.above, level.ranks]
        tokens.append(drafted)
        totals.append(total)
        if depth < len(plan.levels):
            inner = drafted[:, level.inner]
            odds = go_on(InnerNodes(depth, inner, level.inner_above, level.ancestors))
            scores = total[:, level.inner]
    every = torch.cat(tokens, dim=1)
    return DraftTree(
        tokens=every,
        parents=plan.parents.expand_as(every),
        is_real=torch.ones_like(every, dtype=torch.bool),
        log_probs=torch.cat(totals, dim=1).float(),
        sources=torch.where(plan.depths > 0, 0, -1).expand_as(every),
    )


def finish_template(tree: DraftTree, kind: DraftKind, deepest: Tensor) -> DraftTree:
    """Name the source, and make padding of what is deeper than `deepest` [row]."""
    depths = tree.depths()
    is_real = depths <= deepest.clamp(min=0)[:, None]
    return DraftTree(
        tokens=tree.tokens,
        parents=tree.parents,
        is_real=is_real,
        log_probs=tree.log_probs.masked_fill(~is_real, 0.0),
        sources=torch.where(depths > 0, kind.number, -1),
    )


@lru_cache(maxsize=64)
def plan_of_template(template: TreeTemplate, device: torch.device) -> TemplatePlan:
    """Indices of every level; remembered, so that nothing is copied to the device twice."""
    numbers = {(): 0} | {path: index for index, path in enumerate(template.paths, start=1)}
    with torch.inference_mode(False):
        parents = [-1, *(numbers[path[:-1]] for path in template.paths)]
        depths = [0, *map(len, template.paths)]
        return TemplatePlan(
            levels=tuple(_plan_level(template, d, device) for d in range(1, template.levels + 1)),
            parents=torch.tensor(parents, device=device),
            depths=torch.tensor(depths, device=device),
        )


def _plan_level(template: TreeTemplate, depth: int, device: torch.device) -> LevelPlan:
    nodes, inner = template.level(depth), template.inner(depth)
    above: tuple[Path, ...] = template.inner(depth - 1) if depth > 1 else ((),)
    so_far = [path for level in range(1, depth + 1) for path in template.inner(level)]
    lineage = [[path[: len(one)] == one for one in so_far] for path in inner]

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return LevelPlan(
        above=numbers([above.index(path[:-1]) for path in nodes]),
        ranks=numbers([path[-1] for path in nodes]),
        num_ranks=1 + max(path[-1] for path in nodes),
        inner=numbers([nodes.index(path) for path in inner]),
        inner_above=numbers([above.index(path[:-1]) for path in inner]),
        ancestors=torch.tensor(lineage, dtype=torch.bool, device=device),
    )
