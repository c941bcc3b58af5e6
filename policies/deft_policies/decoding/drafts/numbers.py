"""The last answer of the session as a draft of the next one, where answers are numbers as text.

A policy that is asked at every step answers with nearly the same numbers, moved by the rows that
were executed since. Up to three chains guess how the text goes on: what followed in the last answer
behind the longest run of numbers that were just written, the last answer moved by those rows, and
the last answer as it was. Each stands at the number and the digit that is written next, so a wrong
digit costs one pass and the chains line up again. Everything happens on the host.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance.numbers import END, SPACE
from deft_policies.decoding.drafts import Branches, DraftSource, Guesses
from deft_policies.decoding.drafts.previous_answer import share_beginnings
from deft_policies.decoding.sequence import Sequence

Number = tuple[int, ...]


def split_numbers(tokens: Items[int]) -> list[Number]:
    """The digits of each number; the last one may be begun or empty."""
    numbers: list[list[int]] = [[]]
    for token in tokens:
        if token == SPACE:
            numbers.append([])
        elif token != END:
            numbers[-1].append(token)
    return [tuple(number) for number in numbers]


def moved(numbers: Items[Number], num_executed: int, action_dim: int) -> list[Number]:
    """Without the rows that were executed; the last row is repeated for the new ones."""
    new_rows = list(numbers[-action_dim:]) * min(num_executed, len(numbers))
    return [*numbers[num_executed * action_dim :], *new_rows][: len(numbers)]


def rest_of(numbers: Items[Number], index: int, num_digits: int) -> list[int]:
    """Tokens from a number on, behind so many of its digits, up to the end."""
    if index >= len(numbers):
        return [END]
    later = [token for number in numbers[index + 1 :] for token in (SPACE, *number)]
    return [*numbers[index][num_digits:], *later, END]


def find_run(numbers: Items[Number], written: Items[Number], ahead: int) -> int | None:
    """Where the longest run of numbers that was just written goes on; None if nowhere.

    Of equally long runs the one nearest to `ahead` numbers further on counts, which begins as what
    is being written.
    """
    *done, begun = written
    best, found = (0, 0), None
    for index in range(1, len(numbers)):
        length = 0
        most = min(index, len(done))
        while length < most and numbers[index - 1 - length] == done[-1 - length]:
            length += 1
        if length and numbers[index][: len(begun)] == begun:
            rank = (length, -abs(index - len(done) - ahead))
            if found is None or rank > best:
                best, found = rank, index
    return found


def guess_numbers(
    last: Items[Number], tokens: Items[int], num_executed: int, action_dim: int
) -> list[list[int]]:
    """Chains of tokens that may come next, the likeliest first."""
    if not any(last):
        return []
    written = split_numbers(tokens)
    index, num_digits = len(written) - 1, len(written[-1])
    ahead = num_executed * action_dim
    run = find_run(last, written, ahead)
    behind_run = [] if run is None else [rest_of(last, run, num_digits)]
    of_moved = rest_of(moved(last, num_executed, action_dim), index, num_digits)
    return [*behind_run, of_moved, rest_of(last, index, num_digits)]


class PreviousNumbers(DraftSource):
    """A source of chains from the session's last answer."""

    kind = kinds.PREVIOUS_NUMBERS

    def __init__(self, widest: int, width: Callable[[Sequence], int]) -> None:
        """Trees of `width` nodes, and of up to `widest` where much has just stood."""
        self._widest, self._width = widest, width

    def draft(self, sequence: Sequence, depth: int) -> Guesses:
        """One tree of all chains, which share common beginnings."""
        if not sequence.memory.answer:
            return []
        # Few guesses are accepted at a time, or many: where some just were, twice as many are
        # tried.
        just = 0 if sequence.last is None else sequence.last.accepted
        width = min(self._widest, max(self._width(sequence), 2 * just)) - 1
        last = split_numbers(sequence.memory.answer)
        in_row = sequence.spec.numbers_in_row
        chains = guess_numbers(last, sequence.tokens, sequence.num_executed, in_row)
        tokens, parents, _ = share_beginnings(
            [chain[:depth] for chain in chains], width, width // 4
        )
        return Branches(tokens, parents)
