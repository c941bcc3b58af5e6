"""Which frames wait, and which go to the policy next. Reads no clock and starts nothing.

A flow is a session, or all frames of one caller that name no session. An owner is an API key, or an
address where there are none; its flows share what it gets. The rules:

- a session has at most one frame with the policy and one waiting; a newer frame takes the turn of
  the one that waits;
- owners take turns, and so do the flows of an owner: the one with the fewest frames started goes
  first. Time spent away earns no more than a few turns;
- within a turn the earliest due time goes first. A frame without a deadline is due `patience` after
  it arrived: it goes after frames with deadlines until then, and before them afterwards;
- the line is bounded. Its last eighth is for frames with a deadline and for owners that have
  nothing waiting. A frame that `stays_until_s` joins a full line, too: its caller could not try
  again;
- a frame joins those that are with the policy where, at the price of so many together, none of
  them misses a deadline that it would otherwise meet (`prices`). A frame that could not meet its
  deadline alone is refused;
- where frames miss their deadlines in company nevertheless, fewer go together (`Company`);
- texts hold at most half of the places while actions with deadlines come.

The policy is there once, or in replicas. Each has a place for every frame of a batch, which is
taken by the next one as soon as its answer is ready; where the policy answers all in one call, the
next ones wait until the places of a whole batch are free.
Times are seconds on any one monotonic clock.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from deft_client.types import ActionChunk, altered
from deft_policies.base import ActAnswer, ActRequest
from deft_server.errors import DeadlineError, OverloadedError
from deft_server.serving.prices import Prices
from deft_server.serving.sessions import RobotSession

KEPT_PART = 8  # of the line, one part is kept for frames in a hurry and for owners without any
MARGIN = 2.0  # of what a frame may take, over what is expected: estimates are only so good
TRY_EVERY_S = 5.0  # how often a frame may join although that looks too dear: prices change
REMEMBERED_TURNS = 256
FEWER = 0.7  # times as many frames go together after one missed its deadline in company
MORE = 0.015  # so many more after each that met it
ARREARS = 8  # turns that nobody can be behind by more: they are for who was refused


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
    is_text: bool = False  # the answer is a text and an action, which takes many rounds
    # What the queue notes while the frame is with the policy:
    started_s: float = 0.0
    done_s: float = 0.0  # how much of it is done, in seconds that it would have taken alone
    shared_s: float = 0.0  # the sum over time of how many frames shared its rounds
    # What the queue itself does not look at:
    request: ActRequest | None = None
    session: RobotSession | None = None
    answer: "asyncio.Future[ActionChunk] | None" = None
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

    @property
    def alike(self) -> str:
        """The name of the frames that take as long as this one: those of its flow and kind."""
        return f"{self.flow} text" if self.is_text else self.flow

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


class Turns:
    """Whose turn it is: whoever had the fewest frames started.

    Time spent away earns no more credit than a few turns.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}  # frames started, from where all began
        self._level = 0  # where those begin that come now

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, self._level)

    def is_behind(self, name: str) -> bool:
        """Whether others had more than one turn since."""
        return self[name] < self._level - 1

    def join(self, name: str) -> None:
        """Take in that somebody waits who did not."""
        self._counts[name] = max(self[name], self._level - ARREARS)

    def start(self, name: str) -> None:
        """Take in that a frame was started."""
        count = self[name]
        self._level = max(self._level, count)
        self._counts[name] = count + 1

    def forget_all_but(self, waiting: Collection[str]) -> None:
        """Drop what makes no difference, and what is too much to be remembered."""
        if len(self._counts) > len(waiting) + REMEMBERED_TURNS:
            self._counts = {name: self[name] for name in waiting}


