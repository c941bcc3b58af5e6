"""Actions that are written as numbers: parsing a text, and its distance from the target's.

A digit means nothing without the others of its number, so whole numbers are compared, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deft_policies.decoding.acceptance.rule import ActionSpace

# Tokens of an answer: 0 to 9 are digits.
SPACE, END = 10, 11


@dataclass(frozen=True)
class WrittenNumbers:
    """An answer of numbers so far, as the host knows it."""

    tokens: Sequence[int]
    target_tokens: Sequence[int]  # given the tokens before each
    space: ActionSpace  # number by number
    drift: tuple[float, ...]  # [dimension], executed minus the target's over past steps


@dataclass(frozen=True)
class NumberState:
    """How far a number has been written: perhaps not its first digit yet."""

    index: int  # of the number
    drift: tuple[float, ...]
    value: int = 0  # of its digits so far
    length: int = 0
    # The least and the most that the target could have written, once a digit is not its own.
    reach: tuple[int, int] | None = None

    @property
    def deviation(self) -> int:
        """The number minus the farthest that the target could have written."""
        return max((self.value - end for end in self.reach or (self.value,)), key=abs)

    @property
    def dimension(self) -> int:
        return self.index % len(self.drift)

    def after(self, token: int, expected: int, largest: int) -> NumberState | None:
        """Behind another token; None where an end or a space is not the target's own."""
        if token >= SPACE or expected >= SPACE:
            if token != expected:
                return None
            drift = list(self.drift)
            drift[self.dimension] += self.deviation
            return NumberState(self.index + 1, tuple(drift))
        reach, shifted = self.reach, 10 * self.value
        if reach is None and token != expected:
            reach = _reach(shifted + expected, self.length + 1, largest)
        return NumberState(self.index, self.drift, shifted + token, self.length + 1, reach)


def _reach(value: int, length: int, largest: int) -> tuple[int, int]:
    """The least and the most that a number can be which begins with these digits."""
    powers = [10**num_digits for num_digits in range(1, len(str(largest)) - length + 1)]
    longer = [min((value + 1) * power - 1, largest) for power in powers if value * power <= largest]
    return value, max([value, *longer])


def read(written: WrittenNumbers, num_numbers: int | None = None) -> NumberState:
    """The state behind a text, or its first numbers; its spaces are the target's own."""
    state = NumberState(0, written.drift)
    for token, expected in zip(written.tokens, written.target_tokens, strict=True):
        if state.index == num_numbers:
            break
        state = state.after(token, expected, written.space.largest_number) or state
    return state


def drift_of_steps(last: WrittenNumbers, num_steps: int) -> tuple[float, ...]:
    """The drift behind an answer of which so many steps were executed."""
    return read(last, num_steps * last.space.length).drift
