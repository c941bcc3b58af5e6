"""The frames that wait, beside a slow twin that looks at all of them for every question."""

import math
import random
from dataclasses import dataclass, field

import pytest

from deft_server.serving.waiting_frames import Ticket, Turn, WaitingFrames


@dataclass(eq=False)
class SlowFrames:
    """Says what `WaitingFrames` says."""

    turns: dict[Ticket, Turn] = field(default_factory=dict)

    def in_order(self, ahead: frozenset[str]) -> list[Ticket]:
        return sorted(self.turns, key=lambda one: (one.owner in ahead, self.turns[one]))

    def num_before(self, ticket: Ticket, turn: Turn, ahead: frozenset[str]) -> int:
        place = (ticket.owner in ahead, turn)
        return sum((one.owner in ahead, other) < place for one, other in self.turns.items())

    def num_places(self, flow: str) -> int:
        return sum(one.stays_until_s is None or one.flow == flow for one in self.turns)

    def of_flow(self, flow: str) -> Ticket | None:
        return next((one for one in self.turns if one.flow == flow), None)

    def first_patient(self, ahead: frozenset[str]) -> Ticket | None:
        ordered = self.in_order(ahead)
        return next((one for one in ordered if self.is_patient(one, ahead)), None)

    def is_patient(self, ticket: Ticket, ahead: frozenset[str]) -> bool:
        return not ticket.has_deadline and ticket.owner not in ahead

    def has_two_more(self, ticket: Ticket) -> bool:
        """Whether somebody has two movable frames more than the caller."""
        movable = [one for one in self.turns if one.stays_until_s is None]
        for names, mine in (
            ([one.owner for one in movable], ticket.owner),
            ([one.flow for one in movable], ticket.flow),
        ):
            if any(names.count(name) >= names.count(mine) + 2 for name in names):
                return True
        return False


def a_ticket(rng: random.Random, number: int) -> Ticket:
    return Ticket(
        number,
        flow=f"flow {rng.randrange(12)}",
        arrived_s=number / 10,
        deadline_s=rng.choice([math.inf, number / 10 + rng.random()]),
        stays_until_s=rng.choice([None, None, None, 100.0]),
        owner=rng.choice("abc"),
    )


def turn_of(ticket: Ticket, rng: random.Random) -> Turn:
    due_s = rng.choice([1.0, 2.0, ticket.arrived_s])
    return Turn(not ticket.has_deadline, due_s, ticket.number, ticket.arrived_s)


@pytest.mark.parametrize("seed", range(20))
def test_every_question_is_answered_as_if_all_frames_were_looked_at(seed: int) -> None:
    rng = random.Random(seed)
    frames, slow = WaitingFrames(), SlowFrames()
    evens = 0
    for number in range(120):
        ticket = a_ticket(rng, number)
        turn, ahead = turn_of(ticket, rng), frozenset(rng.sample("abc", rng.randrange(3)))
        assert frames.num_before(ticket, turn, ahead) == slow.num_before(ticket, turn, ahead)
        assert frames.num_places(ticket.flow) == slow.num_places(ticket.flow)
        assert frames.of_flow(ticket.flow) == slow.of_flow(ticket.flow)
        assert frames.first_patient(ahead) == slow.first_patient(ahead)
        assert frames.has_patient == any(not one.has_deadline for one in slow.turns)
        assert list(frames.in_order(ahead)) == slow.in_order(ahead)
        assert set(frames.owners) == {one.owner for one in slow.turns}
        if frames.is_even_for(ticket):
            evens += 1
            assert not slow.has_two_more(ticket)
        frames.add(ticket, turn)
        slow.turns[ticket] = turn
        while slow.turns and rng.random() < 0.5:
            leaving = rng.choice(list(slow.turns))
            assert frames.turn_of(leaving) == slow.turns.pop(leaving)
            frames.remove(leaving.number)
            frames.remove(leaving.number)
        assert list(frames) == list(slow.turns)
        assert len(frames) == len(slow.turns)
    assert evens
