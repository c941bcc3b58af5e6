"""Trees that a model grows: the likeliest tokens, or drawn ones, level by level, on the device.

A beam tree is EAGLE-2's: the `top_k` likeliest nodes of a level get children, and of all candidates
the likeliest stay. A template tree has the same paths in every round, so nothing is sorted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import MOST_BRANCHES, Path, TreeShape
from deft_policies.decoding.sampling import DRAFT, exponential, target_odds
from deft_policies.decoding.tree import Branches


@dataclass(frozen=True)
class Level:
    """The open nodes of one level: those whose children are wanted next."""

    depth: int
    tokens: Tensor  # [row, node]
    above: Tensor  # [row, node], index among the open nodes of the level above; 0 for the root
    ancestors: Tensor  # [row, node, open node so far] bool, the level itself included


Extend = Callable[[Level], Tensor]  # log-probabilities of the children [row, node, token]
# Log-probabilities [row, node, token], a depth, ranks [node]: tokens [row, node] and their odds.
Draw = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]
# Of what was grown, [row, guess]: tokens, parents (the root is 0), whether they are real and
# log-probabilities; and the odds [row, guess, token] by which they were drawn.
Grown = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Limits:
    """How much of a beam tree's shape counts in each row; the rest is padding."""

    top_k: Tensor  # [row]
    num_guesses: Tensor  # [row]


def beam_tree(
    shape: TreeShape,
    log_probs: Tensor,
    extend: Extend,
    deepest: Tensor,
    first_token: int,
    limits: Limits | None = None,
) -> Grown:
    """EAGLE-2: the likeliest nodes of a level stay open, the likeliest of all are kept.

    `log_probs` [row, token] are of the children of the roots; column i is token
    `first_token + i`. Levels below `deepest` [row] are padding in that row. With `limits` a row's
    tree is that of a smaller shape.
    """

    def cut(totals: Tensor, depth: int) -> Tensor:
        return totals.masked_fill((deepest < depth)[:, None], -torch.inf)

    num_rows, top_k = len(log_probs), shape.top_k
    itself = torch.eye(top_k, dtype=torch.bool, device=log_probs.device).expand(num_rows, -1, -1)
    ranks = torch.arange(top_k, device=log_probs.device)
    is_beyond = None if limits is None else ranks >= limits.top_k[:, None]  # [row, rank]

    def narrowed(values: Tensor) -> Tensor:
        """Values [row, ..., rank] without the ranks that a row's shape does not have."""
        if is_beyond is None:
            return values
        beyond = is_beyond if values.dim() == 2 else is_beyond[:, None]
        return values.masked_fill(beyond, -torch.inf)

    best = log_probs.topk(top_k, dim=1)
    tokens, scores = best.indices + first_token, narrowed(best.values)
    # Of every level [row, candidate]: token, score, and parent among all candidates above.
    levels = [(tokens, cut(scores, 1), torch.full_like(tokens, -1))]
    indices = ranks.expand_as(tokens)  # among all candidates
    level = Level(1, tokens, torch.zeros_like(tokens), itself)
    num_candidates = top_k
    for depth in range(2, shape.levels + 1):
        children = extend(level).topk(top_k, dim=2)
        tokens = (children.indices + first_token).flatten(1)
        totals = (scores[:, :, None] + narrowed(children.values)).flatten(1)
        parents = indices[:, :, None].expand(-1, -1, top_k).flatten(1)
        levels.append((tokens, cut(totals, depth), parents))
        kept = totals.topk(top_k, dim=1)
        scores, indices = narrowed(kept.values), num_candidates + kept.indices
        above = kept.indices // top_k
        so_far = level.ancestors.shape[2]
        inherited = level.ancestors.gather(1, above[:, :, None].expand(-1, -1, so_far))
        ancestors = torch.cat((inherited, itself), dim=2)
        level = Level(depth, tokens.gather(1, kept.indices), above, ancestors)
        num_candidates += top_k**2
    num_kept = min(shape.num_guesses, num_candidates)
    if limits is not None:  # one more, that is no guess, in place of guesses beyond a limit
        no_guess = torch.full_like(tokens[:, :1], -1)
        levels.append((no_guess, torch.full_like(scores[:, :1], -torch.inf), no_guess))
    # Of all candidates the likeliest stay, in the order in which they were made.
    tokens, scores, parents = (torch.cat(column, dim=1) for column in zip(*levels, strict=True))
    # Stable, so that of equal scores the earlier wins: no child is ever kept without its parent.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_kept]
    new_numbers = torch.arange(1, num_kept + 1, device=order.device).expand_as(order)
    if limits is not None:
        order = order.masked_fill(new_numbers > limits.num_guesses[:, None], num_candidates)
    chosen = order.sort(dim=1).values
    renumbered = torch.zeros_like(parents).scatter(1, chosen, new_numbers)
    above = parents.gather(1, chosen)
    log_probs = scores.gather(1, chosen)
    is_real = log_probs > -torch.inf
    parents = renumbered.gather(1, above.clamp(min=0)).masked_fill(above < 0, 0)
    return tokens.gather(1, chosen), parents, is_real, log_probs.masked_fill(~is_real, 0.0), None


