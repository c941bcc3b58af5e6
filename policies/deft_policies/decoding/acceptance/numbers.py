"""The rule for answers that are numbers as text: a drafted number may stand for the target's.

It looks at whole numbers, on the host: a digit means nothing without those beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deft_policies.decoding.acceptance.rule import (
    ActionSpace,
    DimensionGroup,
    JudgedTree,
    TreeRule,
)

# Tokens of an answer: 0 to 9 are digits.
SPACE, END = 10, 11


@dataclass(frozen=True)
class WrittenNumbers:
    """An answer of numbers so far, as the host knows it."""

    tokens: Sequence[int]
    target_tokens: Sequence[int]  # given what stands before each
    space: ActionSpace  # number by number
    drift: tuple[float, ...]  # [dimension], executed minus the target's over past steps


@dataclass(frozen=True)
class _Place:
    """Where a text stands: within a number, perhaps before its first digit."""

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

    def after(self, token: int, expected: int, largest: int) -> _Place | None:
        """Behind another token; None where an end or a space is not the target's own."""
        if token >= SPACE or expected >= SPACE:
            if token != expected:
                return None
            drift = list(self.drift)
            drift[self.dimension] += self.deviation
            return _Place(self.index + 1, tuple(drift))
        reach, before = self.reach, 10 * self.value
        if reach is None and token != expected:
            reach = _reach(before + expected, self.length + 1, largest)
        return _Place(self.index, self.drift, before + token, self.length + 1, reach)


def _reach(value: int, length: int, largest: int) -> tuple[int, int]:
    """The least and the most that a number can be which begins with these digits."""
    powers = [10**more for more in range(1, len(str(largest)) - length + 1)]
    longer = [min((value + 1) * one - 1, largest) for one in powers if value * one <= largest]
    return value, max([value, *longer])


def _read(written: WrittenNumbers, num_numbers: int | None = None) -> _Place:
    """Where the text leads, or the first of its numbers; its spaces are the target's own."""
    place = _Place(0, written.drift)
    for token, expected in zip(written.tokens, written.target_tokens, strict=True):
        if place.index == num_numbers:
            break
        place = place.after(token, expected, written.space.largest_number) or place
    return place


def drift_of_steps(last: WrittenNumbers, num_steps: int) -> tuple[float, ...]:
    """The drift behind an answer of which so many steps were executed."""
    return _read(last, num_steps * last.space.length).drift


@dataclass(frozen=True)
class WithinNumbers(TreeRule):
    """A drafted number stands if the farthest number that the target could write is near (ours).

    Behind a digit that differs the target is not asked again: every number counts that begins with
    its digits and may stand in an answer, whatever its length. `move` and `turn` are limits in
    robot units. Spaces, ends and the gripper are exact. `move_drift` and `turn_drift` bound the sum
    of deviations over executed steps.
    """

    move: float = 0.07
    turn: float = 0.0175
    move_drift: float = 0.18
    turn_drift: float = 0.0525

    needs_space = False  # it measures numbers, not tokens
    reads_numbers = True

    def accepts(self, judged: JudgedTree) -> list[bool]:
        """Near numbers all the way, none of them cut."""
        tree, sequence = judged.tree, judged.sequence
        space = sequence.action_space
        written = WrittenNumbers(sequence.tokens, sequence.target_tokens, space, sequence.drift)
        places: list[_Place | None] = [None] * tree.root + [_read(written)]
        stands = [True] * (tree.root + 1)
        for node in range(tree.root + 1, tree.num_nodes):
            above, token = tree.parents[node], tree.tokens[node]
            before, place = places[above], None
            # A number ends where it may: behind one that is too far no space is of use.
            if before is not None and (token < SPACE or stands[above]):
                place = before.after(token, judged.expected[node], space.largest_number)
            places.append(place)
            following = judged.predictions[node]
            stands.append(place is not None and self._stands(place, following, space))
        return stands

    def _stands(self, place: _Place, following: int, space: ActionSpace) -> bool:
        """Whether a text may end here, the target's own token following."""
        if place.reach is None:
            return True
        group, unit = space.groups[place.dimension], space.unit_per_bin[place.dimension]
        if following < SPACE or place.value > space.largest_number or group is DimensionGroup.GRIP:
            return False
        is_turn = group is DimensionGroup.TURN
        limit = self.turn if is_turn else self.move
        budget = self.turn_drift if is_turn else self.move_drift
        drift = place.drift[place.dimension] + place.deviation
        # A hair more, so that a limit of exactly k numbers admits k numbers.
        is_near = abs(place.deviation) * unit <= limit * (1 + 1e-6)
        return is_near and abs(drift) * unit <= budget * (1 + 1e-6)
