"""The frames that are with the policy, and whether one more may join them. Reads no clock.

The policy is there once, or in replicas. Each has a place for every frame of a batch. A place is
taken by the next frame as soon as it is free. Where the policy answers a batch in one call, frames
wait until the places of a whole batch are free.

What a frame costs, alone and in company, is measured (`prices`).
"""

import math
from collections.abc import Sequence

from deft_server.serving.prices import Prices
from deft_server.serving.request import Failure, Request

MARGIN = 2.0  # of what a frame may take, over what is expected: estimates are only so good
TRY_EVERY_S = 5.0  # how often a frame may join although that looks too dear: prices change
DECREASE = 0.7  # the limit is multiplied by it after a frame missed its deadline among others
INCREASE = 0.015  # and grows by it after each that met its deadline
GOOD_ROUNDS_BEFORE_GROWTH = 100


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
        self.in_flight: list[Request] = []  # that are with the policy, the oldest first
        self.prices = Prices()
        self._limit = ConcurrencyLimit(max_batch)
        self._most = max_batch  # of `max_batch`
        self._num_good_rounds = 0
        self._patience_s = patience_s
        self._hurried_s = -math.inf  # when an action with a deadline last came
        self._tried_s = -math.inf  # when a frame last joined that looked too dear
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
        if self._hurried_s < now_s - self._patience_s:
            return self.num_places
        return max(1, self.num_places // 2) - sum(one.is_text for one in self.in_flight)

    def note_arrival(self, frame: Request, now_s: float) -> None:
        """Note whether actions with deadlines come."""
        if frame.has_deadline and not frame.is_text:
            self._hurried_s = now_s

    def start(self, frames: Sequence[Request], now_s: float) -> None:
        """Give frames their places."""
        for frame in frames:
            frame.started_s = now_s
        self.in_flight += frames

    def finish(self, frame: Request, now_s: float, service_s: float | None = None) -> None:
        """Free a frame's place; `service_s` is what it took, if that was measured.

        What was cut at its deadline took at least so long.
        """
        self.note_progress(now_s)
        self.in_flight.remove(frame)
        if service_s is not None:
            passed_s = now_s - frame.started_s
            company = frame.shared_s / passed_s if passed_s > 0 else 1.0
            is_whole = frame.outcome is not None or frame.deadline_s > now_s
            self.prices.observe(frame.alike, service_s, now_s, company, is_whole)
            if frame.has_deadline:
                self._limit.note(company, frame.deadline_s <= now_s)

    def limit_batches(self, ended: Sequence[Request], failures: Sequence[Failure]) -> None:
        """Halve the batch where the device gave up; let it grow after many good rounds."""
        if "device" in failures:
            self._num_good_rounds = 0
            size = max(len(ended), *(one.size for one in ended))
            self.max_batch = max(1, min(self.max_batch, size) // 2)
        elif not failures:
            self._num_good_rounds += 1
            if self.max_batch < self._most and self._num_good_rounds >= GOOD_ROUNDS_BEFORE_GROWTH:
                self._num_good_rounds = 0
                self.max_batch += 1

    def is_hopeless(self, frame: Request, now_s: float) -> bool:
        """Would a frame be answered after its deadline, even if it were the next to go?"""
        return not self.is_in_time(frame, self.free_s(now_s), now_s)

    def is_in_time(self, frame: Request, start_s: float, now_s: float) -> bool:
        """Would a frame be answered before its deadline, if it started then and were alone?

        Only what its own flow has shown lately speaks against it.
        """
        return start_s + self.prices.proven(frame.alike, now_s) < frame.deadline_s

    def is_late(self, frame: Request, slowdown: float, now_s: float) -> bool:
        """Would a frame be answered after its deadline, if it went on so slowly?"""
        if not frame.has_deadline:
            return False
        left_s = max(0.0, self.prices.expect(frame.alike, now_s) - frame.done_s)
        return now_s + MARGIN * left_s * slowdown > frame.deadline_s

    def may_join(self, frame: Request, chosen: Sequence[Request], now_s: float) -> bool:
        """Would nobody be late for it who is in time now? What looks too dear is tried at times."""
        company = [one for one in (*self.in_flight, *chosen) if one.is_text == frame.is_text]
        if not company:
            return True
        if frame.has_deadline and len(company) >= self._limit.value * self.num_replicas:
            return False
        before = self.prices.slowdown(len(company) / self.num_replicas)
        after = self.prices.slowdown((len(company) + 1) / self.num_replicas)
        is_dear = self.is_late(frame, after, now_s) or any(
            self.is_late(one, after, now_s) and not self.is_late(one, before, now_s)
            for one in company
        )
        if not is_dear:
            return True
        if now_s - self._tried_s < TRY_EVERY_S:
            return False
        self._tried_s = now_s
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
            max(0.0, self.prices.expect(one.alike, now_s) - (now_s - one.started_s) / slowdown)
            for one in self.in_flight
        )
