"""Draft trees: the guesses that one pass of the target checks together, and how they are made.

A beam tree is EAGLE-2's: the `top_k` likeliest nodes of a level get children, and of all candidates
the likeliest stay. A template tree has the same paths in every round, so nothing is sorted. A
prefix tree merges chains. Everything happens on the device, without a loop over nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.kinds import source_number
from deft_policies.decoding.plan import Path, TreeShape


@dataclass(frozen=True)
class DraftTree:
    """Guessed continuations of a batch of sequences, as parallel tensors over nodes.

    Node 0 is the root: the last committed token (in the prefill, the last prompt token), not a
    guess. Every parent comes before its children. Rows of one batch share the number of nodes;
    a row with fewer guesses is padded with nodes that are not `is_real`: they hang anywhere, no
    real node hangs on them, and they are never accepted.
    """

    tokens: Tensor  # [row, node] int64
    parents: Tensor  # [row, node] int64, -1 for the root
    is_real: Tensor  # [row, node] bool
    log_probs: Tensor  # [row, node] float32, cumulative draft log-probability; 0 where unknown
    sources: Tensor  # [row, node] int64, index into the draft sources' names; -1 for the root
    # Known without looking at a tensor: in every row, each node hangs on the one before it.
    is_chain: bool = field(default=False, kw_only=True)
    # [row, node, token] float32, where tokens were drawn: the odds of every token of the target's
    # vocabulary at the node's place. The root's are unused.
    odds: Tensor | None = field(default=None, kw_only=True)
    answers: Tensor | None = field(default=None, kw_only=True)  # [row], whose it is: `Row.number`

    @staticmethod
    def root_only(tokens: Tensor) -> "DraftTree":
        """A tree without guesses: what plain decoding verifies. `tokens` is [row]."""
        return DraftTree.chain(tokens[:, None])

    @staticmethod
    def chain(tokens: Tensor, source: int = -1) -> "DraftTree":
        """Nodes that hang on each other, [row, node]; the first is the root."""
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
        sources = torch.full_like(tokens, source)
        sources[:, 0] = -1
        return DraftTree(
            tokens=tokens,
            parents=parents.expand_as(tokens),
            is_real=torch.ones_like(tokens, dtype=torch.bool),
            log_probs=torch.zeros_like(tokens, dtype=torch.float32),
            sources=sources,
            is_chain=True,
        )

    @staticmethod
    def side_by_side(trees: Sequence["DraftTree"]) -> "DraftTree":
        """The guesses of trees of the same roots in one tree. Equal guesses stay two nodes."""
        first, *rest = trees
        if not rest:
            return first
        columns = [first.columns]
        num_guesses = first.num_nodes - 1
        for tree in rest:
            tokens, parents, *others = (column[:, 1:] for column in tree.columns)
            parents = torch.where(parents > 0, parents + num_guesses, parents)
            columns.append((tokens, parents, *others))
            num_guesses += tree.num_nodes - 1
        return DraftTree(*(torch.cat(parts, dim=1) for parts in zip(*columns, strict=True)))

    def below(self, roots: Tensor) -> "DraftTree":
        """These nodes as guesses below `roots` [row]; their parents count the root as node 0."""
        columns = zip(DraftTree.root_only(roots).columns, self.columns, strict=True)
        whole = (torch.cat(both, dim=1) for both in columns)
        return DraftTree(*whole, is_chain=self.is_chain, odds=self.odds)

    def select(self, nodes: Tensor) -> "DraftTree":
        """The given nodes [node] in ascending order, the root among them.

        No real node may hang on one that is left out.
        """
        renumbered = nodes.new_zeros(self.num_nodes)
        renumbered[nodes] = torch.arange(len(nodes), device=nodes.device)
        tokens, parents, *others = (column[:, nodes] for column in self.columns)
        parents = torch.where(parents < 0, parents, renumbered[parents.clamp(min=0)])
        return DraftTree(tokens, parents, *others, is_chain=self.is_chain)

    def first_nodes(self, num_nodes: int) -> "DraftTree":
        """At most so many nodes: the last ones go, on which no earlier one hangs."""
        if self.num_nodes <= num_nodes:
            return self
        tokens, parents, *others = (column[:, :num_nodes] for column in self.columns)
        parents = parents.clamp(max=num_nodes - 1)  # padding may hang on what goes
        return DraftTree(tokens, parents, *others, is_chain=self.is_chain)

    def without_padding(self) -> "DraftTree":
        """Without nodes that are real in no row. The host looks at the tensor."""
        kept = self.is_real.any(dim=0)
        return self if bool(kept.all()) else self.select(kept.nonzero().flatten())

    def padded(self, num_nodes: int) -> "DraftTree":
        """The same with nodes at the end that are not real."""
        more = (0, num_nodes - self.num_nodes)
        fills = (0, 0, False, 0.0, -1)
        columns = zip(self.columns, fills, strict=True)
        return DraftTree(*(functional.pad(one, more, value=fill) for one, fill in columns))

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self.tokens, self.parents, self.is_real, self.log_probs, self.sources

    @property
    def num_nodes(self) -> int:
        """Nodes per row, the root included."""
        return self.tokens.shape[1]

    def ancestor_mask(self) -> Tensor:
        """True where the column node lies on the row node's path to the root, itself included.

        [row, node, node], computed once per tree.
        """
        return self._ancestors

    def depths(self) -> Tensor:
        """Distance of each node from the root, [row, node], computed once per tree."""
        return self._depths

    @cached_property
    def _ancestors(self) -> Tensor:
        """Pointer doubling: each sweep doubles the length of the known paths.

        A chain of n nodes takes log2 n sweeps and no loop over nodes.
        """
        num_rows, num_nodes = self.tokens.shape
        if self.is_chain:
            everything = self.is_real.new_ones(num_nodes, num_nodes)
            return everything.tril_().expand(num_rows, -1, -1)
        step = torch.eye(num_nodes, device=self.tokens.device).repeat(num_rows, 1, 1)
        above = self.parents.clamp(min=0).unsqueeze(2)
        # The root has no parent; its clamped one is itself, which is reached anyway.
        step.scatter_(2, above, 1.0)
        known = 1
        while known < num_nodes - 1:
            step = (step @ step).clamp_(max=1.0)
            known *= 2
        return step > 0.5

    @cached_property
    def _depths(self) -> Tensor:
        if self.is_chain:
            nodes = torch.arange(self.num_nodes, device=self.tokens.device)
            return nodes.expand_as(self.tokens)
        return self._ancestors.sum(dim=2) - 1


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
# log-probabilities; and `DraftTree.odds`.
Grown = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def beam_tree(
    shape: TreeShape, log_probs: Tensor, extend: Extend, deepest: Tensor, first_token: int
) -> Grown:
    """EAGLE-2: the likeliest nodes of a level stay open, the likeliest of all are kept.

    `log_probs` [row, token] are of the children of the roots; column i is token
    `first_token + i`. Levels below `deepest` [row] are padding in that row.
    """

    def cut(totals: Tensor, depth: int) -> Tensor:
        return totals.masked_fill((deepest < depth)[:, None], -torch.inf)

    num_rows, top_k = len(log_probs), shape.top_k
    itself = torch.eye(top_k, dtype=torch.bool, device=log_probs.device).expand(num_rows, -1, -1)
    best = log_probs.topk(top_k, dim=1)
    tokens, scores = best.indices + first_token, best.values
    # Of every level [row, candidate]: token, score, and parent among all candidates above.
    levels = [(tokens, cut(scores, 1), torch.full_like(tokens, -1))]
    indices = torch.arange(top_k, device=tokens.device).expand_as(tokens)  # among all candidates
    level = Level(1, tokens, torch.zeros_like(tokens), itself)
    num_candidates = top_k
    for depth in range(2, shape.levels + 1):
        children = extend(level).topk(top_k, dim=2)
        tokens = (children.indices + first_token).flatten(1)
        totals = (scores[:, :, None] + children.values).flatten(1)
        levels.append((tokens, cut(totals, depth), indices.repeat_interleave(top_k, dim=1)))
        kept = totals.topk(top_k, dim=1)
        scores, indices = kept.values, num_candidates + kept.indices
        above = kept.indices // top_k
        so_far = level.ancestors.shape[2]
        inherited = level.ancestors.gather(1, above[:, :, None].expand(-1, -1, so_far))
        ancestors = torch.cat((inherited, itself), dim=2)
        level = Level(depth, tokens.gather(1, kept.indices), above, ancestors)
        num_candidates += top_k**2
    # Of all candidates the likeliest stay, in the order in which they were made.
    tokens, scores, parents = (torch.cat(column, dim=1) for column in zip(*levels, strict=True))
    num_kept = min(shape.num_guesses, scores.shape[1])
    # Stable, so that of equal scores the earlier wins: no child is ever kept without its parent.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_kept]
    chosen = order.sort(dim=1).values
    places = torch.arange(1, num_kept + 1, device=chosen.device).expand_as(chosen)
    renumbered = torch.zeros_like(parents).scatter(1, chosen, places)
    above = parents.gather(1, chosen)
    log_probs = scores.gather(1, chosen)
    is_real = log_probs > -torch.inf
    parents = torch.where(above < 0, 0, renumbered.gather(1, above.clamp(min=0)))
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
    every = torch.cat(tokens, dim=1)
    parents, is_real = parents.expand_as(every), depths <= deepest.clamp(min=0)[:, None]
    if draw is not None:
        blank = torch.zeros_like(odds[0][:, :1])  # the root was not drawn
        unknown = torch.zeros_like(every, dtype=torch.float32)
        return every, parents, is_real, unknown, torch.cat((blank, *odds), dim=1)
    known = torch.cat(totals, dim=1).float().masked_fill(~is_real, 0.0)
    return every, parents, is_real, known, None


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
                [[path[: len(one)] == one for one in so_far] for path in inner], torch.bool
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


@dataclass(frozen=True)
class Chains:
    """Guessed tokens after the roots, chains side by side. A chain ends at its first unknown."""

    tokens: Tensor  # [row, chain, step] int64; step 0 comes right after the root
    is_known: Tensor  # [row, chain, step] bool


@dataclass(frozen=True)
class DraftLimits:
    """How large a tree may be."""

    roots: Tensor  # [row], the last committed tokens
    shape: TreeShape  # of a tree that is grown
    depth: int  # the deepest guess that can still be committed in some row
    widest: int  # nodes, the root included


def merge(
    found: Sequence[tuple[str, Chains | DraftTree]], limits: DraftLimits, trims: bool
) -> DraftTree:
    """One tree of all guesses: trees side by side, then chains, which share what starts alike.

    `trims` drops what is padding in every row, which means looking at the tensor.
    """
    trees = [one for _, one in found if isinstance(one, DraftTree)]
    chains = [(kind, one) for kind, one in found if isinstance(one, Chains)]
    if chains and limits.depth > 0:
        if trims and len(found) == 1 and chains[0][1].tokens.shape[:2] == (1, 1):
            return _only_chain(*chains[0], limits)
        merged = _prefix_tree(chains, limits)
        merged = merged.without_padding() if trims else merged
        merged = merged.first_nodes(limits.widest)
        if merged.num_nodes > 1 or not trees:
            trees.append(merged)
    if not trees:
        return DraftTree.root_only(limits.roots)
    return DraftTree.side_by_side(trees).first_nodes(limits.widest)


def _only_chain(kind: str, guesses: Chains, limits: DraftLimits) -> DraftTree:
    """The tree of one row's only chain, in fewer operations."""
    known = [*guesses.is_known[0, 0, : limits.depth].tolist(), False].index(False)
    tokens = guesses.tokens[:, 0, : min(known, limits.widest - 1)]
    tokens = torch.cat((limits.roots[:, None], tokens), dim=1)
    return DraftTree.chain(tokens, source_number(kind))


