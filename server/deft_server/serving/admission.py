"""The frames that are with the policy, and whether one more may join them. Reads no clock.

The policy is there once, or in replicas. Each has a place for every frame of a batch. A place is
taken by the next frame as soon as it is free. Where the policy answers a batch in one call, frames
wait until the places of a whole batch are free.

What a frame costs, alone and in company, is measured (`Prices`).
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
REMEMBERED_SHARES = 31
MIN_BATCH_SIZE_GAP = 1.0  # between two measurements that show the cost of a batch
ESTIMATE_QUANTILE = 0.75  # of a flow's frames, so many were quicker than the estimate


class ConcurrencyLimit:
    """How many frames with deadlines run together: additive increase, multiplicative decrease."""

    def __init__(self, most: int) -> None:
        self.value = float(most)
        self._most = most

    def note(self, company: float, is_late: bool) -> None:
        """Take in a frame that was over, among how many it was answered and whether too late."""
        if not is_late:
            self.value = min(self.value + INCREASE, self._most)
        elif company > 1:
            self.value = max(1.0, DECREASE * min(self.value, company))


class Admission:
    """The places at the policy, and who has them."""

    def __init__(self, max_batch: int, num_replicas: int, patience_s: float) -> None:
        self.max_batch = max_batch  # as memory allows now
        self.num_replicas = num_replicas
        self.joins_midway = False  # whether frames may join while others are on their way
        self.in_flight: list[QueuedFrame] = []  # that are with the policy, the oldest first
        self.prices = Prices()
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
            company = frame.shared_s / passed_s if passed_s > 0 else 1.0
            is_whole = frame.outcome is not None or frame.deadline_s > now_s
            self.prices.observe(frame.timing_key, service_s, now_s, company, is_whole)
            if frame.has_deadline:
                self._limit.note(company, frame.deadline_s <= now_s)

    def limit_batches(self, failures: Sequence[FailedCall]) -> None:
        """Halve the batch where the device gave up; let it grow after many good rounds."""
        sizes = [one.size for one in failures if one.kind == "device" and not one.is_retry]
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
        return start_s + self.prices.proven(frame.timing_key, now_s) < frame.deadline_s

    def is_late(self, frame: QueuedFrame, slowdown: float, now_s: float) -> bool:
        """Would a frame be answered after its deadline, if it went on so slowly?"""
        if not frame.has_deadline:
            return False
        left_s = max(0.0, self.prices.expect(frame.timing_key, now_s) - frame.done_s)
        return now_s + MARGIN * left_s * slowdown > frame.deadline_s

    def may_join(self, frame: QueuedFrame, chosen: Sequence[QueuedFrame], now_s: float) -> bool:
        """Whether adding a frame makes no other frame miss its deadline.

        Every `PROBE_EVERY_S` one frame is added anyway, to refresh the estimate.
        """
        company = [one for one in (*self.in_flight, *chosen) if one.is_text == frame.is_text]
        if not company:
            return True
        if frame.has_deadline and len(company) >= self._limit.value * self.num_replicas:
            return False
        before = self.prices.slowdown(len(company) / self.num_replicas)
        after = self.prices.slowdown((len(company) + 1) / self.num_replicas)
        is_too_slow = self.is_late(frame, after, now_s) or any(
            self.is_late(one, after, now_s) and not self.is_late(one, before, now_s)
            for one in company
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
            company = max(1.0, count / self.num_replicas)
            frame.shared_s += passed_s * company
            frame.done_s += passed_s / self.prices.slowdown(company)

    def free_s(self, now_s: float) -> float:
        """Return when there will be a place, probably."""
        if self.num_free:
            return now_s
        slowdown = self.prices.slowdown(len(self.in_flight) / self.num_replicas)
        return now_s + slowdown * min(
            max(0.0, self.prices.expect(one.timing_key, now_s) - (now_s - one.started_s) / slowdown)
            for one in self.in_flight
        )


@dataclass(frozen=True)
class Measurement:
    """One frame: what it took, among how many."""

    seconds: float
    company: float  # the mean number of frames in its rounds, itself among them
    is_whole: bool = True  # one that was cut before its end would have taken longer


class FlowTimes:
    """What the last few frames of a flow took."""

    def __init__(self) -> None:
        self.measured_s = -math.inf  # when the last one was
        self.recent: deque[Measurement] = deque(maxlen=REMEMBERED_FRAMES)

    def is_fresh(self, now_s: float) -> bool:
        """Whether a frame was measured lately."""
        return self.measured_s >= now_s - STALE_AFTER_S

    def note(self, one: Measurement, now_s: float) -> None:
        """Take in one more frame.

        What cut frames took is forgotten for a longer cut, and for the first that was answered.
        """
        if not any(known.is_whole for known in self.recent):
            self.recent.clear()
        self.recent.append(one)
        self.measured_s = now_s

    def alone_s(self, share: float, rank: float = ESTIMATE_QUANTILE) -> float:
        """Return the seconds that so large a part of the frames would not have exceeded alone."""
        if not self.recent:
            return 0.0
        found = sorted(one.seconds / slowdown(share, one.company) for one in self.recent)
        return found[int(rank * (len(found) - 1))]


class Prices:
    """Learns what frames cost, flow by flow: alone, and how much longer in company.

        seconds of a frame among n = seconds alone x (1 + share x (n - 1))

    `share` is what each further frame adds to a round, as a part of its time alone: near 0 where a
    GPU computes many rows as fast as one, near 1 where a processor computes one after the other. It
    follows from frames of the same flow that were answered in different company. So a flow's
    estimate is its own: how many neighbours it had when it was measured is taken out again.
    """

    def __init__(self) -> None:
        self._flows: OrderedDict[str, FlowTimes] = OrderedDict()  # the last seen comes last
        self._all = FlowTimes()  # what is believed of a flow that was never seen
        self._shares = deque([1.0] * 3, maxlen=REMEMBERED_SHARES)

    @property
    def share(self) -> float:
        """What each further frame adds, as a part of one's time alone; 1 until it was measured."""
        return median(self._shares)

    def slowdown(self, company: float) -> float:
        """Return how much longer a frame takes among so many than alone."""
        return slowdown(self.share, company)

    def observe(
        self, flow: str, seconds: float, now_s: float, company: float = 1.0, is_whole: bool = True
    ) -> None:
        """Take in what a frame took. One that was cut before its end would have taken longer."""
        one = Measurement(seconds, max(1.0, company), is_whole)
        if not is_whole and seconds / self.slowdown(company) <= self.expect(flow, now_s):
            return  # that was known
        known = self._flows.setdefault(flow, FlowTimes())
        whole = [other for other in known.recent if other.is_whole]
        if is_whole and whole:
            other = max(whole, key=lambda other: abs(other.company - one.company))
            self._learn_share(one, other)
        if is_whole:
            self._all.note(one, now_s)
        known.note(one, now_s)
        self._flows.move_to_end(flow)
        if len(self._flows) > REMEMBERED_FLOWS:
            self._flows.popitem(last=False)

    def expect(self, flow: str, now_s: float) -> float:
        """Return the seconds that a frame of a flow takes alone, probably; 0 if nobody knows.

        Where the flow was not measured lately, the least that it or others have shown is believed.
        """
        known = self._flows.get(flow)
        if known is None:
            return self._all.alone_s(self.share)
        if known.is_fresh(now_s):
            return known.alone_s(self.share)
        least_s = known.alone_s(self.share, 0.0)
        return min(least_s, self._all.alone_s(self.share, 0.5)) if self._all.recent else least_s

    def proven(self, flow: str, now_s: float) -> float:
        """Return what justifies a refusal: what the flow itself has shown, while anything is new.

        So nobody is refused for ever because of what was measured once.
        """
        known = self._flows.get(flow)
        if known is None or not (known.is_fresh(now_s) or self._all.is_fresh(now_s)):
            return 0.0
        if known.is_fresh(now_s):
            return known.alone_s(self.share, 0.5)
        return self.expect(flow, now_s)

    def _learn_share(self, one: Measurement, other: Measurement) -> None:
        """Learn from two frames of a flow, if their company differed enough to tell."""
        many, few = (one, other) if one.company > other.company else (other, one)
        if many.company - few.company < MIN_BATCH_SIZE_GAP or few.seconds <= 0:
            return
        # seconds = alone x (1 + share x (company - 1)), twice, solved for the share
        longer = many.seconds - few.seconds
        rest = few.seconds * (many.company - 1) - many.seconds * (few.company - 1)
        share = 0.0 if longer <= 0 else longer / rest if rest > longer else 1.0
        self._shares.append(share)


def slowdown(share: float, company: float) -> float:
    """Return how much longer a frame takes among so many than alone."""
    return 1 + share * (max(1.0, company) - 1)
