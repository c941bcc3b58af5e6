"""The slow twin of the simulation: a list of things to come, the next of which is looked for."""

from collections import Counter

import numpy as np

from deft_server.errors import DeadlineError, OverloadedError
from deft_server.serving.queue import FrameQueue
from deft_server.serving.request import Request
from scripts.plan.simulate import Capacity, Fleet
from tests.server.serving.queued import queued

STEPS = 1024


class SlowSimulation:
    """Plays a fleet and tells what became of its frames, warm-up included."""

    def __init__(self, fleet: Fleet, capacity: Capacity) -> None:
        self.fleet, self.capacity = fleet, capacity
        self.queue = FrameQueue(capacity.rules)
        self.random = np.random.default_rng(fleet.seed)
        self.to_come: list[tuple[float, str, object]] = []
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
            frame = queued(number, f"robot {robot}", sent_s, deadline_s)
            self.to_come.append((front_free_s, "joins", frame))
        while self.to_come:
            event = min(self.to_come, key=lambda one: one[0])
            self.to_come.remove(event)
            self.happens(*event)
            self.pump(event[0])

    def happens(self, now_s: float, what: str, about: object) -> None:
        if what == "joins":
            assert isinstance(about, Request)
            self.joins(about, now_s)
        elif what == "returns":
            assert isinstance(about, tuple)
            self.returns(*about, now_s)

    def joins(self, frame: Request, now_s: float) -> None:
        try:
            self.fates["superseded"] += self.queue.offer(frame, now_s) is not None
        except OverloadedError:
            self.fates["refused"] += 1
        except DeadlineError:
            self.fates["missed"] += 1

    def returns(self, frames: list[Request], service_s: float, now_s: float) -> None:
        for frame in frames:
            self.queue.admission.finish(frame, now_s, service_s)
            if now_s > frame.deadline_s:
                self.fates["missed"] += 1
            else:
                self.latencies_s.append(now_s + self.capacity.added_s - frame.arrived_s)

    def pump(self, now_s: float) -> None:
        while True:
            chosen, expired = self.queue.next_batch(now_s)
            self.fates["missed"] += len(expired)
            if not chosen:
                return
            size, drawn = len(chosen), self.random.integers(STEPS)
            service_s = self.capacity.service.at(size, drawn / (STEPS - 1))
            self.to_come.append((now_s + service_s, "returns", (chosen, service_s)))
