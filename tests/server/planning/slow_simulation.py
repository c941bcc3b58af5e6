"""The slow twin of the simulation: a list of things to come, the next of which is looked for."""

from collections import Counter

import numpy as np

from deft_server.planning.simulate import Capacity, Fleet
from deft_server.serving.waiting_frames import Ticket
from deft_server.serving.waiting_line import Admission, WaitingLine

STEPS = 1024


class SlowSimulation:
    """Plays a fleet and tells what became of its frames, warm-up included."""

    def __init__(self, fleet: Fleet, capacity: Capacity) -> None:
        self.fleet, self.capacity = fleet, capacity
        self.line = WaitingLine(capacity.rules)
        self.random = np.random.default_rng(fleet.seed)
        self.to_come: list[tuple[float, str, object]] = []
        self.answered: set[str] = set()
        self.fates: Counter[str] = Counter()
        self.latencies_s: list[float] = []

    def run(self) -> None:
        sent = []
        for robot in range(self.fleet.num_robots):
            phase_s = self.random.random() / self.fleet.rate_hz
            for beat in range(int(self.fleet.seconds * self.fleet.rate_hz)):
                late = self.fleet.jitter * (self.random.random() - 0.5)
                sent.append((max(0.0, phase_s + (beat + late) / self.fleet.rate_hz), robot))
        front_free_s = 0.0
        for number, (sent_s, robot) in enumerate(sorted(sent)):
            front_free_s = max(front_free_s, sent_s) + self.capacity.front_s
            deadline_s = sent_s + self.fleet.deadline_s
            ticket = Ticket(number, f"robot {robot}", sent_s, deadline_s)
            self.to_come.append((front_free_s, "joins", ticket))
        while self.to_come:
            event = min(self.to_come, key=lambda one: one[0])
            self.to_come.remove(event)
            self.happens(*event)
            self.pump(event[0])

    def happens(self, now_s: float, what: str, about: object) -> None:
        if what == "joins":
            assert isinstance(about, Ticket)
            self.joins(about, now_s)
        elif what == "returns":
            assert isinstance(about, tuple)
            self.returns(*about, now_s)

    def joins(self, ticket: Ticket, now_s: float) -> None:
        known = ticket.flow in self.answered
        ticket = Ticket(
            ticket.number, ticket.flow, ticket.arrived_s, ticket.deadline_s, is_running=known
        )
        offer = self.line.offer(ticket, now_s)
        self.fates["superseded"] += offer.superseded is not None
        self.fates["refused"] += offer.displaced is not None
        self.fates["refused"] += offer.admission is Admission.FULL
        self.fates["missed"] += offer.admission is Admission.TOO_LATE

    def returns(self, batch: tuple[Ticket, ...], service_s: float, now_s: float) -> None:
        self.line.finish(now_s, service_s, batch)
        for ticket in batch:
            self.answered.add(ticket.flow)
            if now_s > ticket.deadline_s:
                self.fates["missed"] += 1
            else:
                self.latencies_s.append(now_s + self.capacity.added_s - ticket.arrived_s)

    def pump(self, now_s: float) -> None:
        self.to_come = [one for one in self.to_come if one[1] != "looks again"]
        while True:
            decision = self.line.decide(now_s)
            self.fates["missed"] += len(decision.expired)
            if not decision.batch:
                break
            size, drawn = len(decision.batch), self.random.integers(STEPS)
            service_s = self.capacity.service.at(size, drawn / (STEPS - 1))
            returns = (now_s + service_s, "returns", (decision.batch, service_s))
            self.to_come.append(returns)
        if decision.wake_s is not None:
            self.to_come.append((now_s + decision.wake_s, "looks again", None))
