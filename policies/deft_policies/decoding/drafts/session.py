"""Sources that draft from what is remembered of the session and of the last pass."""

from collections.abc import Sequence as Items

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.drafts import DraftSource, Guesses, ModelSource
from deft_policies.decoding.drafts.growth import grow, read_grown
from deft_policies.decoding.sequence import Sequence
from deft_policies.decoding.target import Target
from deft_policies.decoding.tree import Chain
from deft_policies.model.sizes import TokenRange

_NEVER_SEEN = -100.0


class PreviousAction(DraftSource):
    """The action will be the target's own last one."""

    kind = kinds.PREVIOUS

    def draft(self, sequence: Sequence, depth: int) -> Guesses:
        """Repeat the newest step."""
        return [list(step[sequence.count :][:depth]) for step in sequence.past[-1:]]


class Extrapolation(DraftSource):
    """The action will continue the straight line through the last two: a + (a - b), in bins.

    Guesses stay inside the action tokens; a session with fewer steps gets none.
    """

    kind = kinds.EXTRAPOLATION

    def __init__(self, action_tokens: TokenRange) -> None:
        self._first, self._last = action_tokens.first, action_tokens.last

    def draft(self, sequence: Sequence, depth: int) -> Guesses:
        """Evaluate the line one step ahead."""
        if len(sequence.past) < 2:
            return []
        pairs = zip(*sequence.past[-2:], strict=True)
        line = [self._next(before, newest) for before, newest in pairs]
        return [line[sequence.count :][:depth]]

    def _next(self, before: int, newest: int) -> int:
        # A position that held something else than a bin is not on any line: repeat it.
        if not (self._first <= before <= self._last and self._first <= newest <= self._last):
            return newest
        return min(max(2 * newest - before, self._first), self._last)


class NgramLookup(DraftSource):
    """The action will go on as it did when the same tokens came before (prompt-lookup decoding).

    The session's own answers are one long sequence. The last three tokens (fewer if those never
    occurred) are looked up at the same phase of an earlier action, newest first, and what followed
    them there is the guess. Tokens of different positions are never mixed.
    """

    kind = kinds.NGRAM
    _longest = 3
    _steps = 16  # how far it looks back

    def draft(self, sequence: Sequence, depth: int) -> Guesses:
        """What followed at the best match."""
        found = look_up(sequence.past[-self._steps :], sequence.tokens, self._longest)
        return [] if found is None else [found[:depth]]


def look_up(past: Items[Items[int]], tokens: Items[int], longest: int) -> Chain | None:
    """What followed the last tokens in an earlier action of the same length; None if nowhere.

    The longest match wins, then the newest.
    """
    count = len(tokens)
    if not past or count >= len(past[-1]):
        return None
    stream = [token for step in past for token in step]
    tail = [*stream, *tokens][-longest:][::-1]
    best, found = 0, None
    for step in reversed(range(len(past))):
        end = step * len(past[-1]) + count
        length = 0
        while length < min(longest, end) and stream[end - 1 - length] == tail[length]:
            length += 1
        if length > best:
            best, found = length, list(past[step][count:])
    return found


class JacobiDrafts(DraftSource):
    """The target's predictions after its last mismatch (Jacobi iteration).

    Its predictions along the rejected rest of the best chain were made after one wrong token; they
    are often right all the same, and they cost nothing.
    """

    kind = kinds.RECYCLED
    early = False

    def draft(self, sequence: Sequence, depth: int) -> Guesses:
        """Read the predictions below the accepted path, along its deepest continuation."""
        last = sequence.last
        if last is None:
            return []
        tree, end = last.tree, last.path[-1]
        below = {end: 0}  # depth below the end of the path
        for node in range(end + 1, tree.num_nodes):
            parent = tree.parents[node]
            if parent in below:
                below[node] = below[parent] + 1
        deepest = max(below, key=lambda node: (below[node], -node))
        path = tree.path_to(deepest)[len(tree.path_to(end)) :]
        return [[last.predictions[node] for node in path][:depth]]


class TokenRecycling(ModelSource):
    """A tree read off a table of what the target last predicted after each token.

    The table [token, next token] holds log-probabilities, of action tokens alone, candidates that
    were rejected included (Luo et al. 2025). It starts from the session's actions and ends with the
    answer, so that the same session drafts the same again on any machine. What followed a token in
    the session counts as certain, less one for every step that has passed since.
    """

    kind = kinds.TOKEN_RECYCLING
    _steps = 16

    def __init__(self, target: Target) -> None:
        self._tokens = target.action_tokens

    def begin(self, sequence: Sequence) -> None:
        """Fill the table from what the session's target answered."""
        sequence.notes[self.kind] = self._remembered(sequence.past[-self._steps :])

    def observe(self, sequence: Sequence, hidden: Tensor, logits: Tensor) -> None:
        """What a pass predicts after a token replaces what was known of it; the larger of two."""
        assert sequence.last is not None
        table: NDArray[np.float32] = sequence.notes[self.kind]
        found = logits[:, self._tokens.columns].log_softmax(dim=1).cpu().numpy()
        fresh: dict[int, NDArray[np.float32]] = {}
        for token, row in zip(sequence.last.tree.tokens, found, strict=True):
            place = token - self._tokens.first
            if 0 <= place < len(self._tokens):
                fresh[place] = np.maximum(fresh[place], row) if place in fresh else row
        for place, row in fresh.items():
            table[place] = row

    def draft_all(self, sequences: Items[Sequence]) -> list[Guesses]:
        """Read a tree off each table."""
        return [self._read(one) for one in sequences]

    def _read(self, sequence: Sequence) -> Guesses:
        depth = sequence.num_missing
        if depth <= 0:
            return []
        table = torch.from_numpy(sequence.notes[self.kind])[None]

        def after(tokens: Tensor) -> Tensor:
            return table[0, (tokens - self._tokens.first).clamp(0, len(self._tokens) - 1)]

        root = torch.tensor([[sequence.tokens[-1]]])
        grown = grow(
            sequence.shape.cut(depth),
            after(root)[:, 0],
            lambda level: after(level.tokens),
            torch.tensor([depth]),
            self._tokens.first,
        )
        return read_grown(grown, 1)[0]

    def _remembered(self, past: Items[Items[int]]) -> NDArray[np.float32]:
        """The newest of what followed a token in any step counts most."""
        size, first = len(self._tokens), self._tokens.first
        table = np.full((size, size), _NEVER_SEEN, dtype=np.float32)
        for age, step in reversed(list(enumerate(reversed(past)))):
            for before, behind in zip(step[:-1], step[1:], strict=True):
                if 0 <= before - first < size and 0 <= behind - first < size:
                    table[before - first, behind - first] = -float(age)
        return table
