"""When a session will send its next frame, judged by how it behaved so far. Pure, like the line.

A robot sends a frame, executes the answer, and sends again: the pause between an answer and the
next frame is steady. Knowing it, a batch waits only for a robot that is about to ask.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

SMOOTHING = 0.3  # weight of the newest pause
MAX_FLOWS = 256  # with more of them batches fill without waiting


@dataclass
class _Beat:
    answered_s: float
    pause_s: float | None = None
    has_asked: bool = False


class Rhythm:
    """The usual pause of every session between an answer and its next frame."""

    def __init__(self) -> None:
        self._beats: dict[str, _Beat] = {}  # the last answered comes last

    def asked(self, flow: str, now_s: float) -> None:
        """Take in that a session sent a frame; only the first after an answer counts."""
        beat = self._beats.get(flow)
        if beat is None or beat.has_asked:
            return
        beat.has_asked = True
        pause_s = max(0.0, now_s - beat.answered_s)
        known_s = pause_s if beat.pause_s is None else beat.pause_s
        beat.pause_s = known_s + SMOOTHING * (pause_s - known_s)

    def answered(self, flow: str, now_s: float) -> None:
        """Take in that a session got an answer."""
        beat = self._beats.pop(flow, None)
        if beat is None:
            beat = _Beat(now_s)
            if len(self._beats) >= MAX_FLOWS:
                self._beats.pop(next(iter(self._beats)))
        beat.answered_s, beat.has_asked = now_s, False
        self._beats[flow] = beat

    def forget(self, flow: str) -> None:
        """Drop what is known of a session."""
        self._beats.pop(flow, None)

    def next_due_s(self, since_s: float) -> float:
        """Return when the first session is due, from then on, that has not asked since its last
        answer; infinity where none is."""
        dues_s = (
            beat.answered_s + beat.pause_s
            for beat in self._beats.values()
            if not beat.has_asked and beat.pause_s is not None
        )
        return min((one for one in dues_s if one >= since_s), default=math.inf)


REMEMBERED_BATCHES = 9


class ServiceTime:
    """Seconds per batch, by batch size."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._sizes: list[int] = []  # in order

    def observe(self, size: int, seconds: float) -> None:
        """Take in that a batch of `size` frames took `seconds`."""
        recent = self._seconds.setdefault(size, deque(maxlen=REMEMBERED_BATCHES))
        recent.append(seconds)
        self._medians[size] = median(recent)
        self._sizes = sorted(self._medians)

    def expect(self, size: int) -> float:
        """Return the seconds a batch of `size` will take; 0 while nothing was measured.

        A size never seen takes as long as the nearest larger one, else the nearest smaller one:
        a batch costs little more than a single frame.
        """
        if not self._sizes:
            return 0.0
        nearest = min(bisect_left(self._sizes, size), len(self._sizes) - 1)
        return self._medians[self._sizes[nearest]]


GOOD_BATCHES_BEFORE_GROWTH = 100


class BatchLimit:
    """Halves when the device gives up, grows back by one after many good batches."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._good = 0
        self.size = most

    def gave_up(self, batch_size: int) -> None:
        """Take in that the device could not do a batch of this size."""
        self.size = max(1, min(self.size, batch_size) // 2)
        self._good = 0

    def succeeded(self) -> None:
        """Take in that a batch was answered in one go."""
        self._good += 1
        if self.size < self._most and self._good >= GOOD_BATCHES_BEFORE_GROWTH:
            self.size += 1
            self._good = 0


class OwnerShares:
    """Seconds of the policy that every owner had, so that nobody gets far ahead of the others."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}
        self._level_s = 0.0  # where owners begin that come now: nothing is saved up while away

    def join(self, owner: str) -> None:
        """Take in that an owner waits who did not."""
        self._used_s[owner] = max(self._level_s, self._used_s.get(owner, 0.0))

    def use(self, owners: Collection[str], each_s: float, waiting: Collection[str]) -> None:
        """Take in that frames of these owners (one each, repeated) have their turn, while others
        wait on. Those who would begin at the same level if they were unknown are forgotten."""
        least_s = min(map(self._used_s.__getitem__, {*owners, *waiting}))
        self._level_s = max(self._level_s, least_s)
        for one in owners:
            self._used_s[one] += each_s
        self._used_s = {
            owner: used_s
            for owner, used_s in self._used_s.items()
            if owner in waiting or used_s > self._level_s
        }

    def ahead(self, owners: Collection[str], slack_s: float) -> frozenset[str]:
        """Return those of the owners that had more by `slack_s` than the one that had least."""
        least_s = min((self._used_s[one] for one in owners), default=0.0)
        return frozenset(one for one in owners if self._used_s[one] > least_s + slack_s)