class Company:
    """How many frames with deadlines go together, learnt from which of them met theirs."""

    def __init__(self, most: int) -> None:
        self.limit = float(most)
        self._most = most

    def note(self, company: float, is_late: bool) -> None:
        """Take in a frame that was over, among how many it was answered and whether too late."""
        if not is_late:
            self.limit = min(self.limit + MORE, self._most)
        elif company > 1:
            self.limit = max(1.0, FEWER * min(self.limit, company))


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
        self.prices = Prices()
        self._company = Company(rules.max_batch)
        self._max_waiting = rules.max_waiting
        self._patience_s = rules.patience_s
        self._frames: dict[int, QueuedFrame] = {}
        self._due_s: dict[int, float] = {}
        self._staying: Counter[str] = Counter()  # those of each owner that join a full line
        self._sessions: dict[str, QueuedFrame] = {}  # what waits of each session
        self._waiting: dict[str, Counter[str]] = {}  # how many frames of each owner's flows wait
        self._owner_turns = Turns()
        self._flow_turns: dict[str, Turns] = {}  # of each owner's flows
        self._hurried_s = -math.inf  # when an action with a deadline last came
        self._tried_s = -math.inf  # when a frame last joined that looked too dear
        self._noted_s = 0.0  # until when the progress of `in_flight` is noted

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
        if frame.has_deadline and not frame.is_text:
            self._hurried_s = now_s
        if frame.has_deadline and self._is_hopeless(frame, now_s):
            raise DeadlineError("cannot be answered in time; nothing was computed")
        has_place = older is not None and older.stays_until_s is None
        if not has_place and frame.stays_until_s is None and self._is_full_for(frame):
            raise self.refusal(now_s)
        if older is not None:
            self.remove(older)
        flows = self._waiting.setdefault(frame.owner, Counter())
        if not flows:
            self._owner_turns.join(frame.owner)
        if not flows[frame.flow]:
            self._flow_turns.setdefault(frame.owner, Turns()).join(frame.flow)
        flows[frame.flow] += 1
        self._frames[frame.number] = frame
        self._due_s[frame.number] = due_s
        self._staying[frame.owner] += frame.stays_until_s is not None
        if frame.is_session:
            self._sessions[frame.flow] = frame
        return older

    def remove(self, frame: QueuedFrame) -> bool:
        """Take a frame out, and return whether it still waited."""
        if self._frames.pop(frame.number, None) is None:
            return False
        del self._due_s[frame.number]
        flows = self._waiting[frame.owner]
        flows[frame.flow] -= 1
        if not flows[frame.flow]:
            del flows[frame.flow]
        if not flows:
            del self._waiting[frame.owner]
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
        self._note_progress(now_s)
        free_for_texts = self._free_for_texts(now_s)
        flying = {one.flow for one in self.in_flight if one.is_session}
        chosen: list[QueuedFrame] = []
        expired: list[QueuedFrame] = []
        tight: list[QueuedFrame] = []  # in time only if all goes well: where nobody else can go
        passed_over: dict[str, int] = {}  # the turn of each owner's first frame that did not fit
        for frame in self._in_order(now_s):
            turns = self._flow_turns[frame.owner]
            turn = turns[frame.flow]
            if not self._is_in_time(frame, now_s, now_s):
                expired.append(frame)
            elif frame.flow in flying or (frame.is_text and free_for_texts <= 0):
                continue  # its memory is with the policy, or others need the place
            elif len(chosen) == num_free:
                break
            elif turn > passed_over.get(frame.owner, turn):
                continue  # whose turn comes before would never fit, if others always filled up
            elif self._is_late(frame, 1.0, now_s) and not turns.is_behind(frame.flow):
                tight.append(frame)
            elif self._may_join(frame, chosen, now_s):
                chosen.append(frame)
                free_for_texts -= frame.is_text
            elif frame.has_deadline:
                passed_over.setdefault(frame.owner, turn)
            elif self._is_urgent(frame, now_s):
                break  # it has waited long enough: nobody goes before it
        if tight and not chosen and not self.in_flight:
            chosen = [max(tight, key=lambda one: one.deadline_s)]
        for frame in (*expired, *chosen):
            self.remove(frame)
        for frame in chosen:
            frame.started_s = now_s
        if chosen:
            self._count_turns(chosen)
            self.in_flight += chosen
        return chosen, expired

    def finish(self, frame: QueuedFrame, now_s: float, service_s: float | None = None) -> None:
        """Take in that a frame is over; `service_s` is what it took, if answered in one go.

        What was cut at its deadline took at least so long.
        """
        self._note_progress(now_s)
        self.in_flight.remove(frame)
        if service_s is not None:
            passed_s = now_s - frame.started_s
            company = frame.shared_s / passed_s if passed_s > 0 else 1.0
            is_whole = frame.outcome is not None or frame.deadline_s > now_s
            self.prices.observe(frame.alike, service_s, now_s, company, is_whole)
            if frame.has_deadline:
                self._company.note(company, frame.deadline_s <= now_s)

    def clears_in_s(self, now_s: float) -> float:
        """Return the seconds until all that waits now will have been answered, roughly."""
        each_s = max((self.prices.expect(one.alike, now_s) for one in self.frames), default=0.0)
        num_batches = (len(self._frames) + self.num_places) // self.num_places
        return self._free_s(now_s) - now_s + num_batches * each_s

    def refusal(self, now_s: float) -> OverloadedError:
        """Return what a caller is told that finds no place."""
        retry_after_s = self.clears_in_s(now_s)
        return OverloadedError(
            f"{len(self)} frames are waiting; try again in {retry_after_s * 1000:.0f} ms",
            retry_after_s,
        )

    def _in_order(self, now_s: float) -> list[QueuedFrame]:
        """Return what waits, who goes first first.

        By turns of the owners. Those of one: what is urgent, by turns of the flows; then the rest.
        """
        by_due = sorted(
            self._frames.values(), key=lambda one: (self._due_s[one.number], one.number)
        )
        count: Counter[str] = Counter()
        ranks = {}
        for frame in by_due:  # many frames of a flow are not all before others
            turn = self._flow_turns[frame.owner][frame.flow] + count[frame.flow]
            ranks[frame.number] = (not self._is_urgent(frame, now_s), turn)
            count[frame.flow] += 1
        count.clear()
        turns = {}
        for frame in sorted(by_due, key=lambda one: ranks[one.number]):
            turns[frame.number] = self._owner_turns[frame.owner] + count[frame.owner]
            count[frame.owner] += 1
        return sorted(by_due, key=lambda one: turns[one.number])

    def _is_urgent(self, frame: QueuedFrame, now_s: float) -> bool:
        """Whether a frame's deadline is near, or it has waited as long as one without should."""
        near_s = now_s + self._patience_s if frame.has_deadline else now_s
        return self._due_s[frame.number] <= near_s

    def _count_turns(self, chosen: Sequence[QueuedFrame]) -> None:
        """Take in whose frames were started."""
        for frame in chosen:
            self._owner_turns.start(frame.owner)
            self._flow_turns[frame.owner].start(frame.flow)
        self._staying = +self._staying
        self._owner_turns.forget_all_but(self._waiting)
        for owner, turns in list(self._flow_turns.items()):
            turns.forget_all_but(self._waiting.get(owner, ()))
            if owner not in self._waiting and len(self._flow_turns) > REMEMBERED_TURNS:
                del self._flow_turns[owner]

    def _is_full_for(self, frame: QueuedFrame) -> bool:
        others_staying = sum(self._staying.values()) - self._staying[frame.owner]
        taken = len(self._frames) - others_staying
        if taken >= self._max_waiting:
            return True
        is_kept_for = frame.has_deadline or not self._waiting.get(frame.owner)
        kept = 0 if is_kept_for else self._max_waiting // KEPT_PART
        return taken >= self._max_waiting - kept

    def _is_hopeless(self, frame: QueuedFrame, now_s: float) -> bool:
        """Would a frame be answered after its deadline, even if it were the next to go?"""
        return not self._is_in_time(frame, self._free_s(now_s), now_s)

    def _is_in_time(self, frame: QueuedFrame, start_s: float, now_s: float) -> bool:
        """Would a frame be answered before its deadline, if it started then and were alone?

        Only what its own flow has shown lately speaks against it.
        """
        return start_s + self.prices.proven(frame.alike, now_s) < frame.deadline_s

    def _free_for_texts(self, now_s: float) -> int:
        """Return how many texts may start: half of the places are kept for hurried actions."""
        if self._hurried_s < now_s - self._patience_s:
            return self.num_places
        return max(1, self.num_places // 2) - sum(one.is_text for one in self.in_flight)

    def _may_join(self, frame: QueuedFrame, chosen: Sequence[QueuedFrame], now_s: float) -> bool:
        """Would nobody be late for it who is in time now? What looks too dear is tried at times."""
        company = [one for one in (*self.in_flight, *chosen) if one.is_text == frame.is_text]
        if not company:
            return True
        if frame.has_deadline and len(company) >= self._company.limit * self.num_replicas:
            return False
        before = self.prices.slowdown(len(company) / self.num_replicas)
        after = self.prices.slowdown((len(company) + 1) / self.num_replicas)
        is_dear = self._is_late(frame, after, now_s) or any(
            self._is_late(one, after, now_s) and not self._is_late(one, before, now_s)
            for one in company
        )
        if not is_dear:
            return True
        if now_s - self._tried_s < TRY_EVERY_S:
            return False
        self._tried_s = now_s
        return True

    def _is_late(self, frame: QueuedFrame, slowdown: float, now_s: float) -> bool:
        """Would a frame be answered after its deadline, if it went on so slowly?"""
        if not frame.has_deadline:
            return False
        left_s = max(0.0, self.prices.expect(frame.alike, now_s) - frame.done_s)
        return now_s + MARGIN * left_s * slowdown > frame.deadline_s

    def _note_progress(self, now_s: float) -> None:
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

    def _free_s(self, now_s: float) -> float:
        """Return when there will be a place, probably."""
        if self._num_free:
            return now_s
        slowdown = self.prices.slowdown(len(self.in_flight) / self.num_replicas)
        return now_s + slowdown * min(
            max(0.0, self.prices.expect(one.alike, now_s) - (now_s - one.started_s) / slowdown)
            for one in self.in_flight
        )
