"""Draft trees: the guesses that one pass of the target model checks together."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class TokenRange:
    """The ids first..last, both included; adjacent ids in an action range are adjacent bins."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def contains(self, tokens: Tensor) -> Tensor:
        """True, elementwise, for the ids inside the range."""
        return (self.first <= tokens) & (tokens <= self.last)

    def within(self, others: "TokenRange") -> slice:
        """Where these ids are among the columns of others."""
        start = self.first - others.first
        return slice(start, start + len(self))


@dataclass(frozen=True)
class DrawnOdds:
    """The odds by which the tokens of a tree were drawn; column i is token `first_token + i`."""

    odds: Tensor  # [row, node, token] float32; the root's row is unused
    first_token: int

    def over(self, vocabulary_size: int, first_token: int) -> Tensor:
        """[row, node, column] over a wider range of tokens; those not drawn from had no odds."""
        before = self.first_token - first_token
        behind = vocabulary_size - before - self.odds.shape[2]
        return functional.pad(self.odds, (before, behind))


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
    drawn: DrawnOdds | None = field(default=None, kw_only=True)  # where tokens were drawn by odds
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
        behind = first.num_nodes - 1
        for tree in rest:
            tokens, parents, *others = (column[:, 1:] for column in tree.columns)
            parents = torch.where(parents > 0, parents + behind, parents)
            columns.append((tokens, parents, *others))
            behind += tree.num_nodes - 1
        return _beside(columns)

    def below(self, roots: Tensor) -> "DraftTree":
        """These nodes as guesses below `roots` [row]; their parents count the root as node 0."""
        together = _beside([DraftTree.root_only(roots).columns, self.columns])
        return replace(together, is_chain=self.is_chain)

    def select(self, nodes: Tensor) -> "DraftTree":
        """The given nodes [node] in ascending order, the root among them.

        No real node may hang on one that is left out.
        """
        renumbered = nodes.new_zeros(self.num_nodes)
        renumbered[nodes] = torch.arange(len(nodes), device=nodes.device)
        tokens, parents, *others = (column[:, nodes] for column in self.columns)
        parents = torch.where(parents < 0, parents, renumbered[parents.clamp(min=0)])
        return DraftTree(tokens, parents, *others, is_chain=self.is_chain)

    def padded(self, num_nodes: int) -> "DraftTree":
        """The same with nodes that are not real behind, told by its tensors alone."""
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


def _beside(parts: Sequence[tuple[Tensor, ...]]) -> DraftTree:
    return DraftTree(*(torch.cat(columns, dim=1) for columns in zip(*parts, strict=True)))
