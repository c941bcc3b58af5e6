"""The frames that wait, found by number, session and owner, and kept in the order of their turns.

Knows no rules but that order; every question is answered without looking at all of them.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from heapq import merge
from itertools import chain
from operator import attrgetter
from typing import NamedTuple


class Ticket(NamedTuple):
    """One frame's place in the line; a tuple, because that takes least time to make."""

    number: int
    flow: str
    arrived_s: float
    deadline_s: float = math.inf
    is_session: bool = True
    is_running: bool = False
    stays_until_s: float | None = None  # joins a full line, too, and is to be withdrawn then
    owner: str = ""

    @property
    def has_deadline(self) -> bool:
        """Does the caller say when the answer is of no more use?"""
        return self.deadline_s < math.inf


class Turn(NamedTuple):
    """Whose turn it is within its owner's: a deadline, then the earlier due, then the longer in
    line."""

    is_patient: bool
    due_s: float
    number: int
    since_s: float


class WaitingFrames:
    """Frames with their turns. Owners that are ahead of the others have theirs after all others."""

    def __init__(self) -> None:
        self._frames: dict[int, Ticket] = {}
        self._turns: dict[int, Turn] = {}
        self._flows: dict[str, dict[int, Ticket]] = {}
        self._owners: dict[str, list[Turn]] = {}  # in order
        self._with_turn: dict[int, Ticket] = {}  # by the number of the turn
        self._num_staying = 0  # of those that joined a full line

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[Ticket]:
        """Return the frames, as they came."""
        return iter(self._frames.values())

    @property
    def owners(self) -> Collection[str]:
        """Whose frames wait."""
        return self._owners.keys()

    @property
    def has_patient(self) -> bool:
        """Whether a frame without a deadline waits."""
        return any(turns[-1].is_patient for turns in self._owners.values())

    def add(self, ticket: Ticket, turn: Turn) -> None:
        """Take a frame in. No two frames have turns of the same number."""
        self._frames[ticket.number] = self._with_turn[turn.number] = ticket
        self._turns[ticket.number] = turn
        self._flows.setdefault(ticket.flow, {})[ticket.number] = ticket
        insort(self._owners.setdefault(ticket.owner, []), turn)
        self._num_staying += ticket.stays_until_s is not None

    def remove(self, number: int) -> None:
        """Let a frame go, if it is there."""
        ticket = self._frames.pop(number, None)
        if ticket is None:
            return
        turn = self._turns.pop(number)
        del self._with_turn[turn.number]
        turns, of_flow = self._owners[ticket.owner], self._flows[ticket.flow]
        del turns[bisect_left(turns, turn)], of_flow[number]
        if not turns:
            del self._owners[ticket.owner]
        if not of_flow:
            del self._flows[ticket.flow]
        self._num_staying -= ticket.stays_until_s is not None

    def turn_of(self, ticket: Ticket) -> Turn:
        """Return the turn of a frame that waits."""
        return self._turns[ticket.number]

    def of_flow(self, flow: str) -> Ticket | None:
        """Return the frame of a session, the one that came first if there are several."""
        return next(iter(self._flows.get(flow, {}).values()), None)

    def num_places(self, flow: str) -> int:
        """Count the frames, without those that joined a full line, unless they are of this flow."""
        of_flow = self._flows.get(flow, {}).values()
        own = sum(one.stays_until_s is not None for one in of_flow) if self._num_staying else 0
        return len(self._frames) - self._num_staying + own

    def is_even_for(self, ticket: Ticket) -> bool:
        """Whether surely no session and no owner has two frames more than those of `ticket`."""
        most = max(map(len, self._owners.values()), default=0)
        own = len(self._owners.get(ticket.owner, ())) - self._num_staying
        return len(self._flows) == len(self._frames) and most < own + 2

    def num_before(self, ticket: Ticket, turn: Turn, ahead: Collection[str]) -> int:
        """Count those whose turn is before that one, which `ticket` has or would have."""
        is_late = ticket.owner in ahead
        return sum(
            bisect_left(turns, turn) if (owner in ahead) == is_late else is_late * len(turns)
            for owner, turns in self._owners.items()
        )

    def in_order(self, ahead: Collection[str]) -> Iterator[Ticket]:
        """Return the frames in the order of their turns."""
        first = [turns for owner, turns in self._owners.items() if owner not in ahead]
        last = [self._owners[owner] for owner in ahead if owner in self._owners]
        turns = chain(_merged(first), _merged(last))
        return map(self._with_turn.__getitem__, map(attrgetter("number"), turns))

    def first_patient(self, ahead: Collection[str]) -> Ticket | None:
        """Return the first frame without a deadline, of owners that are not ahead."""
        turns = [
            found[0]
            for owner, ordered in self._owners.items()
            if owner not in ahead and (found := ordered[bisect_left(ordered, (True,)) :][:1])
        ]
        return self._with_turn[min(turns).number] if turns else None


def _merged(runs: list[list[Turn]]) -> Iterator[Turn]:
    """Return the turns of several owners in order; of one alone, which is most often, at once."""
    return merge(*runs) if len(runs) > 1 else chain(*runs)
