"""Sources that draft from the session's memory and from the last pass."""

from deft_policies.decoding import kinds
from deft_policies.decoding.drafts import DraftSource, Guesses
from deft_policies.decoding.sequence import Sequence
from deft_policies.model.sizes import TokenRange


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
