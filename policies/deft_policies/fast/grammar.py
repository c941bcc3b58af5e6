"""The grammar of FAST answers: which code may follow, so that an answer is one whole chunk.

The state behind a text is the number of missing coefficients, and how the last character, if it is
incomplete, may go on: one of eight states of UTF-8. What a code does depends on the character's
state alone, so the grammar is a table of 8 states by codes. A code is allowed if a whole chunk can
still be written behind it. So all codes of a whole chunk are allowed, and the mask never changes an
answer that is one: the likeliest of all codes is also the likeliest of the allowed ones.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deft_policies.errors import CheckpointError

# Missing coefficients, and the UTF-8 state of the last character.
ChunkState = tuple[int, int]
DEAD: ChunkState = (-1, 0)  # no chunk begins so
MOST_COEFFICIENTS = 4096  # of a chunk: far more than any policy writes

# For each UTF-8 state, the bytes that may follow and the state behind them. State 0: the character
# is whole; 1, 2, 3: so many bytes are missing; 4 to 7: the next byte is bounded, behind E0, ED, F0
# and F4.
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
# In this order a state comes after all states that a code can lead to which ends no character.
_BY_MISSING_BYTES = (1, 2, 4, 5, 3, 6, 7, 0)


def read_piece(state: int, piece: bytes) -> tuple[int, int]:
    """How many characters a piece ends, and the UTF-8 state behind it; -1 where it is no UTF-8."""
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
        self.start: ChunkState = (num_coefficients, _WHOLE)
        table = np.array([[read_piece(state, piece) for piece in pieces] for state in range(8)])
        # By the UTF-8 state before a code, [state, code]: characters that it ends, state behind it.
        self.counts: NDArray[np.int64] = table[:, :, 0]
        self.next_utf8: NDArray[np.int64] = table[:, :, 1]
        self._ends = self._find_ends(num_coefficients)
        if not self._ends[self.start]:
            raise CheckpointError(
                f"with the pieces of this FAST tokenizer no {num_coefficients} coefficients can be "
                "written"
            )
        self.allowed = lru_cache(maxsize=4096)(self._allowed)

    def _find_ends(self, num_coefficients: int) -> NDArray[np.bool_]:
        """From which states the end can still be reached, [missing, UTF-8 state]."""
        ends = np.zeros((num_coefficients + 1, _NUM_STATES), np.bool_)
        ends[0, _WHOLE] = True
        moves = [
            np.unique(np.stack((self.counts[state], self.next_utf8[state])), axis=1)
            for state in range(_NUM_STATES)
        ]
        for missing in range(num_coefficients + 1):
            for state in _BY_MISSING_BYTES:
                counts, states = moves[state]
                fits = (states >= 0) & (counts <= missing)
                ends[missing, state] |= ends[missing - counts[fits], states[fits]].any()
        return ends

    def after(self, state: ChunkState, code: int) -> ChunkState:
        """The state behind a code; `DEAD` where the code is not allowed."""
        missing, utf8 = state
        if state == DEAD or not self.allowed(state)[code]:
            return DEAD
        return missing - int(self.counts[utf8, code]), int(self.next_utf8[utf8, code])

    def _allowed(self, state: ChunkState) -> NDArray[np.bool_]:
        """Which codes are allowed in a state that is not `DEAD`, [code]."""
        missing, utf8 = state
        missing_behind, utf8_behind = missing - self.counts[utf8], self.next_utf8[utf8]
        fits: NDArray[np.bool_] = (missing_behind >= 0) & (utf8_behind >= 0)
        fits[fits] = self._ends[missing_behind[fits], utf8_behind[fits]]
        fits.setflags(write=False)
        return fits

    def only_code(self, state: ChunkState) -> int | None:
        """The only code that is allowed; None if there are several, or none."""
        if state == DEAD:
            return None
        codes = np.flatnonzero(self.allowed(state))
        return int(codes[0]) if len(codes) == 1 else None

    @staticmethod
    def is_whole(state: ChunkState) -> bool:
        """Whether a whole chunk was written."""
        return state == (0, _WHOLE)


def strides_of(pieces: Sequence[bytes]) -> tuple[int, ...]:
    """How far each code moves on in an answer, in quarters of a coefficient.

    The sum over the codes so far says which coefficient they have reached: 4 for every whole
    character, and 1 more for every byte that the last one misses. Answers with equal sums are at
    the same coefficient, however many codes have led to it.
    """
    return tuple(sum(map(_stride, piece)) for piece in pieces)


def _stride(byte: int) -> int:
    if 0x80 <= byte < 0xC0:
        return -1  # goes on with a character
    return 4 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