def _prefix_tree(chains: Sequence[tuple[str, Chains]], limits: DraftLimits) -> DraftTree:
    def fitted(values: Tensor) -> Tensor:
        missing = limits.depth - values.shape[2]
        return values if missing == 0 else functional.pad(values, (0, missing))

    tokens = torch.cat([fitted(one.tokens) for _, one in chains], dim=1)
    known = torch.cat([fitted(one.is_known) for _, one in chains], dim=1).cummin(dim=2).values
    num_rows, num_chains, depth = tokens.shape
    # Filled on the device: a list would have to be copied there, which makes the host wait.
    sources = torch.cat(
        [
            tokens.new_full((one.tokens.shape[1] * depth,), source_number(kind))
            for kind, one in chains
        ]
    )
    if num_chains == 1:
        parents, is_real = torch.arange(depth, device=tokens.device).expand(num_rows, -1), known
    else:
        parents, is_real = _share_prefixes(tokens, known)
    return DraftTree(
        tokens=tokens.flatten(1),
        parents=parents,
        is_real=is_real.flatten(1),
        log_probs=torch.zeros_like(parents, dtype=torch.float32),
        sources=sources.expand_as(parents),
        is_chain=num_chains == 1,
    ).below(limits.roots)


def _share_prefixes(tokens: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Parents [row, guess] and reality [row, chain, step] of chains merged into a prefix tree.

    The first of chains that start alike keeps the node and the others' copies become padding, so
    the shape depends on nothing but the number of chains and the depth.
    """
    depth = tokens.shape[2]
    both = known.unsqueeze(2) & known.unsqueeze(1)
    alike = (tokens.unsqueeze(2) == tokens.unsqueeze(1)) & both
    alike = alike.cummin(dim=3).values  # [row, chain, other, step]: equal up to this step
    first = alike.int().argmax(dim=2)  # the first chain with this prefix, [row, chain, step]
    chains = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
    steps = torch.arange(depth, device=tokens.device)
    is_real = known & (first == chains)
    above = 1 + first[:, :, :-1] * depth + steps[:-1]
    parents = torch.cat((torch.zeros_like(first[:, :, :1]), above), dim=2).flatten(1)
    return torch.where(is_real.flatten(1), parents, 0), is_real
