"""Draft trees: the guesses that one pass of the target model checks together."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


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

    @staticmethod
    def root_only(tokens: Tensor) -> "DraftTree":
        """A tree without guesses: what plain decoding verifies. `tokens` is [row]."""
        root = tokens[:, None]
        return DraftTree(
            tokens=root,
            parents=torch.full_like(root, -1),
            is_real=torch.ones_like(root, dtype=torch.bool),
            log_probs=torch.zeros_like(root, dtype=torch.float32),
            sources=torch.full_like(root, -1),
        )

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
