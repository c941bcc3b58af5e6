"""Which frames wait, and which go to the policy next. Pure: no clock, no I/O, no asyncio.

A flow is a session, or all frames of one caller that name no session. An owner is an API key, or an
address where there are none; its flows share what it gets. The rules:

- a session has at most one frame with the policy and one waiting; a newer frame takes the turn of
  the one that waits;
- owners take turns: whoever had fewer frames answered goes first, and nothing is saved up by
  staying away;
- within a turn the earliest due time goes first. A frame without a deadline is due `patience`
  after it arrived, so that it goes after those that are in a hurry, and starves never;
- the line is bounded. Its last eighth is for frames with a deadline and for owners that have
  nothing waiting. A frame that `stays_until_s` joins a full line, too: its caller could not try
  again;
- a frame that cannot meet its deadline is refused at once, or dropped before its batch starts;
- a batch holds no frame that would make it too slow for another's deadline.

The policy is there once, or in replicas that each take one batch at a time. Where it is played
round by round, each replica has a place for every frame of a batch instead, which is taken by the
next one as soon as its answer is ready.
Times are seconds on any one monotonic clock.
"""

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

from deft_client.types import ActionChunk, altered
from deft_policies.base import ActAnswer, ActRequest
from deft_server.errors import DeadlineError, OverloadedError
from deft_server.serving.sessions import RobotSession

STALE_AFTER_S = 1.0  # a flow's measurement older than this does not justify a refusal
KEPT_PART = 8  # of the line, one part is kept for frames in a hurry and for owners without any
REMEMBERED_BATCHES = 9
REMEMBERED_FLOWS = 1024
EXPLAINED = 1.25  # a batch is explained by a flow that was expected to take nearly as long


Answer = ActAnswer | Exception


class Failure(Enum):
    """Why a call of the policy did not answer its batch."""

    RAISED = "raised"
    DEVICE = "device"
    REQUEST = "request"
    LOST = "lost"  # the replica did not come back


@dataclass(eq=False, slots=True)
class QueuedFrame:
    """A frame from its admission to its answer."""

    number: int
    flow: str
    arrived_s: float
    deadline_s: float = math.inf
    is_session: bool = True
    stays_until_s: float | None = None  # joins a full line, too, and is to be refused then
    owner: str = ""
    # What the queue itself does not look at:
    request: ActRequest | None = None
    session: RobotSession | None = None
    answer: "asyncio.Future[ActionChunk] | None" = None
    queue_s: float = 0.0
    batch_size: int = 0

    @property
    def has_deadline(self) -> bool:
        """Does the caller say when the answer is of no more use?"""
        return self.deadline_s < math.inf

    def take(self, answer: ActAnswer) -> None:
        """Hand the answer out, unless it comes too late: then it changes nothing."""
        assert self.answer is not None
        assert self.session is not None
        if not self.answer.done():
            self.session.memory = answer.memory
            if answer.error is None:
                self.answer.set_result(answer.chunk)
            else:
                self.answer.set_exception(answer.error)

    def fail(self, error: Exception) -> None:
        """Tell who waits that there is no answer."""
        assert self.answer is not None
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False)
class ActBatch:
    """Frames that are with the policy together; whoever answers them fills in the rest."""

    frames: tuple[QueuedFrame, ...]
    started_s: float = 0.0
    requests: list[ActRequest] = field(default_factory=list)
    deadline_s: float = math.inf  # after which nobody waits for any of it
    answers: list[Answer] = field(default_factory=list)  # in order; none where it was cut
    failures: list[Failure] = field(default_factory=list)  # what went wrong on the way
    joined_s: float = 0.0  # on the clock of whoever answers
    service_s: float = 0.0
    size: int = 0  # the most frames that were answered together with these
    replica: str = "0"  # who answered, where there are several

    def ask(self) -> None:
        """Note what the policy is asked, with each session's memory as it is now."""
        for one in self.frames:
            assert one.request is not None
            assert one.session is not None
            self.requests.append(altered(one.request, {"memory": one.session.memory}))
        self.deadline_s = max(one.deadline_s for one in self.frames)

    def is_over(self, now_s: float) -> bool:
        """Whether nobody waits for it any more. May be asked on any thread."""
        waiting = [one for one in self.frames if one.answer is None or not one.answer.done()]
        return self.deadline_s <= now_s or (bool(self.frames) and not waiting)

    def fail(self, error: Exception) -> None:
        """Tell all who wait for an answer."""
        for frame in self.frames:
            frame.fail(error)


