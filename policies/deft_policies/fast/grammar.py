"""The grammar of FAST answers: which code may follow, so that an answer is one whole chunk.

What has been written is a place: how many coefficients are missing, and how the character that has
been begun may go on, one of eight states of UTF-8. What a code does depends on the state alone, so
a table of 8 states by codes is all there is to know. A code may follow where an action can still
come of it. The beginning of every whole chunk can, so the mask never changes an answer that is one:
each of its codes is allowed, and the likeliest of all is the likeliest of fewer.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deft_policies.errors import CheckpointError

# Coefficients that are missing, and the state of the character that has been begun.
Place = tuple[int, int]
LOST: Place = (-1, 0)  # no action can come of what was written
MOST_COEFFICIENTS = 4096  # of a chunk: far more than any policy writes

# In each state, the bytes that may follow, and the state behind them: 0 no character is begun;
# 1, 2, 3 so many bytes are missing; 4 to 7 the next is bounded, behind E0, ED, F0 and F4.
_WHOLE = 0
_AUTOMATON: tuple[tuple[tuple[range, int], ...], ...] = (
    (
        (range(0x00, 0x80), _WHOLE),
        (range(0xC2, 0xE0), 1),
        (range(0xE0, 0xE1), 4),
        (range(0xE1, 0xED), 2),
        (range(0xED, 0xEE), 5),
        (range(0xEE, 0xF0), 2),
        (range(0xF0, 0xF1), 6),
        (range(0xF1, 0xF4), 3),
        (range(0xF4, 0xF5), 7),
    ),
    ((range(0x80, 0xC0), _WHOLE),),
    ((range(0x80, 0xC0), 1),),
    ((range(0x80, 0xC0), 2),),
    ((range(0xA0, 0xC0), 1),),
    ((range(0x80, 0xA0), 1),),
    ((range(0x90, 0xC0), 2),),
    ((range(0x80, 0x90), 2),),
)
_NUM_STATES = len(_AUTOMATON)
_NEXT = [{byte: to for bytes_, to in state for byte in bytes_} for state in _AUTOMATON]
# So that a state comes behind all to which a code can lead that ends no character.
_BY_MISSING_BYTES = (1, 2, 4, 5, 3, 6, 7, 0)


def read_piece(state: int, piece: bytes) -> tuple[int, int]:
    """How many characters a piece ends, and the state behind it; -1 where it is no UTF-8."""
    ended = 0
    for byte in piece:
        state = _NEXT[state].get(byte, -1)
        if state < 0:
            return 0, -1
        ended += state == _WHOLE
    return ended, state


class ChunkGrammar:
    """Which codes may follow in answers of a certain number of coefficients."""

    def __init__(self, pieces: Sequence[bytes], num_coefficients: int) -> None:
        """Raises `CheckpointError` where no answer of so many can be written with these pieces."""
        if num_coefficients > MOST_COEFFICIENTS:
            raise CheckpointError(
                f"a chunk of {num_coefficients} numbers is more than the {MOST_COEFFICIENTS} that "
                "an answer may have"
            )
        self.start: Place = (num_coefficients, _WHOLE)
        table = np.array([[read_piece(state, one) for one in pieces] for state in range(8)])
        self.counts: NDArray[np.int64] = table[:, :, 0]  # [state, code]
        self.states: NDArray[np.int64] = table[:, :, 1]  # [state, code]
        self._ends = self._find_ends(num_coefficients)
        if not self._ends[self.start]:
            raise CheckpointError(
                f"with the pieces of this FAST tokenizer no {num_coefficients} coefficients can be "
                "written"
            )
        self.allowed = lru_cache(maxsize=4096)(self._allowed)

    def _find_ends(self, num_coefficients: int) -> NDArray[np.bool_]:
        """From which places the end can still be reached, [missing, state]."""
        ends = np.zeros((num_coefficients + 1, _NUM_STATES), np.bool_)
        ends[0, _WHOLE] = True
        moves = [
            np.unique(np.stack((self.counts[state], self.states[state])), axis=1)
            for state in range(_NUM_STATES)
        ]
        for missing in range(num_coefficients + 1):
            for state in _BY_MISSING_BYTES:
                counts, states = moves[state]
                fits = (states >= 0) & (counts <= missing)
                ends[missing, state] |= ends[missing - counts[fits], states[fits]].any()
        return ends

    def after(self, place: Place, code: int) -> Place:
        """The place behind a code; `LOST` where it may not follow."""
        missing, state = place
        if place == LOST or not self.allowed(place)[code]:
            return LOST
        return missing - int(self.counts[state, code]), int(self.states[state, code])

    def _allowed(self, place: Place) -> NDArray[np.bool_]:
        """Which codes may follow a place that is not lost, [code]."""
        missing, state = place
        left, states = missing - self.counts[state], self.states[state]
        fits: NDArray[np.bool_] = (left >= 0) & (states >= 0)
        fits[fits] = self._ends[left[fits], states[fits]]
        fits.setflags(write=False)
        return fits

    def only_code(self, place: Place) -> int | None:
        """The code that alone may follow; None where there are several, or none."""
        if place == LOST:
            return None
        codes = np.flatnonzero(self.allowed(place))
        return int(codes[0]) if len(codes) == 1 else None

    @staticmethod
    def is_whole(place: Place) -> bool:
        """Whether nothing is missing."""
        return place == (0, _WHOLE)


def strides_of(pieces: Sequence[bytes]) -> tuple[int, ...]:
    """How far each code moves on in an answer, in quarters of a coefficient.

    The sum over an answer's beginning says where it has come to: 4 for every whole character, and
    1 more for every byte that the last one misses. Two answers with equal sums stand at the same
    coefficient, however many codes they have taken to it.
    """
    return tuple(sum(map(_stride, one)) for one in pieces)


def _stride(byte: int) -> int:
    if 0x80 <= byte < 0xC0:
        return -1  # goes on with a character
    return 4 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
