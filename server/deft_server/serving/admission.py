"""The frames that are with the policy, and whether one more may join them. Reads no clock.

The policy is there once, or in replicas. Each has a place for every frame of a batch. A place is
taken by the next frame as soon as it is free. Where the policy answers a batch in one call, frames
wait until the places of a whole batch are free.

What a frame takes, alone and among others, is measured (`ServiceTimes`).
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from deft_server.serving.frame import FailedCall, QueuedFrame

MARGIN = 2.0  # of what a frame may take, over what is expected: estimates are only so good
PROBE_EVERY_S = 5.0  # a frame may join although it seems too slow, to refresh the estimate
DECREASE = 0.7  # the limit is multiplied by it after a frame missed its deadline among others
INCREASE = 0.015  # and grows by it after each that met its deadline
GOOD_ROUNDS_BEFORE_GROWTH = 100
STALE_AFTER_S = 1.0  # a flow's measurement older than this does not justify a refusal
REMEMBERED_FRAMES = 9  # of a flow
REMEMBERED_FLOWS = 1024
REMEMBERED_COSTS = 31
MIN_BATCH_SIZE_GAP = 1.0  # between two measurements that show the cost of a batch
ESTIMATE_QUANTILE = 0.75  # of a flow's frames, so many were quicker than the estimate


class ConcurrencyLimit:
    """How many frames with deadlines run together: additive increase, multiplicative decrease."""

    def __init__(self, most: int) -> None:
        self.value = float(most)
        self._most = most

    def note(self, concurrency: float, is_late: bool) -> None:
        """Note a frame that ended: the mean number of frames in its rounds, and if it was late."""
        if not is_late:
            self.value = min(self.value + INCREASE, self._most)
        elif concurrency > 1:
            self.value = max(1.0, DECREASE * min(self.value, concurrency))


class Admission:
    """The places at the policy, and who has them."""

    def __init__(self, max_batch: int, num_replicas: int, patience_s: float) -> None:
        self.max_batch = max_batch  # as memory allows now
        self.num_replicas = num_replicas
        self.joins_midway = False  # whether frames may join while others are on their way
        self.in_flight: list[QueuedFrame] = []  # that are with the policy, the oldest first
        self.service_times = ServiceTimes()
        self._limit = ConcurrencyLimit(max_batch)
        self._most = max_batch  # of `max_batch`
        self._num_good_rounds = 0
        self._patience_s = patience_s
        self._last_action_s = -math.inf  # when an action with a deadline last arrived
        self._probed_s = -math.inf  # when a frame last joined anyway
        self._noted_s = 0.0  # until when the progress of `in_flight` is noted

    @property
    def num_places(self) -> int:
        """How many frames the policy takes at a time."""
        return self.num_replicas * self.max_batch

    @property
    def num_free(self) -> int:
        """How many of the places can be taken now."""
        free = max(0, self.num_places - len(self.in_flight))
        if self.joins_midway:
            return free
        num_idle_replicas = free // self.max_batch
        return num_idle_replicas * self.max_batch

    def free_for_texts(self, now_s: float) -> int:
        """Return how many texts may start: half of the places are kept for hurried actions."""
        if self._last_action_s < now_s - self._patience_s:
            return self.num_places
        return max(1, self.num_places // 2) - sum(one.is_text for one in self.in_flight)

    def note_arrival(self, frame: QueuedFrame, now_s: float) -> None:
        """Note whether actions with deadlines come."""
        if frame.has_deadline and not frame.is_text:
            self._last_action_s = now_s

    def start(self, frames: Sequence[QueuedFrame], now_s: float) -> None:
        """Give frames their places."""
        for frame in frames:
            frame.started_s = now_s
        self.in_flight += frames

    def finish(self, frame: QueuedFrame, now_s: float, service_s: float | None = None) -> None:
        """Free a frame's place; `service_s` is what it took, if that was measured.

        What was cut at its deadline took at least so long.
        """
        self.note_progress(now_s)
        self.in_flight.remove(frame)
        if service_s is not None:
            passed_s = now_s - frame.started_s
            concurrency = frame.concurrency_s / passed_s if passed_s > 0 else 1.0
            is_whole = frame.outcome is not None or frame.deadline_s > now_s
            self.service_times.observe(frame.timing_key, service_s, now_s, concurrency, is_whole)
            if frame.has_deadline:
                self._limit.note(concurrency, frame.deadline_s <= now_s)

    def limit_batches(self, failures: Sequence[FailedCall]) -> None:
        """Halve the batch where the device gave up; let it grow after many good rounds."""
        sizes = [one.batch_size for one in failures if one.kind == "device" and not one.is_retry]
        if sizes:
            self._num_good_rounds = 0
            self.max_batch = max(1, min(self.max_batch, *sizes) // 2)
        elif not failures:
            self._num_good_rounds += 1
            if self.max_batch < self._most and self._num_good_rounds >= GOOD_ROUNDS_BEFORE_GROWTH:
                self._num_good_rounds = 0
                self.max_batch += 1

    def is_hopeless(self, frame: QueuedFrame, now_s: float) -> bool:
        """Would a frame be answered after its deadline, even if it were the next to go?"""
        return not self.is_in_time(frame, self.free_s(now_s), now_s)

    def is_in_time(self, frame: QueuedFrame, start_s: float, now_s: float) -> bool:
        """Would a frame be answered before its deadline, if it started then and were alone?

        Only what its own flow has shown lately speaks against it.
        """
        if not frame.has_deadline:
            return True
        return start_s + self.service_times.proven_s(frame.timing_key, now_s) < frame.deadline_s

    def is_late(self, frame: QueuedFrame, slowdown: float, now_s: float) -> bool:
        """Would a frame be answered after its deadline, if it went on so slowly?"""
        if not frame.has_deadline:
            return False
        left_s = max(0.0, self.service_times.expected_s(frame.timing_key, now_s) - frame.done_s)
        return now_s + MARGIN * left_s * slowdown > frame.deadline_s

    def may_join(self, frame: QueuedFrame, chosen: Sequence[QueuedFrame], now_s: float) -> bool:
        """Whether adding a frame makes no other frame miss its deadline.

        Every `PROBE_EVERY_S` one frame is added anyway, to refresh the estimate.
        """
        others = [one for one in (*self.in_flight, *chosen) if one.is_text == frame.is_text]
        if not others:
            return True
        if frame.has_deadline and len(others) >= self._limit.value * self.num_replicas:
            return False
        before = self.service_times.slowdown(len(others) / self.num_replicas)
        after = self.service_times.slowdown((len(others) + 1) / self.num_replicas)
        is_too_slow = self.is_late(frame, after, now_s) or any(
            self.is_late(one, after, now_s) and not self.is_late(one, before, now_s)
            for one in others
        )
        if not is_too_slow:
            return True
        if now_s - self._probed_s < PROBE_EVERY_S:
            return False
        self._probed_s = now_s
        return True

    def note_progress(self, now_s: float) -> None:
        """Note how much of the frames in flight is done by now."""
        passed_s, self._noted_s = now_s - self._noted_s, now_s
        if passed_s <= 0:
            return
        num_texts = sum(one.is_text for one in self.in_flight)
        for frame in self.in_flight:
            count = num_texts if frame.is_text else len(self.in_flight) - num_texts
            concurrency = max(1.0, count / self.num_replicas)
            frame.concurrency_s += passed_s * concurrency
            frame.done_s += passed_s / self.service_times.slowdown(concurrency)

    def free_s(self, now_s: float) -> float:
        """Return when there will be a place, probably."""
        if self.num_free:
            return now_s
        slowdown = self.service_times.slowdown(len(self.in_flight) / self.num_replicas)
        return now_s + slowdown * min(
            max(
                0.0,
                self.service_times.expected_s(frame.timing_key, now_s)
                - (now_s - frame.started_s) / slowdown,
            )
            for frame in self.in_flight
        )


@dataclass(frozen=True)
class Measurement:
    """What one frame took, and how many frames were in its rounds."""

    seconds: float
    concurrency: float  # the mean number of frames in its rounds, itself among them
    is_whole: bool = True  # one that was cut before its end would have taken longer


class FlowTimes:
    """What the last few frames of a flow took."""

    def __init__(self) -> None:
        self.measured_s = -math.inf  # when the last one was
        self.recent: deque[Measurement] = deque(maxlen=REMEMBERED_FRAMES)

    def is_fresh(self, now_s: float) -> bool:
        """Whether a frame was measured lately."""
        return self.measured_s >= now_s - STALE_AFTER_S

    def note(self, measurement: Measurement, now_s: float) -> None:
        """Add a measurement.

        Frames that were cut are forgotten for a longer cut, and for the first that was answered.
        """
        if not any(known.is_whole for known in self.recent):
            self.recent.clear()
        self.recent.append(measurement)
        self.measured_s = now_s

    def alone_s(self, batch_cost: float, rank: float = ESTIMATE_QUANTILE) -> float:
        """Return the seconds that so large a part of the frames would not have exceeded alone."""
        if not self.recent:
            return 0.0
        alone = sorted(one.seconds / slowdown(batch_cost, one.concurrency) for one in self.recent)
        return alone[int(rank * (len(alone) - 1))]


class ServiceTimes:
    """Learns how long frames take, flow by flow: alone, and how much longer among others.

        seconds of a frame among n = seconds alone x (1 + batch_cost x (n - 1))

    `batch_cost` is what each further frame adds, as a part of the time alone: near 0 where a
    GPU computes many rows as fast as one, near 1 where a processor computes one after the other. It
    follows from frames of the same flow among more and fewer others. So a flow's
    estimate is its own: how many neighbours it had when it was measured is taken out again.
    """

    def __init__(self) -> None:
        self._flows: OrderedDict[str, FlowTimes] = OrderedDict()  # the last seen comes last
        self._all = FlowTimes()  # what is believed of a flow that was never seen
        self._batch_costs = deque([1.0] * 3, maxlen=REMEMBERED_COSTS)

    @property
    def batch_cost(self) -> float:
        """What each further frame adds, as a part of the time alone; 1 until it was measured."""
        return median(self._batch_costs)

    def slowdown(self, concurrency: float) -> float:
        """Return how much longer a frame takes among so many than alone."""
        return slowdown(self.batch_cost, concurrency)

    def observe(
        self,
        flow: str,
        seconds: float,
        now_s: float,
        concurrency: float = 1.0,
        is_whole: bool = True,
    ) -> None:
        """Learn what a frame took. One that was cut before its end would have taken longer."""
        latest = Measurement(seconds, max(1.0, concurrency), is_whole)
        if not is_whole and seconds / self.slowdown(concurrency) <= self.expected_s(flow, now_s):
            return  # shorter than what is expected anyway: it says nothing about a whole frame
        times = self._flows.setdefault(flow, FlowTimes())
        whole = [other for other in times.recent if other.is_whole]
        if is_whole and whole:
            other = max(whole, key=lambda other: abs(other.concurrency - latest.concurrency))
            self._learn_batch_cost(latest, other)
        if is_whole:
            self._all.note(latest, now_s)
        times.note(latest, now_s)
        self._flows.move_to_end(flow)
        if len(self._flows) > REMEMBERED_FLOWS:
            self._flows.popitem(last=False)

    def expected_s(self, flow: str, now_s: float) -> float:
        """Return the seconds that a frame of a flow takes alone, probably; 0 if unknown.

        Where the flow was not measured lately, the least that it or others have shown is believed.
        """
        times = self._flows.get(flow)
        if times is None:
            return self._all.alone_s(self.batch_cost)
        if times.is_fresh(now_s):
            return times.alone_s(self.batch_cost)
        least_s = times.alone_s(self.batch_cost, 0.0)
        return (
            min(least_s, self._all.alone_s(self.batch_cost, 0.5)) if self._all.recent else least_s
        )

    def proven_s(self, flow: str, now_s: float) -> float:
        """Return what justifies a refusal: what the flow itself has shown, while anything is new.

        So nobody is refused for ever because of what was measured once.
        """
        times = self._flows.get(flow)
        if times is None or not (times.is_fresh(now_s) or self._all.is_fresh(now_s)):
            return 0.0
        if times.is_fresh(now_s):
            return times.alone_s(self.batch_cost, 0.5)
        return self.expected_s(flow, now_s)

    def _learn_batch_cost(self, one: Measurement, other: Measurement) -> None:
        """Learn from two frames of a flow, if their concurrency differed enough."""
        many, few = (one, other) if one.concurrency > other.concurrency else (other, one)
        if many.concurrency - few.concurrency < MIN_BATCH_SIZE_GAP or few.seconds <= 0:
            return
        # seconds = alone x (1 + batch_cost x (concurrency - 1)), twice, solved for batch_cost
        longer = many.seconds - few.seconds
        rest = few.seconds * (many.concurrency - 1) - many.seconds * (few.concurrency - 1)
        batch_cost = 0.0 if longer <= 0 else longer / rest if rest > longer else 1.0
        self._batch_costs.append(batch_cost)


def slowdown(batch_cost: float, concurrency: float) -> float:
    """Return how much longer a frame takes among so many than alone."""
    return 1 + batch_cost * (max(1.0, concurrency) - 1)