class ServiceTime:
    """Seconds per batch, by batch size: the median of the last few."""

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


class FlowTimes:
    """What each flow's frames cost, so that one with long prompts makes no other look slow."""

    def __init__(self) -> None:
        self._flows: OrderedDict[str, ServiceTime] = OrderedDict()  # the last seen comes last
        self._measured_s: dict[str, float] = {}
        self._all = ServiceTime()  # what is believed of a flow that was never seen

    def observe(self, flows: Sequence[str], seconds: float, now_s: float) -> None:
        """Take in that a batch with a frame of each of these flows took `seconds`.

        It is put down to a flow unless another in the batch was expected to take as long.
        """
        size = len(flows)
        self._all.observe(size, seconds)
        known = {one: self._flows[one].expect(size) for one in flows if one in self._flows}
        for flow in flows:
            others_s = max((known[one] for one in known if one != flow), default=0.0)
            if seconds > EXPLAINED * others_s or seconds <= known.get(flow, math.inf):
                self._flows.setdefault(flow, ServiceTime()).observe(size, seconds)
                self._flows.move_to_end(flow)
                self._measured_s[flow] = now_s
        while len(self._flows) > REMEMBERED_FLOWS:
            oldest, _ = self._flows.popitem(last=False)
            del self._measured_s[oldest]

    def expect(self, flows: Iterable[str], size: int) -> float:
        """Return the seconds that a batch of `size` with these flows takes, probably."""
        return max((self._flows.get(one, self._all).expect(size) for one in flows), default=0.0)

    def proven(self, flows: Iterable[str], size: int, since_s: float) -> float:
        """Return the seconds that such a batch takes as these flows themselves have shown since
        then; only that justifies a refusal."""
        return max(
            (
                self._flows[one].expect(size)
                for one in flows
                if self._measured_s.get(one, -math.inf) >= since_s
            ),
            default=0.0,
        )


@dataclass(frozen=True)
class QueueRules:
    """The bounds of the queue."""

    max_batch: int = 8
    max_waiting: int = 64
    patience_s: float = 2.0
    num_replicas: int = 1


