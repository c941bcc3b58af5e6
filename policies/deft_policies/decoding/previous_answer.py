"""The last answer of the session as a draft of the next one: verified reuse of long texts.

In the first pass the whole of it rides behind the prompt as one chain. Where the target says
another token, what was matched stays, and up to three chains guess how the old text goes on behind
the new token: after skipping what it replaced (a number changed), from the replaced token on
(something was inserted), or behind the nearest later place that ends as the answer does now
(something was left out). The first of them gets half the width or more, the others enough to line
up. Everything happens on the host, on ids that it has read anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deft_policies.decoding.batch import Batch, Row
from deft_policies.decoding.drafts import MEMORY, DraftSource, Room
from deft_policies.decoding.plan import DraftKind
from deft_policies.decoding.target import Prompts
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.staging import to_device

_SHORT = 16  # tokens of the second and the third chain, at least where there is room
_BACK = 2  # tokens that must be alike for a step back
_LONGEST_MATCH = 8  # tokens that are compared to find the place again


@dataclass
class Alignment:
    """Where in the old answer the new one has come to."""

    old: Sequence[int]
    count: int = 0  # tokens of the new answer that are taken in
    place: int = 0  # of the first old token that is not matched
    changed: int = 0  # new tokens since then
    chains: list[range] = field(default_factory=list)  # of the old answer, as they were guessed

    def take(self, tokens: Sequence[int]) -> None:
        """Line up with what was committed: the chain that it begins like is where it stands."""
        new = tokens[self.count :]
        self.count = len(tokens)
        lengths = [self._alike(chain.start, new) for chain in self.chains]
        best = max(lengths, default=0)
        if best:
            self.place, self.changed = self.chains[lengths.index(best)].start + best, 0
        self.changed += len(new) - best

    def _alike(self, start: int, new: Sequence[int]) -> int:
        """How many of the new tokens are the old ones from a place on."""
        old = self.old[start : start + len(new)]
        return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))

    def guess(self, tokens: Sequence[int], width: int, depth: int) -> list[range]:
        """The chains to try next, in order, of `width` tokens together and `depth` at most."""
        places = [self.place + self.changed]
        if self.changed:
            places += [self.place, *self._found(tokens)]
        places = [one for one in dict.fromkeys(places) if one < len(self.old)]
        chains: list[range] = []
        short = min(max(_SHORT, width // 4), width // max(len(places), 1))
        for number, start in reversed(list(enumerate(places))):
            most = width if number == 0 else short
            chains.insert(0, range(start, min(start + min(most, depth), len(self.old))))
            width -= len(chains[0])
        self.chains = [chain for chain in chains if chain]
        return self.chains

    def _found(self, tokens: Sequence[int]) -> list[int]:
        """Behind the nearest place that ends in the longest part of what the answer ends in.

        A place before the last match counts only by several tokens: words come back, and a jump
        that was wrong has to be taken back.
        """
        best, found = (0, 0), list[int]()
        for end, token in enumerate(self.old):
            if token != tokens[-1]:
                continue
            most = min(_LONGEST_MATCH, end + 1, len(tokens))
            length = next((i for i in range(1, most) if self.old[end - i] != tokens[-1 - i]), most)
            if end < self.place and length < _BACK:
                continue
            rank = (length, -abs(end - self.place))
            if not found or rank > best:
                best, found = rank, [end + 1]
        return found


class PreviousAnswer(DraftSource):
    """A source of chains from the session's last answer. Text, numbers and actions alike."""

    kind = DraftKind.PREVIOUS_ANSWER
    needs = frozenset({MEMORY})
    capturable = False

    def __init__(self) -> None:
        self._alignments: dict[Row, Alignment] = {}

    def allocate(self, batch: Batch) -> None:
        """Nothing is kept of rows that have ended."""
        self._alignments = {}

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Look up what the sessions answered last."""
        self._alignments = {row: one for row, one in self._alignments.items() if not row.is_done}
        for row in batch.rows:
            if row is not None:
                self._alignments[row] = Alignment(row.memory.answer)

    def draft(self, batch: Batch, room: Room) -> DraftTree:
        """One tree of every row's chains, which share what starts alike."""
        grown = [self._grow(row, room.widest) for row in batch.rows]
        size = max(len(tokens) for tokens, _ in grown)
        numbers = [
            [[*one, *(0,) * (size - len(one))] for one in (*both, [1] * len(both[0]))]
            for both in grown
        ]
        whole = to_device(numbers, batch.device, torch.int64).view(len(grown), 3, size)
        tokens, parents, is_real = whole.unbind(1)
        return DraftTree(
            tokens=tokens,
            parents=parents,
            is_real=is_real > 0,
            log_probs=torch.zeros_like(tokens, dtype=torch.float32),
            sources=torch.full_like(tokens, self.kind.number),
            is_chain=all(above == list(range(len(above))) for _, above in grown),
        ).below(room.roots)

    def _grow(self, row: Row | None, widest: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the guesses behind the root, which is node 0."""
        tokens: list[int] = []
        parents: list[int] = []
        alignment = None if row is None else self._alignments.get(row)
        if row is None or alignment is None or row.is_done:
            return tokens, parents
        alignment.take(row.tokens)
        nodes: dict[tuple[int, int], int] = {}
        for chain in alignment.guess(row.tokens, widest - 1, row.limit - 1 - row.count):
            above = 0
            for token in alignment.old[chain.start : chain.stop]:
                if (above, token) not in nodes:
                    tokens.append(token)
                    parents.append(above)
                    nodes[above, token] = len(tokens)
                above = nodes[above, token]
        return tokens, parents
