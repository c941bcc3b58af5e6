"""The rules of the waiting line all at once, against random traffic."""

import math
from dataclasses import replace

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deft_server.serving.waiting_frames import Ticket
from deft_server.serving.waiting_line import Admission, LineRules, WaitingLine

RULES = LineRules(max_batch=2, max_wait_s=0.01, max_waiting=6, newcomer_batches=2, patience_s=0.2)

FLOWS = strategies.sampled_from("abcdefgh")
STEPS_S = strategies.floats(0.0001, 0.05)


class Traffic(RuleBasedStateMachine):
    """Random frames, waits, answers and departures; every frame's fate is accounted for."""

    line_rules = RULES

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine(self.line_rules)
        self.flying: list[tuple[Ticket, ...]] = []
        self.now_s = 100.0
        self.count = 0
        self.waiting: dict[int, Ticket] = {}
        self.running: set[str] = set()

    def leave(self, ticket: Ticket) -> None:
        assert self.waiting.pop(ticket.number) == ticket

    @rule(
        flow=FLOWS,
        deadline_s=strategies.none() | strategies.floats(0.001, 0.3),
        stays=strategies.booleans(),
    )
    def send(self, flow: str, deadline_s: float | None, stays: bool) -> None:
        self.count += 1
        ticket = Ticket(
            self.count,
            flow,
            self.now_s,
            math.inf if deadline_s is None else self.now_s + deadline_s,
            is_session=flow < "g",
            is_running=flow in self.running,
            stays_until_s=math.inf if stays else None,
        )
        room_before = len(self.waiting)
        offer = self.line.offer(ticket, self.now_s)
        if offer.admission is Admission.FULL:
            assert not stays
            assert room_before >= (
                6 if ticket.is_running else min(6, 4 * self.line_rules.num_replicas)
            )
        if offer.admission is Admission.TOO_LATE:
            assert ticket.deadline_s < math.inf
        if offer.admission is not Admission.WAITS:
            assert offer.superseded is None
            assert offer.displaced is None
            return
        self.waiting[ticket.number] = ticket
        if offer.superseded is not None:
            assert offer.superseded.flow == flow
            self.leave(offer.superseded)
        if offer.displaced is not None:
            assert not offer.displaced.is_session or ticket.has_deadline
            assert not offer.displaced.has_deadline or not offer.displaced.is_session
            assert offer.displaced.stays_until_s is None
            self.leave(offer.displaced)

    @rule(step_s=STEPS_S)
    def wait(self, step_s: float) -> None:
        self.now_s += step_s

    @rule()
    def decide(self) -> None:
        was_busy = len(self.flying) == self.line_rules.num_replicas
        aloft = {one.flow for batch in self.flying for one in batch if one.is_session}
        decision = self.line.decide(self.now_s)
        for ticket in decision.expired:
            assert ticket.deadline_s < math.inf
            self.leave(ticket)
        for ticket in decision.batch:
            self.leave(ticket)
            assert ticket.deadline_s > self.now_s
            assert ticket.flow not in aloft
        if decision.batch:
            self.flying.append(decision.batch)
        if was_busy:
            assert decision.batch == ()
        elif {one.flow for one in self.waiting.values()} - aloft or decision.batch:
            assert (decision.wake_s is None) == bool(decision.batch)
        if decision.wake_s is not None:
            assert 0 < decision.wake_s < RULES.max_wait_s + 1e-9
        if len(decision.batch) == RULES.max_batch and not math.isfinite(self.soonest()):
            kept_waiting = [one.arrived_s for one in self.waiting.values() if one.is_session]
            sessions = [
                one.arrived_s for one in decision.batch if one.is_session and not one.has_deadline
            ]
            assert (
                max(sessions, default=0) <= min(kept_waiting, default=math.inf) + RULES.patience_s
            )

    def soonest(self) -> float:
        return min((one.deadline_s for one in self.waiting.values()), default=math.inf)

    @precondition(lambda self: self.flying)
    @rule(
        service_s=STEPS_S,
        was_answered_in_one_go=strategies.booleans(),
        data=strategies.data(),
    )
    def finish(
        self, service_s: float, was_answered_in_one_go: bool, data: strategies.DataObject
    ) -> None:
        self.now_s += service_s
        batch = self.flying.pop(data.draw(strategies.integers(0, len(self.flying) - 1)))
        self.running |= {ticket.flow for ticket in batch if ticket.is_session}
        self.line.finish(self.now_s, service_s if was_answered_in_one_go else None, batch)

    @precondition(lambda self: self.waiting)
    @rule(data=strategies.data())
    def hang_up(self, data: strategies.DataObject) -> None:
        number = data.draw(strategies.sampled_from(sorted(self.waiting)))
        self.line.withdraw(number)
        del self.waiting[number]

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        assert len(self.line) == len(self.waiting)
        assert sum(one.stays_until_s is None for one in self.waiting.values()) <= RULES.max_waiting
        sessions = [one.flow for one in self.waiting.values() if one.is_session]
        assert len(sessions) == len(set(sessions))
        flying = [one.flow for one in self.line.in_flight if one.is_session]
        assert len(flying) == len(set(flying)) <= RULES.max_batch * self.line_rules.num_replicas


class ReplicatedTraffic(Traffic):
    """The same with three replicas, which end in any order."""

    line_rules = replace(RULES, num_replicas=3)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestReplicatedTraffic = ReplicatedTraffic.TestCase
TestReplicatedTraffic.settings = TestTraffic.settings
