"""Draft trees: the guesses that one pass of the target model checks together."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Guessed continuations of a batch of sequences, as parallel tensors over nodes.

    Node 0 is the root: the last committed token (in the prefill, the last prompt token), not a
    guess. Every parent comes before its children. Rows of one batch share the number of nodes;
    a row with fewer guesses is padded with nodes that hang on the root and are not `is_real`:
    they are never accepted.
    """

    tokens: Tensor  # [row, node] int64
    parents: Tensor  # [row, node] int64, -1 for the root
    is_real: Tensor  # [row, node] bool
    log_probs: Tensor  # [row, node] float32, cumulative draft log-probability; 0 where unknown
    sources: Tensor  # [row, node] int64, index into the draft sources' names; -1 for the root

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

        [row, node, node]. Pointer doubling: each sweep doubles the length of the known paths, so
        a chain of n nodes takes log2 n sweeps and no loop over nodes.
        """
        num_nodes = self.num_nodes
        reach = torch.eye(num_nodes, dtype=torch.bool, device=self.tokens.device)
        reach = reach.expand(self.tokens.shape[0], -1, -1)
        step = torch.zeros_like(reach)
        step = step.scatter(2, self.parents.clamp(min=0)[:, :, None], True)
        step = (step & (self.parents >= 0)[:, :, None]) | reach
        known = 1
        while known < num_nodes:
            step = (step.float() @ step.float()) > 0
            known *= 2
        return step

    def depths(self) -> Tensor:
        """Distance of each node from the root, [row, node]."""
        return self.ancestor_mask().sum(dim=2) - 1
