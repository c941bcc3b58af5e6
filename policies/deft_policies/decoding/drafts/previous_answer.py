"""The last answer of the session as a draft of the next one: verified reuse of long texts.

The first pass checks the whole of it as one chain behind the prompt. Where the target predicts
another token, what matched stays, and up to four chains guess how the old text goes on after it:

1. what followed the replaced token (a number changed), as the target has predicted it since;
2. the same, as it was;
3. from the replaced token on (something was inserted);
4. what follows the nearest place that ends as the answer does now (something was left out).

The first chain gets half the width or more, the others enough to line up. Everything happens on the
host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.batch import Batch, Row
from deft_policies.decoding.drafts import MEMORY, PREDICTIONS, DraftSource
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import DraftLimits, DraftTree
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
    drafted: list[int] = field(default_factory=list)  # of the last tree, by node; the root is none
    # Of the last tree: where in the old answer a chain began, and its nodes.
    chains: list[tuple[int, list[int]]] = field(default_factory=list)
    fresh: list[int] = field(init=False)  # the old answer as the target would have it now

    def __post_init__(self) -> None:
        self.fresh = list(self.old)

    def take(self, tokens: Sequence[int], predicted: Sequence[int] = ()) -> None:
        """Line up with what was committed: the place is in the chain with which it agrees longest.

        `predicted` is the target's token after each node of the last tree, the root first. It is
        made with the new picture, if after old words.
        """
        new = tokens[self.count :]
        self.count = len(tokens)
        chains = [(self._alike(nodes, new), start, nodes) for start, nodes in self.chains]
        best, start, nodes = max(chains, key=itemgetter(0), default=(0, 0, []))
        if best:
            self.place, self.changed = start + best, 0
        self.changed += len(new) - best
        for place, node in enumerate(nodes, start + 1):
            if self.place < place < len(self.fresh) - 1 and node < len(predicted):
                self.fresh[place] = predicted[node]

    def _alike(self, nodes: Sequence[int], new: Sequence[int]) -> int:
        """How many of the new tokens are those of a chain."""
        pairs = enumerate(zip(nodes, new, strict=False))
        most = min(len(nodes), len(new))
        return next((i for i, (node, one) in pairs if self.drafted[node - 1] != one), most)

    def guess(self, tokens: Sequence[int], width: int, depth: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of up to `width` guesses behind the root, which is node 0."""
        skipped = self.place + self.changed
        starts = [skipped]
        if self.changed:
            starts += [self.place, *self._found(tokens)]
        texts = [(one, self.old) for one in dict.fromkeys(starts) if one < len(self.old)]
        if self.fresh[skipped:] != list(self.old[skipped:]):
            texts.insert(0, (skipped, self.fresh))
        short = min(max(_SHORT, width // 4), width // max(len(texts), 1))
        chains = [text[start : start + depth] for start, text in texts]
        self.drafted, parents, nodes = share_beginnings(chains, width, short)
        self.chains = list(zip((start for start, _ in texts), nodes, strict=True))
        return self.drafted, parents

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

    kind = kinds.PREVIOUS_ANSWER
    needs = frozenset({MEMORY, PREDICTIONS})
    capturable = False

    def __init__(self, target: Target) -> None:
        self._target = target
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

    def draft(self, batch: Batch, limits: DraftLimits) -> DraftTree:
        """One tree of every row's chains, which share what starts alike."""
        grown = [self._grow(row, limits.widest) for row in batch.rows]
        return tree_of(self.kind, grown, limits.roots)

    def _grow(self, row: Row | None, widest: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of a row's guesses."""
        alignment = None if row is None else self._alignments.get(row)
        if row is None or alignment is None or row.is_done:
            return [], []
        if row.method.is_guarded and row.records:  # much may stand in the prefill
            widest = min(widest, self._target.text_width)
        guessed = alignment.drafted
        is_ours = row.drafted[1 : len(guessed) + 1] == guessed  # not another source's
        alignment.take(row.tokens, row.predictions if is_ours else ())
        return alignment.guess(row.tokens, widest - 1, row.limit - 1 - row.count)


def share_beginnings(
    chains: Sequence[Sequence[int]], width: int, short: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens and parents of chains below the root, node 0, and the nodes of each chain.

    The first chain gets what the others leave it of the width, each of these `short` new nodes.
    """
    tokens: list[int] = []
    parents: list[int] = []
    nodes: list[list[int]] = []
    known: dict[tuple[int, int], int] = {}
    for number, chain in reversed(list(enumerate(chains))):
        most = width if number == 0 else len(tokens) + short
        above, path = 0, list[int]()
        for token in chain:
            if (above, token) not in known:
                if len(tokens) == most:
                    break
                tokens.append(token)
                parents.append(above)
                known[above, token] = len(tokens)
            above = known[above, token]
            path.append(above)
        nodes.insert(0, path)
    return tokens, parents, nodes


def tree_of(
    kind: str, grown: Sequence[tuple[Sequence[int], Sequence[int]]], roots: Tensor
) -> DraftTree:
    """Tokens and parents of every row, from lists on the host."""
    size = max(len(tokens) for tokens, _ in grown)
    numbers = [
        [[*one, *(0,) * (size - len(one))] for one in (*both, [1] * len(both[0]))] for both in grown
    ]
    whole = to_device(numbers, roots.device, torch.int64).view(len(grown), 3, size)
    tokens, parents, is_real = whole.unbind(1)
    is_chain = all(list(above) == list(range(len(above))) for _, above in grown)
    unknown = torch.zeros_like(tokens, dtype=torch.float32)
    sources = torch.full_like(tokens, kinds.source_number(kind))
    tree = DraftTree(tokens, parents, is_real > 0, unknown, sources, is_chain=is_chain)
    return tree.below(roots)
