"""The last answer of the session as a draft of the next one: verified reuse of long texts.

The first pass checks the whole of it as one chain behind the prompt. Where the target predicts
another token, what matched stays, and up to four chains guess how the old text goes on after it:

1. what followed the replaced token (a number changed), as the target has predicted it since;
2. the same, as it was;
3. from the replaced token on (something was inserted);
4. what follows the nearest old tokens that equal the end of the answer (something was left out).

Where tokens move on by different strides, as codes of several numbers do, the first of
all is what followed where the sums of both answers are equal.

The first chain gets half the width or more, the others enough to line up. Everything happens on the
host.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter

from deft_policies.decoding import kinds
from deft_policies.decoding.drafts import Branches, DraftSource, Guesses
from deft_policies.decoding.sequence import Sequence

_SHORT = 16  # tokens of the second and the third chain, at least where there is room
_BACK = 2  # tokens that must be equal for a step back
_LONGEST_MATCH = 8  # tokens that are compared to find where the old text goes on


@dataclass
class Alignment:
    """Where in the old answer the new one has come to."""

    old: Items[int]
    strides: Mapping[int, int] | None = None  # of tokens; None: one each
    count: int = 0  # tokens of the new answer that are taken in
    next: int = 0  # index of the first old token that is not matched
    changed: int = 0  # new tokens since then
    drafted: list[int] = field(default_factory=list)  # of the last tree, by node; the root is none
    # Of the last tree: where in the old answer a chain began, and its nodes.
    chains: list[tuple[int, list[int]]] = field(default_factory=list)
    fresh: list[int] = field(init=False)  # the old answer as the target would have it now
    _marks: dict[int, int] = field(init=False)  # the first index with each sum of strides
    _indices: dict[int, list[int]] = field(init=False)  # of each token in the old answer

    def __post_init__(self) -> None:
        self.fresh, self._indices = list(self.old), {}
        for index, token in enumerate(self.old):
            self._indices.setdefault(token, []).append(index)
        strides = self.strides or {}
        sums = accumulate((strides.get(old, 0) for old in self.old), initial=0)
        # Of equal sums the first counts: tokens with stride 0 come behind it.
        self._marks = {total: index for index, total in reversed(list(enumerate(sums)))}

    def take(self, tokens: Items[int], predicted: Items[int] = ()) -> None:
        """Line up with what was committed, in the chain that agrees with it longest.

        `predicted` is the target's token after each node of the last tree, the root first. It comes
        from the new picture, but is conditioned on the old words.
        """
        new = tokens[self.count :]
        self.count = len(tokens)
        chains = [(self._num_equal(nodes, new), start, nodes) for start, nodes in self.chains]
        best, start, nodes = max(chains, key=itemgetter(0), default=(0, 0, []))
        if best:
            self.next, self.changed = start + best, 0
        self.changed += len(new) - best
        for index, node in enumerate(nodes, start + 1):
            if self.next < index < len(self.fresh) - 1 and node < len(predicted):
                self.fresh[index] = predicted[node]

    def _num_equal(self, nodes: Items[int], new: Items[int]) -> int:
        """How many of the new tokens a chain has guessed."""
        pairs = enumerate(zip(nodes, new, strict=False))
        most = min(len(nodes), len(new))
        return next((i for i, (node, token) in pairs if self.drafted[node - 1] != token), most)

    def guess(self, tokens: Items[int], width: int, depth: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of up to `width` guesses behind the root, which is node 0."""
        skipped = self.next + self.changed
        starts = [skipped]
        if self.strides is not None:
            reached = self._marks.get(sum(self.strides.get(token, 0) for token in tokens))
            starts = [skipped] if reached is None else [reached, skipped]
        if self.changed:
            starts += [self.next, *self._matches(tokens)]
        texts = [(start, self.old) for start in dict.fromkeys(starts) if start < len(self.old)]
        first = starts[0]
        if self.fresh[first:] != list(self.old[first:]):
            texts.insert(0, (first, self.fresh))
        short = min(max(_SHORT, width // 4), width // max(len(texts), 1))
        chains = [text[start : start + depth] for start, text in texts]
        self.drafted, parents, nodes = share_beginnings(chains, width, short)
        self.chains = list(zip((start for start, _ in texts), nodes, strict=True))
        return self.drafted, parents

    def _matches(self, tokens: Items[int]) -> list[int]:
        """Where the old text goes on behind its longest, then nearest, match of the answer's end.

        Before the last match only a match of several tokens counts: words come back, and a jump
        that was wrong has to be taken back.
        """
        best, starts = (0, 0), list[int]()
        for end in self._indices.get(tokens[-1], ()):
            most = min(_LONGEST_MATCH, end + 1, len(tokens))
            length = next((i for i in range(1, most) if self.old[end - i] != tokens[-1 - i]), most)
            if end < self.next and length < _BACK:
                continue
            rank = (length, -abs(end - self.next))
            if not starts or rank > best:
                best, starts = rank, [end + 1]
        return starts


class PreviousAnswer(DraftSource):
    """A source of chains from the session's last answer: text, numbers or actions."""

    kind = kinds.PREVIOUS_ANSWER

    def __init__(self, widest: int, width: Callable[[Sequence], int]) -> None:
        """Up to `widest` nodes in the prefill, where long runs may be right, and `width` later."""
        self._widest, self._width = widest, width

    def begin(self, sequence: Sequence) -> None:
        """Look up what the session answered last."""
        sequence.notes[self.kind] = Alignment(sequence.memory.answer, sequence.spec.strides)

    def draft(self, sequence: Sequence, depth: int) -> Guesses:
        """One tree of all chains, which share common beginnings."""
        alignment: Alignment = sequence.notes[self.kind]
        last, predicted = sequence.last, list[int]()
        if last is not None:
            first, drafted = last.tree.root + 1, alignment.drafted
            if last.tree.tokens[first : first + len(drafted)] == drafted:  # not another source's
                predicted = last.predictions[last.tree.root :]
        alignment.take(sequence.tokens, predicted)
        width = self._widest if last is None else self._width(sequence)
        return Branches(*alignment.guess(sequence.tokens, width - 1, depth))


def share_beginnings(
    chains: Items[Items[int]], width: int, short: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens and parents of chains below the root, node 0, and the nodes of each chain.

    The first chain gets what the others leave it of the width, each of these `short` new nodes.
    """
    tokens: list[int] = []
    parents: list[int] = []
    nodes: list[list[int]] = []
    nodes_by_token: dict[tuple[int, int], int] = {}
    for number, chain in reversed(list(enumerate(chains))):
        most = width if number == 0 else len(tokens) + short
        above, path = 0, list[int]()
        for token in chain:
            if (above, token) not in nodes_by_token:
                break
            above = nodes_by_token[above, token]
            path.append(above)
        # Nothing hangs below a new node: the rest of the chain is new.
        new = chain[len(path) : len(path) + max(most - len(tokens), 0)]
        numbers = range(len(tokens) + 1, len(tokens) + 1 + len(new))
        above_new = [above, *numbers][: len(new)]
        nodes_by_token.update(zip(zip(above_new, new, strict=True), numbers, strict=True))
        tokens += new
        parents += above_new
        nodes.insert(0, [*path, *numbers])
    return tokens, parents, nodes
