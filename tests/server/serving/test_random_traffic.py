"""The rules of the queue all at once, against random traffic."""

import math

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deft_server.errors import DeadlineError, OverloadedError
from deft_server.serving.frame import QueuedFrame
from deft_server.serving.queue import FrameQueue
from tests.server.serving.queued import number_of, queued

pytestmark = pytest.mark.promise

RULES = {"max_batch": 2, "max_waiting": 6, "patience_s": 0.2}

FLOWS = strategies.sampled_from("abcdefgh")
STEPS_S = strategies.floats(0.0001, 0.05)


class Traffic(RuleBasedStateMachine):
    """Random frames, waits, answers and departures; every frame's fate is accounted for."""

    num_replicas = 1

    def __init__(self) -> None:
        super().__init__()
        self.queue = FrameQueue(**RULES, num_replicas=self.num_replicas)
        self.flying: list[QueuedFrame] = []
        self.now_s = 100.0
        self.count = 0
        self.waiting: dict[int, QueuedFrame] = {}

    @rule(
        flow=FLOWS,
        deadline_s=strategies.none() | strategies.floats(-0.001, 0.3),
        stays=strategies.booleans(),
        owner=strategies.sampled_from("xy"),
    )
    def send(self, flow: str, deadline_s: float | None, stays: bool, owner: str) -> None:
        self.count += 1
        frame = queued(
            self.count,
            f"{owner}{flow}",
            self.now_s,
            math.inf if deadline_s is None else self.now_s + deadline_s,
            is_session=flow < "g",
            overfills_until_s=math.inf if stays else None,
            owner=owner,
        )
        num_bound = self.num_bound()
        try:
            superseded = self.queue.enqueue(frame, self.now_s)
        except OverloadedError:
            assert not stays
            assert num_bound + self.num_staying(owner) >= RULES["max_waiting"]
            return
        except DeadlineError:
            assert frame.deadline_s < math.inf
            return
        if superseded is not None:
            assert superseded.flow == frame.flow
            assert self.waiting.pop(number_of(superseded)) is superseded
        self.waiting[number_of(frame)] = frame

    def num_bound(self) -> int:
        return sum(one.overfills_until_s is None for one in self.waiting.values())

    def num_staying(self, owner: str) -> int:
        waiting = self.waiting.values()
        return sum(one.overfills_until_s is not None and one.owner == owner for one in waiting)

    @rule(step_s=STEPS_S)
    def wait(self, step_s: float) -> None:
        self.now_s += step_s

    @rule()
    def start(self) -> None:
        num_free = RULES["max_batch"] * self.num_replicas - len(self.flying)
        was_busy = num_free < (1 if self.queue.admission.joins_midway else RULES["max_batch"])
        aloft = {one.flow for one in self.flying if one.is_session}
        chosen, expired = self.queue.next_batch(self.now_s)
        for frame in expired:
            assert frame.deadline_s < math.inf
            assert self.waiting.pop(number_of(frame)) is frame
        if not chosen:
            is_dear = self.flying and self.has_deadlines()
            assert was_busy or is_dear or not {one.flow for one in self.waiting.values()} - aloft
            return
        assert not was_busy
        assert len(chosen) <= min(num_free, RULES["max_batch"])
        for frame in chosen:
            assert self.waiting.pop(number_of(frame)) is frame
            assert frame.deadline_s > self.now_s
            assert frame.flow not in aloft
        self.flying += chosen

    def has_deadlines(self) -> bool:
        return any(one.has_deadline for one in (*self.flying, *self.waiting.values()))

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
        frame = self.flying.pop(data.draw(strategies.integers(0, len(self.flying) - 1)))
        self.queue.admission.finish(
            frame, self.now_s, service_s if was_answered_in_one_go else None
        )

    @precondition(lambda self: self.waiting)
    @rule(data=strategies.data())
    def hang_up(self, data: strategies.DataObject) -> None:
        number = data.draw(strategies.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(self.waiting.pop(number))

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.num_bound() <= RULES["max_waiting"]
        sessions = [one.flow for one in self.waiting.values() if one.is_session]
        assert len(sessions) == len(set(sessions))
        flying = [one.flow for one in self.queue.admission.in_flight if one.is_session]
        most = RULES["max_batch"] * self.num_replicas
        assert len(flying) == len(set(flying)) <= most

    @invariant()
    def nobody_that_left_is_remembered(self) -> None:
        if not self.waiting:
            assert not self.queue._sessions


class ReplicatedTraffic(Traffic):
    """The same with three replicas, which end in any order."""

    num_replicas = 3


class SteppedTraffic(Traffic):
    """The same where frames join while others are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.queue.admission.joins_midway = True


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestReplicatedTraffic = ReplicatedTraffic.TestCase
TestReplicatedTraffic.settings = TestTraffic.settings
TestSteppedTraffic = SteppedTraffic.TestCase
TestSteppedTraffic.settings = TestTraffic.settings
