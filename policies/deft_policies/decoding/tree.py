"""A draft tree of one answer, on the host: the guesses that one pass of the target checks together.

Node 0 and the nodes up to the root are committed tokens that are not cached yet; usually the root
alone, the last committed token. Every parent comes before its children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Chain = list[int]


@dataclass
class Branches:
    """Guesses of one source as a tree: `parents` count the root as node 0, guesses from 1 on."""

    tokens: list[int]
    parents: list[int]
    log_probs: list[float] | None = None  # cumulative, of the draft; None where unknown
    # [guess, token] of the target's vocabulary, where tokens were drawn: the odds by which.
    odds: Tensor | None = None


Guesses = list[Chain] | Branches


@dataclass
class DraftTree:
    """Committed tokens up to the root, and guesses below it, as parallel lists over nodes."""

    tokens: list[int]
    parents: list[int]  # -1 for node 0
    sources: list[str]  # which source guessed it; "" where it is committed
    root: int = 0  # the last committed token
    log_probs: list[float] = field(default_factory=list)  # empty where all are unknown
    odds: Tensor | None = None  # [guess, token]: see `Branches`
    is_chain: bool = True  # each node hangs on the one before it

    @staticmethod
    def of_committed(tokens: Sequence[int]) -> DraftTree:
        """A tree without guesses: what plain decoding verifies."""
        count = len(tokens)
        return DraftTree(list(tokens), list(range(-1, count - 1)), [""] * count, count - 1)

    @property
    def num_nodes(self) -> int:
        """Committed nodes and guesses."""
        return len(self.tokens)

    @property
    def has_guesses(self) -> bool:
        """Whether there is anything to accept."""
        return len(self.tokens) > self.root + 1

    def depths(self) -> list[int]:
        """Distance of every node from node 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def path_to(self, node: int) -> list[int]:
        """Nodes from node 0 down to this one, both included."""
        path = [node]
        while path[-1]:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def add(self, source: str, guesses: Guesses, widest: int) -> None:
        """Add guesses below the root until there are `widest` nodes.

        Chains of one call share the nodes of a common beginning; trees share none.
        """
        if isinstance(guesses, Branches):
            self._add_branches(source, guesses, widest)
        else:
            self._add_chains({}, source, guesses, widest)

    def _add_branches(self, source: str, guesses: Branches, widest: int) -> None:
        before = len(self.tokens)
        num = max(min(len(guesses.tokens), widest - before), 0)
        offset = before - 1
        self.tokens += guesses.tokens[:num]
        self.parents += [
            parent + offset if parent else self.root for parent in guesses.parents[:num]
        ]
        self.sources += [source] * num
        if guesses.log_probs is not None:
            self.log_probs += [0.0] * (before - len(self.log_probs))
            self.log_probs += guesses.log_probs[:num]
        if guesses.odds is not None:
            assert before == self.root + 1, "only one source draws its guesses"
            self.odds = guesses.odds[:num]
        self.is_chain = self.is_chain and self._hangs_in_order(before)

    def _add_chains(
        self,
        nodes_by_token: dict[tuple[int, int], int],
        source: str,
        chains: Sequence[Chain],
        widest: int,
    ) -> None:
        for chain in chains:
            above = self.root
            for token in chain:
                node = nodes_by_token.get((above, token))
                if node is None:
                    node = len(self.tokens)
                    if node >= widest:
                        break
                    nodes_by_token[above, token] = node
                    self.tokens.append(token)
                    self.parents.append(above)
                    self.sources.append(source)
                    self.is_chain = self.is_chain and above == node - 1
                above = node

    def _hangs_in_order(self, first: int) -> bool:
        return all(self.parents[node] == node - 1 for node in range(first, len(self.parents)))


def merge(
    committed: Sequence[int], guessed: Sequence[tuple[str, Guesses]], widest: int
) -> DraftTree:
    """One tree of all guesses: trees side by side, then chains, which share common beginnings."""
    tree = DraftTree.of_committed(committed)
    for source, guesses in guessed:
        if isinstance(guesses, Branches):
            tree.add(source, guesses, widest)
    nodes_by_token: dict[tuple[int, int], int] = {}
    for source, guesses in guessed:
        if not isinstance(guesses, Branches):
            tree._add_chains(nodes_by_token, source, guesses, widest)
    return tree
