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
- a frame that cannot meet its deadline is refused at once, or dropped before it starts.

The policy is there once, or in replicas. Each has a place for every frame of a batch, which is
taken by the next one as soon as its answer is ready; where the policy answers all in one call, the
next ones wait until the places of a whole batch are free.
Times are seconds on any one monotonic clock.
"""

import asyncio
import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from deft_client.types import ActionChunk, altered
from deft_policies.base import ActAnswer, ActRequest
from deft_server.errors import DeadlineError, OverloadedError
from deft_server.serving.sessions import RobotSession

STALE_AFTER_S = 1.0  # a flow's measurement older than this does not justify a refusal
KEPT_PART = 8  # of the line, one part is kept for frames in a hurry and for owners without any
REMEMBERED_FRAMES = 9  # of a flow
REMEMBERED_FLOWS = 1024


Answer = ActAnswer | Exception


class Failure(Enum):
    """Why a call of the policy did not answer."""

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
    started_s: float = 0.0  # when it went to the policy
    queue_s: float = 0.0
    # What is filled in where the policy is:
    outcome: Answer | None = None  # none where it was cut: nobody waited for it any more
    joined_s: float = 0.0  # on the clock of whoever answers
    service_s: float = 0.0
    size: int = 0  # the most frames that were answered together, this one among them
    replica: str = "0"  # who answered, where there are several

    @property
    def has_deadline(self) -> bool:
        """Does the caller say when the answer is of no more use?"""
        return self.deadline_s < math.inf

    def ask(self) -> None:
        """Note what the policy is asked, with the session's memory as it is now."""
        assert self.request is not None
        assert self.session is not None
        if self.request.memory is not self.session.memory:
            self.request = altered(self.request, {"memory": self.session.memory})

    def is_over(self, now_s: float) -> bool:
        """Whether nobody waits for the answer any more. May be asked on any thread."""
        return self.deadline_s <= now_s or (self.answer is not None and self.answer.done())

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


class ServiceTime:
    """Seconds per frame: the median of the last few, 0 while nothing was measured."""

    def __init__(self) -> None:
        self.expected_s = 0.0
        self.measured_s = -math.inf  # when it was last
        self._recent: deque[float] = deque(maxlen=REMEMBERED_FRAMES)

    def observe(self, seconds: float, now_s: float) -> None:
        """Take in that a frame took so long."""
        self._recent.append(seconds)
        self.expected_s, self.measured_s = median(self._recent), now_s


class FlowTimes:
    """What each flow's frames cost, so that one with long prompts makes no other look slow."""

    def __init__(self) -> None:
        self._flows: OrderedDict[str, ServiceTime] = OrderedDict()  # the last seen comes last
        self._all = ServiceTime()  # what is believed of a flow that was never seen

    def observe(self, flow: str, seconds: float, now_s: float) -> None:
        """Take in that a frame of a flow took so long."""
        self._all.observe(seconds, now_s)
        self._flows.setdefault(flow, ServiceTime()).observe(seconds, now_s)
        self._flows.move_to_end(flow)
        if len(self._flows) > REMEMBERED_FLOWS:
            self._flows.popitem(last=False)

    def expect(self, flow: str) -> float:
        """Return the seconds that a frame of a flow takes, probably."""
        return self._flows.get(flow, self._all).expected_s

    def proven(self, flow: str, since_s: float) -> float:
        """Return what the flow itself has shown since then; only that justifies a refusal."""
        known = self._flows.get(flow)
        return known.expected_s if known is not None and known.measured_s >= since_s else 0.0


@dataclass(frozen=True)
class QueueRules:
    """The bounds of the queue."""

    max_batch: int = 8
    max_waiting: int = 64
    patience_s: float = 2.0
    num_replicas: int = 1


class FrameQueue:
    """The frames that wait, and those that are with the policy."""

    def __init__(self, rules: QueueRules) -> None:
        self.max_batch = rules.max_batch
        self.num_replicas = rules.num_replicas
        self.is_stepped = False  # whether frames may join while others are on their way
        self.in_flight: list[QueuedFrame] = []  # that are with the policy, the oldest first
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
        """How many frames the policy takes at a time."""
        return self.num_replicas * self.max_batch

    @property
    def _num_free(self) -> int:
        """How many of the places can be taken now."""
        free = max(0, self.num_places - len(self.in_flight))
        return free if self.is_stepped else free // self.max_batch * self.max_batch

    @property
    def frames(self) -> list[QueuedFrame]:
        """What waits, as it came."""
        return list(self._frames.values())

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

    def next_batch(self, now_s: float) -> tuple[list[QueuedFrame], list[QueuedFrame]]:
        """Return the frames that go to the policy now, and those that are too late for it.

        Ask again until none go: there may be other places.
        """
        num_free = min(self._num_free, self.max_batch)
        if not num_free or not self._frames:
            return [], []
        flying = {one.flow for one in self.in_flight if one.is_session}
        chosen: list[QueuedFrame] = []
        expired: list[QueuedFrame] = []
        for frame in self._in_order():
            if frame.deadline_s <= now_s + self._takes_s(frame, now_s):
                expired.append(frame)
            elif frame.flow in flying:
                continue  # its memory is with the policy
            elif len(chosen) == num_free:
                break
            else:
                chosen.append(frame)
        for frame in (*expired, *chosen):
            self.remove(frame)
        for frame in chosen:
            frame.started_s = now_s
        if chosen:
            self._count_turns(chosen)
            self.in_flight += chosen
        return chosen, expired

    def finish(self, frame: QueuedFrame, now_s: float, service_s: float | None = None) -> None:
        """Take in that a frame is over; `service_s` is what it took, if answered in one go."""
        self.in_flight.remove(frame)
        if service_s is not None:
            self.times.observe(frame.flow, service_s, now_s)

    def clears_in_s(self, now_s: float) -> float:
        """Return the seconds until all that waits now will have been answered."""
        flows = {one.flow for one in self._frames.values()} or {""}
        each_s = max(map(self.times.expect, flows))
        return self._free_s(len(self._frames), each_s, now_s) - now_s + each_s

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
        each_s = max(map(self.times.expect, {one.flow for one in ahead}), default=0.0)
        free_s = self._free_s(len(ahead), each_s, now_s)
        return free_s + self._takes_s(frame, now_s) > frame.deadline_s

    def _goes_before(self, frame: QueuedFrame, turn: int, due_s: float) -> bool:
        """Whether a waiting frame goes before one of that turn and due time, roughly."""
        return self._turns[frame.owner] <= turn and self._due_s[frame.number] <= due_s

    def _takes_s(self, frame: QueuedFrame, now_s: float) -> float:
        return self.times.proven(frame.flow, now_s - STALE_AFTER_S)

    def _free_s(self, num_ahead: int, each_s: float, now_s: float) -> float:
        """Return when there is a place for one more frame, after so many that take so long."""
        free_s = [max(now_s, one.started_s + self.times.expect(one.flow)) for one in self.in_flight]
        idle_s = now_s if self._num_free else max(free_s, default=now_s)
        free_s += [idle_s] * (max(1, self.num_places) - len(free_s))
        heapq.heapify(free_s)
        for _ in range(num_ahead):
            heapq.heapreplace(free_s, free_s[0] + each_s)
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