def template_tree(
    shape: TreeShape,
    log_probs: Tensor,
    extend: Extend,
    deepest: Tensor,
    first_token: int,
    draw: Draw | None = None,
) -> Grown:
    """The likeliest tokens on the paths of a template, or drawn ones, whose odds are kept."""
    levels, parents, depths = template_indices(shape.paths, len(log_probs), log_probs.device)
    log_probs, scores = log_probs[:, None], torch.zeros_like(log_probs[:, :1])
    tokens, totals, odds = [], [], []
    for level, above, ranks, num_ranks, is_open in levels:
        if draw is None:
            best = log_probs.topk(num_ranks, dim=2)
            found = best.indices[:, above, ranks]
            totals.append(scores[:, above] + best.values[:, above, ranks])
            scores = totals[-1][:, is_open]
        else:
            found, drawn_by = draw(log_probs[:, above], level.depth, ranks)
            odds.append(drawn_by)
        tokens.append(found + first_token)
        if level.depth < len(levels):
            log_probs = extend(replace(level, tokens=tokens[-1][:, is_open]))
    all_tokens = torch.cat(tokens, dim=1)
    parents, is_real = parents.expand_as(all_tokens), depths <= deepest.clamp(min=0)[:, None]
    if draw is not None:
        unknown = torch.zeros_like(all_tokens, dtype=torch.float32)
        return all_tokens, parents, is_real, unknown, torch.cat(odds, dim=1)
    known = torch.cat(totals, dim=1).float().masked_fill(~is_real, 0.0)
    return all_tokens, parents, is_real, known, None