class FrameQueue:
    """The frames that wait, and the batches that are with the policy."""

    def __init__(self, rules: QueueRules) -> None:
        self.max_batch = rules.max_batch
        self.num_replicas = rules.num_replicas
        self.is_stepped = False  # whether each frame is a batch of its own, that comes and goes
        self.batches: list[ActBatch] = []  # the oldest first
        self.times = FlowTimes()
        self._max_waiting = rules.max_waiting
        self._patience_s = rules.patience_s
        self._frames: dict[int, QueuedFrame] = {}
        self._due_s: dict[int, float] = {}
        self._staying: Counter[str] = Counter()  # those of each owner that join a full line
        self._sessions: dict[str, QueuedFrame] = {}  # what waits of each session
        self._owners: Counter[str] = Counter()  # how many frames of each wait
        self._turns: dict[str, int] = {}  # frames an owner had, from where all began
        self._turn = 0  # where owners begin that come now

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def num_places(self) -> int:
        """How many batches the policy takes at a time."""
        return self.num_replicas * (self.max_batch if self.is_stepped else 1)

    @property
    def _batch_size(self) -> int:
        return 1 if self.is_stepped else self.max_batch

    @property
    def frames(self) -> list[QueuedFrame]:
        """What waits, as it came."""
        return list(self._frames.values())

    @property
    def in_flight(self) -> list[QueuedFrame]:
        """The frames that are with the policy."""
        return [frame for batch in self.batches for frame in batch.frames]

    def offer(self, frame: QueuedFrame, now_s: float) -> QueuedFrame | None:
        """Let a frame join, and return the older one of its session whose turn it takes.

        Raises `DeadlineError` or `OverloadedError` where it may not.
        """
        older = self._sessions.get(frame.flow) if frame.is_session else None
        due_s = frame.deadline_s if frame.has_deadline else now_s + self._patience_s
        if older is not None:
            due_s = min(due_s, self._due_s[older.number])
        self._turns.setdefault(frame.owner, self._turn)
        if not self._owners[frame.owner]:
            self._turns[frame.owner] = max(self._turns[frame.owner], self._turn)
        if frame.has_deadline and self._is_hopeless(frame, due_s, now_s):
            raise DeadlineError("cannot be answered in time; nothing was computed")
        has_place = older is not None and older.stays_until_s is None
        if not has_place and frame.stays_until_s is None and self._is_full_for(frame):
            raise self.refusal(now_s)
        if older is not None:
            self.remove(older)
        self._frames[frame.number] = frame
        self._due_s[frame.number] = due_s
        self._owners[frame.owner] += 1
        self._staying[frame.owner] += frame.stays_until_s is not None
        if frame.is_session:
            self._sessions[frame.flow] = frame
        return older

    def remove(self, frame: QueuedFrame) -> bool:
        """Take a frame out, and return whether it still waited."""
        if self._frames.pop(frame.number, None) is None:
            return False
        del self._due_s[frame.number]
        self._owners[frame.owner] -= 1
        self._staying[frame.owner] -= frame.stays_until_s is not None
        if frame.is_session:
            del self._sessions[frame.flow]
        return True

    def forget(self, flow: str) -> QueuedFrame | None:
        """Take out what a session has waiting, because it was reset; return that."""
        frame = self._sessions.get(flow)
        if frame is not None:
            self.remove(frame)
        return frame

    def next_batch(self, now_s: float) -> tuple[ActBatch | None, list[QueuedFrame]]:
        """Return the batch to start now, if there is a place, and the frames that are too late.

        Ask again after a batch: there may be another place.
        """
        if len(self.batches) >= self.num_places or not self._frames:
            return None, []
        flying = {one.flow for one in self.in_flight if one.is_session}
        chosen: list[QueuedFrame] = []
        expired: list[QueuedFrame] = []
        for frame in self._in_order():
            if frame.deadline_s <= now_s + self._takes_s([frame], now_s):
                expired.append(frame)
            elif frame.flow in flying:
                continue  # its memory is with another replica
            elif len(chosen) == self._batch_size:
                break
            elif not chosen or self._goes_along(frame, chosen, now_s):
                chosen.append(frame)
        for frame in (*expired, *chosen):
            self.remove(frame)
        if not chosen:
            return None, expired
        self._count_turns(chosen)
        batch = ActBatch(tuple(chosen), now_s)
        self.batches.append(batch)
        return batch, expired

    def finish(self, batch: ActBatch, now_s: float, service_s: float | None = None) -> None:
        """Take in that a batch is over; `service_s` is what it took, if answered in one go."""
        self.batches.remove(batch)
        if service_s is not None:
            self.times.observe([one.flow for one in batch.frames], service_s, now_s)

    def clears_in_s(self, now_s: float) -> float:
        """Return the seconds until all that waits now will have been answered."""
        flows = [one.flow for one in self._frames.values()] or [""]
        full_s = self.times.expect(flows, self._batch_size)
        num_batches = math.ceil((len(self._frames) + 1) / self._batch_size)
        return self._free_s(num_batches - 1, full_s, now_s) - now_s + full_s

    def refusal(self, now_s: float) -> OverloadedError:
        """Return what a caller is told that finds no place."""
        retry_after_s = self.clears_in_s(now_s)
        return OverloadedError(
            f"{len(self)} frames are waiting; try again in {retry_after_s * 1000:.0f} ms",
            retry_after_s,
        )

    def _in_order(self) -> list[QueuedFrame]:
        """Return what waits: by turns of the owners, and within a turn the earliest due first."""
        ordered = sorted(
            self._frames.values(), key=lambda one: (self._due_s[one.number], one.number)
        )
        if len(self._sessions) < len(ordered):  # many frames of a flow are not all before others
            ordered = _in_turns(ordered, [one.flow for one in ordered], {})
        return _in_turns(ordered, [one.owner for one in ordered], self._turns)

    def _count_turns(self, chosen: Sequence[QueuedFrame]) -> None:
        for frame in chosen:
            self._turns[frame.owner] += 1
        waiting = self._owners = +self._owners  # without those that have none
        self._staying = +self._staying
        # Where nobody waits any more, nobody owes anything.
        level = min(self._turns[one] for one in waiting) if waiting else max(self._turns.values())
        self._turn = max(self._turn, level)
        self._turns = {
            owner: turn
            for owner, turn in self._turns.items()
            if owner in waiting or turn > self._turn
        }

    def _is_full_for(self, frame: QueuedFrame) -> bool:
        others_staying = sum(self._staying.values()) - self._staying[frame.owner]
        taken = len(self._frames) - others_staying
        if taken >= self._max_waiting:
            return True
        is_kept_for = frame.has_deadline or not self._owners[frame.owner]
        kept = 0 if is_kept_for else self._max_waiting // KEPT_PART
        return taken >= self._max_waiting - kept

    def _is_hopeless(self, frame: QueuedFrame, due_s: float, now_s: float) -> bool:
        """Would a frame be answered after its deadline, as far as fresh measurements tell?"""
        if frame.deadline_s <= now_s:
            return True
        turn = self._turns[frame.owner]
        ahead = [one for one in self._frames.values()
                 if one.flow != frame.flow and self._goes_before(one, turn, due_s)]  # fmt: skip
        flows = [one.flow for one in ahead]
        full_s = self.times.expect(flows, self._batch_size)
        ready_s = self._free_s(len(ahead) // self._batch_size, full_s, now_s)
        since_s = now_s - STALE_AFTER_S
        ready_s += self.times.proven([frame.flow], len(ahead) % self._batch_size + 1, since_s)
        return ready_s > frame.deadline_s

    def _goes_before(self, frame: QueuedFrame, turn: int, due_s: float) -> bool:
        """Whether a waiting frame goes before one of that turn and due time, roughly."""
        return self._turns[frame.owner] <= turn and self._due_s[frame.number] <= due_s

    def _goes_along(self, frame: QueuedFrame, chosen: list[QueuedFrame], now_s: float) -> bool:
        together = [*chosen, frame]
        return now_s + self._takes_s(together, now_s) <= min(one.deadline_s for one in together)

    def _takes_s(self, frames: Sequence[QueuedFrame], now_s: float) -> float:
        flows = [one.flow for one in frames]
        return self.times.proven(flows, len(flows), now_s - STALE_AFTER_S)

    def _free_s(self, batches_ahead: int, full_s: float, now_s: float) -> float:
        """Return when a place is free for one more batch, after so many full ones."""
        free_s = [
            max(now_s, one.started_s + self.times.expect(flows, len(flows)))
            for one in self.batches
            for flows in ([frame.flow for frame in one.frames],)
        ]
        free_s += [now_s] * (max(1, self.num_places) - len(free_s))
        heapq.heapify(free_s)
        for _ in range(batches_ahead):
            heapq.heapreplace(free_s, free_s[0] + full_s)
        return free_s[0]


def _in_turns(
    frames: Sequence[QueuedFrame], names: Sequence[str], first: Mapping[str, int]
) -> list[QueuedFrame]:
    """Return the frames turn by turn: in each one of every name, whose first turn may be later."""
    count: Counter[str] = Counter()
    turns = []
    for name in names:
        turns.append(first.get(name, 0) + count[name])
        count[name] += 1
    places = sorted(range(len(frames)), key=turns.__getitem__)  # stable
    return [frames[place] for place in places]
