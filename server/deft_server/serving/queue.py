"""The queue: which frames go to the policy, and when. Begin at `enqueue` and `next_batch`.

Reads no clock and starts nothing: callers pass the time, in seconds on any one monotonic clock.

The policy is there once, or in replicas. Each has a place for every frame of a batch. Where the
policy answers a batch in one call (`joins_midway` is false), a batch starts when all of its places
are free.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Sequence
from itertools import count

from deft_server.errors import DeadlineError, OverloadedError
from deft_server.serving.frame import FailedCall, QueuedFrame

RESERVED_FRACTION = 1 / 8  # of the queue, for frames with a deadline and callers with none waiting
NUM_RECENT = 9  # answers of a kind, from which the time of the next one is estimated
QUANTILE = 0.75  # of them, so many were quicker than the estimate
FRESH_S = 1.0  # no frame is refused if nothing was measured for so long
FORGET_BATCH_S = 10.0  # so large a batch is tried again if it was not for so long
MAX_BATCH_COST = 0.9  # of the time of its frames one by one: a dearer batch is not made
GOOD_ROUNDS_BEFORE_GROWTH = 100  # of the largest batch, after a device gave up
MAX_REMEMBERED = 1024  # kinds of answers; callers and sessions that had a turn


class FrameQueue:
    """The frames that wait, and those that are with the policy (`in_flight`).

    A flow is a session, or all frames of one caller that name no session. An owner is an API key,
    or an address where there are no keys.
    """

    def __init__(
        self,
        max_batch: int = 8,
        max_waiting: int = 64,
        patience_s: float = 2.0,
        num_replicas: int = 1,
    ) -> None:
        self.max_batch = max_batch  # as memory allows now
        self.num_replicas = num_replicas
        self.joins_midway = False  # whether frames may join while others are on their way
        self.in_flight: list[QueuedFrame] = []  # the oldest first
        self._configured_batch = max_batch
        self._num_good_rounds = 0
        self._max_waiting = max_waiting
        self._patience_s = patience_s
        self._waiting: dict[QueuedFrame, None] = {}  # in the order of arrival
        self._waiting_of_session: dict[str, QueuedFrame] = {}  # by flow
        self._owner_turns = Turns()
        self._flow_turns = Turns()
        self._times = ServiceTimes()
        self._last_action_s = -math.inf  # when an action with a deadline last arrived

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[QueuedFrame]:
        """The waiting frames, in the order of arrival."""
        return list(self._waiting)

    @property
    def num_places(self) -> int:
        """How many frames the policy takes at a time."""
        return self.num_replicas * self.max_batch

    @property
    def num_free(self) -> int:
        """How many frames may start now."""
        num_free = max(0, self.num_places - len(self.in_flight))
        if not self.joins_midway:
            num_free -= num_free % self.max_batch
        return min(num_free, self.max_batch)

    def enqueue(self, frame: QueuedFrame, now_s: float) -> QueuedFrame | None:
        """Add a frame, and return the waiting frame of its session, which it replaces.

        The newer frame takes over the due time of the older one if that is earlier. A frame without
        a deadline is due `patience_s` from now. A frame with `overfills_until_s` may overfill the
        queue: its caller could not try again.

        Raises `DeadlineError` if the frame would be late even if it went next and alone, and
        `OverloadedError` if the queue is full.
        """
        if frame.has_priority:
            self._last_action_s = now_s
        if not self._can_be_in_time(frame, self.next_free_s(now_s), now_s):
            raise DeadlineError("cannot be answered in time; nothing was computed")
        older = self._waiting_of_session.get(frame.flow) if frame.is_session else None
        has_place = older is not None and older.overfills_until_s is None
        if not has_place and frame.overfills_until_s is None and self._is_full_for(frame):
            raise self.refusal(now_s)
        frame.due_s = frame.deadline_s if frame.has_deadline else now_s + self._patience_s
        if older is not None:
            frame.due_s = min(frame.due_s, older.due_s)
            self.remove(older)
        self._waiting[frame] = None
        if frame.is_session:
            self._waiting_of_session[frame.flow] = frame
        return older

    def _is_full_for(self, frame: QueuedFrame) -> bool:
        """Other owners' frames with `overfills_until_s` are not counted."""
        num_counted = sum(
            one.overfills_until_s is None or one.owner == frame.owner for one in self._waiting
        )
        num_reserved = 0
        if not frame.has_deadline and any(one.owner == frame.owner for one in self._waiting):
            num_reserved = int(self._max_waiting * RESERVED_FRACTION)
        return num_counted >= self._max_waiting - num_reserved

    def next_batch(self, now_s: float) -> tuple[list[QueuedFrame], list[QueuedFrame]]:
        """Take out the frames that go to the policy now, and those that are too late for it.

        Ask again until none go: other replicas may be free.

        Owners take turns, and so do the flows of an owner. A frame goes if that makes no frame of
        its kind (actions or texts) late; else it holds up all of its kind, or it might never fit.
        """
        num_free = self.num_free
        if not num_free:
            return [], []
        expired = [one for one in self._waiting if not self._can_be_in_time(one, now_s, now_s)]
        for frame in expired:
            self.remove(frame)
        chosen: list[QueuedFrame] = []
        held_up: set[bool] = set()  # kinds, by `is_text`
        while len(chosen) < num_free and (frame := self._next(held_up, now_s)):
            if self._fits(frame, now_s):
                self._start(frame, now_s)
                chosen.append(frame)
            else:
                held_up.add(frame.is_text)
        for frame in chosen:
            frame.num_at_start = len(self._in_flight_like(frame))
        return chosen, expired

    def _next(self, held_up: Collection[bool], now_s: float) -> QueuedFrame | None:
        """Return the waiting frame whose turn it is. A session has one frame with the policy."""
        busy = {one.flow for one in self.in_flight if one.is_session}
        may_start_text = self._may_start_text(now_s)
        ready = [
            one
            for one in self._waiting
            if one.flow not in busy
            and one.is_text not in held_up
            and (may_start_text or not one.is_text)
        ]
        return min(ready, key=lambda one: self._turn(one, now_s), default=None)

    def _start(self, frame: QueuedFrame, now_s: float) -> None:
        self.remove(frame)
        self._owner_turns.note(frame.owner)
        self._flow_turns.note(frame.flow)
        self.in_flight.append(frame)
        frame.started_s = now_s

    def _turn(self, frame: QueuedFrame, now_s: float) -> tuple[int, bool, int, float]:
        """Return what orders frames: the least goes first.

        Of one owner, frames that are due within `patience_s`, or that waited so long, go before the
        others. Of these, the flow whose last turn is longest ago, and then the earliest due time.
        """
        urgent_from_s = frame.due_s - (self._patience_s if frame.has_deadline else 0.0)
        owner_turn, flow_turn = self._owner_turns[frame.owner], self._flow_turns[frame.flow]
        return owner_turn, now_s < urgent_from_s, flow_turn, frame.due_s

    def _may_start_text(self, now_s: float) -> bool:
        """Half of the places are kept for actions while any with deadlines arrive."""
        if now_s - self._last_action_s > self._patience_s:
            return True
        return sum(one.is_text for one in self.in_flight) < max(1, self.num_places // 2)

    def _in_flight_like(self, frame: QueuedFrame) -> list[QueuedFrame]:
        return [one for one in self.in_flight if one.is_text == frame.is_text]

    def _fits(self, frame: QueuedFrame, now_s: float) -> bool:
        """Whether all would be in time if a frame joined those in flight, and sooner for it.

        Frames without a deadline join each other always.
        """
        batch = self._in_flight_like(frame)
        allowed_s = [frame.deadline_s - now_s, *(one.deadline_s - one.started_s for one in batch)]
        shortest_s = min(allowed_s)
        if not batch or shortest_s == math.inf:
            return True
        num_frames = len(batch) + 1
        expected_s = self._expected_together_s(frame, num_frames, now_s)
        alone_s = self._times.estimate((frame.is_text, 1))
        one_by_one_s = alone_s * num_frames / self.num_replicas
        is_sooner = not alone_s or expected_s <= MAX_BATCH_COST * one_by_one_s
        return is_sooner and expected_s < shortest_s

    def _expected_together_s(self, frame: QueuedFrame, num_frames: int, now_s: float) -> float:
        """Return what one of so many frames takes, or of fewer if so many were not tried lately."""
        for size in range(math.ceil(num_frames / self.num_replicas), 1, -1):
            known_s = self._times.estimate((frame.is_text, size), now_s - FORGET_BATCH_S)
            if known_s:
                return known_s
        return self._times.estimate((frame.is_text, 1))

    def _can_be_in_time(self, frame: QueuedFrame, start_s: float, now_s: float) -> bool:
        """Whether a frame would be answered before its deadline, if it started then and alone.

        Both its own flow's last answers and all last ones must speak against it, so that nobody is
        refused for ever after a slow one.
        """
        if not frame.has_deadline:
            return True
        usual_s = self._times.estimate(frame.is_text, now_s - FRESH_S)
        expected_s = min(self._times.estimate(frame.timing_key), usual_s)
        return start_s + expected_s < frame.deadline_s

    def finish(self, frame: QueuedFrame, now_s: float, service_s: float | None = None) -> None:
        """Free a frame's place; `service_s` is what it took, if that was measured.

        A frame that was cut at its deadline would have taken longer.
        """
        num_frames = (frame.num_at_start + len(self._in_flight_like(frame))) / 2
        self.in_flight.remove(frame)
        if service_s is None:
            return
        is_cut = frame.outcome is None and frame.deadline_s <= now_s
        keys: list[Hashable] = [frame.timing_key, frame.is_text]
        if frame.has_deadline:
            keys.append((frame.is_text, math.ceil(num_frames / self.num_replicas)))
        for key in keys:
            if not is_cut or service_s > self._times.estimate(key):
                self._times.note(key, service_s, now_s)

    def limit_batches(self, failures: Sequence[FailedCall]) -> None:
        """Halve the batch where the device gave up; let it grow after many good rounds."""
        sizes = [one.size for one in failures if one.kind == "device" and not one.is_retry]
        if sizes:
            self._num_good_rounds = 0
            self.max_batch = max(1, min(self.max_batch, *sizes) // 2)
        elif not failures:
            self._num_good_rounds += 1
            if (
                self.max_batch < self._configured_batch
                and self._num_good_rounds >= GOOD_ROUNDS_BEFORE_GROWTH
            ):
                self._num_good_rounds = 0
                self.max_batch += 1

    def remove(self, frame: QueuedFrame) -> bool:
        """Take a frame out, and return whether it still waited."""
        if frame not in self._waiting:
            return False
        del self._waiting[frame]
        if frame.is_session:
            del self._waiting_of_session[frame.flow]
        return True

    def remove_session(self, flow: str) -> QueuedFrame | None:
        """Take out the waiting frame of a session that was reset, and return it."""
        frame = self._waiting_of_session.get(flow)
        if frame is not None:
            self.remove(frame)
        return frame

    def refusal(self, now_s: float) -> OverloadedError:
        """Return the error for a frame that finds the queue full."""
        retry_after_s = self.clears_in_s(now_s)
        return OverloadedError(
            f"{len(self)} frames are waiting; try again in {retry_after_s * 1000:.0f} ms",
            retry_after_s,
        )

    def clears_in_s(self, now_s: float) -> float:
        """Return the seconds until all waiting frames will have been answered, roughly."""
        longest_s = max(map(self._expected_s, self._waiting), default=0)
        num_batches = (len(self._waiting) + self.num_places) // self.num_places
        return self.next_free_s(now_s) - now_s + num_batches * longest_s

    def next_free_s(self, now_s: float) -> float:
        """Return when a place will be free, probably."""
        if self.num_free:
            return now_s
        return max(now_s, min(one.started_s + self._expected_s(one) for one in self.in_flight))

    def _expected_s(self, frame: QueuedFrame) -> float:
        """Return what a frame's flow takes, or what is usual where nothing is known of the flow."""
        times = self._times
        return times.estimate(frame.timing_key) or times.estimate(frame.is_text)


class ServiceTimes:
    """How long the last answers took, by any key."""

    def __init__(self) -> None:
        self._recent: OrderedDict[Hashable, deque[float]] = OrderedDict()
        self._noted_s: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._recent)

    def note(self, key: Hashable, seconds: float, now_s: float) -> None:
        """Add an answer."""
        self._recent.setdefault(key, deque(maxlen=NUM_RECENT)).append(seconds)
        self._recent.move_to_end(key)
        self._noted_s[key] = now_s
        if len(self._recent) > MAX_REMEMBERED:
            del self._noted_s[self._recent.popitem(last=False)[0]]

    def estimate(self, key: Hashable, since_s: float = -math.inf) -> float:
        """Return the third quartile; 0 where nothing was noted, or nothing since then."""
        if key not in self._recent or self._noted_s[key] < since_s:
            return 0.0
        times_s = sorted(self._recent[key])
        return times_s[int(QUANTILE * (len(times_s) - 1))]


class Turns:
    """When each name had its last turn, as a number that only grows; 0 for an unknown name."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._last)

    def __getitem__(self, name: str) -> int:
        return self._last.get(name, 0)

    def note(self, name: str) -> None:
        """A name has its turn."""
        self._last[name] = next(self._numbers)
        self._last.move_to_end(name)
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)