@lru_cache(maxsize=64)
def template_indices(
    paths: tuple[Path, ...], num_rows: int, device: torch.device
) -> tuple[list[tuple[Level, Tensor, Tensor, int, Tensor]], Tensor, Tensor]:
    """Indices of every level; then the parents and the depths of all guesses, [guess].

    Of a level: the `Level` of its open nodes but their tokens; of all its nodes [node] the index
    among the open nodes above and the rank; how many ranks there are; and which nodes are open,
    [open]. Remembered, so that nothing is copied to the device twice.
    """
    shape = TreeShape.of_paths(paths)
    numbers = {(): 0} | {path: index for index, path in enumerate(paths, start=1)}

    def on_device(values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    levels, so_far = [], list[Path]()
    above: tuple[Path, ...] = ((),)
    with torch.inference_mode(False):
        for depth in range(1, shape.levels + 1):
            nodes, inner = shape.level(depth), shape.inner(depth)
            so_far += inner
            lineage = on_device(
                [[path[: len(start)] == start for start in so_far] for path in inner], torch.bool
            ).view(len(inner), len(so_far))
            level = Level(
                depth,
                tokens=on_device([]),
                above=on_device([above.index(path[:-1]) for path in inner]).expand(num_rows, -1),
                ancestors=lineage.expand(num_rows, -1, -1),
            )
            hung = on_device([above.index(path[:-1]) for path in nodes])
            ranks, is_open = [path[-1] for path in nodes], [nodes.index(path) for path in inner]
            levels.append((level, hung, on_device(ranks), 1 + max(ranks), on_device(is_open)))
            above = inner
        parents = on_device([numbers[path[:-1]] for path in paths])
        return levels, parents, on_device([len(path) for path in paths])


def grow(
    shape: TreeShape,
    log_probs: Tensor,
    extend: Extend,
    deepest: Tensor,
    first_token: int,
    draw: Draw | None = None,
) -> Grown:
    """A tree of that shape, whichever way it grows; other arguments as of `beam_tree`."""
    if draw is None and not shape.paths:
        return beam_tree(shape, log_probs, extend, deepest, first_token)
    return template_tree(shape.as_template(), log_probs, extend, deepest, first_token, draw)


def read_grown(grown: Grown, num_rows: int) -> list[Branches]:
    """The guesses of each row on the host, in one read; what is not real is left out."""
    return read_packed(pack_grown(grown)[:num_rows], grown[4])


def pack_grown(grown: Grown) -> Tensor:
    """What is read of grown trees, float64 [row, column, guess]; token ids are exact in it."""
    return torch.stack([numbers.double() for numbers in grown[:4]], dim=1)


def read_packed(packed: Tensor, odds: Tensor | None) -> list[Branches]:
    """The guesses of each row on the host, in one read of [row, column, guess]."""
    trees = []
    for row, (tokens, parents, is_real, log_probs) in enumerate(packed.tolist()):
        real = [node for node, is_one in enumerate(is_real) if is_one]
        number = {0: 0} | {node + 1: index for index, node in enumerate(real, start=1)}
        kept_odds = None if odds is None else _picked(odds[row], real)
        trees.append(
            Branches(
                [int(tokens[node]) for node in real],
                [number[int(parents[node])] for node in real],
                [log_probs[node] for node in real],
                kept_odds,
            )
        )
    return trees


def _picked(odds: Tensor, nodes: list[int]) -> Tensor:
    """Rows of [guess, token]; of a tree's first guesses without a copy of their numbers."""
    return odds[: len(nodes)] if nodes == list(range(len(nodes))) else odds[nodes]


def drawing(
    method: Method, keys: Tensor, counts: Tensor, first_token: int, num_tokens: int
) -> Draw | None:
    """How tokens are drawn for the ratio test; None where a method takes the likeliest.

    The odds are over `num_tokens` tokens; those that can be drawn begin with `first_token`. A draft
    has the noise of its position, `counts` [row] being that behind the root, and of its rank among
    its siblings, which are drawn from the same odds, each for itself, so that two of them may be
    equal. Only one round judges the drafts of a position, and of two nodes with different parents
    only one is judged, so what decides is never drawn twice.
    """
    if not method.draws:
        return None
    return drawing_at(method.temperature, keys, counts, first_token, num_tokens)


def drawing_at(
    temperature: float | Tensor, keys: Tensor, counts: Tensor, first_token: int, num_tokens: int
) -> Draw:
    """The same at a temperature, which may be one of each row, [row, 1, 1]."""

    def draw(log_probs: Tensor, depth: int, ranks: Tensor) -> tuple[Tensor, Tensor]:
        odds = target_odds(log_probs, temperature)
        positions = (counts + depth - 1)[:, None] * MOST_BRANCHES + ranks
        noise = exponential(keys, DRAFT, positions, odds.shape[2])
        around = (first_token, num_tokens - first_token - odds.shape[2])
        return (odds / noise).argmax(dim=-1), functional.pad(odds, around)

    return draw
