"""Carries out what the waiting line decides: frames in, batches to the worker, answers out.

Lives on the event loop and never computes. All rules are in `waiting_line`.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from deft_client.types import ActionChunk
from deft_policies.base import ActAnswer, ActRequest, Policy, is_immediate
from deft_server.errors import (
    DeadlineError,
    NotReadyError,
    OverloadedError,
    RefusedFrameError,
    SupersededFrameError,
)
from deft_server.serving.estimates import BatchLimit
from deft_server.serving.metrics import Metrics
from deft_server.serving.policy_thread import (
    Attempts,
    Failure,
    LoadPolicy,
    PolicyThread,
    PolicyWorker,
    StartWorker,
    answer_batch,
)
from deft_server.serving.readiness import Readiness, ServerPhase
from deft_server.serving.sessions import RobotSession
from deft_server.serving.waiting_line import (
    Admission,
    LineRules,
    Ticket,
    WaitingLine,
)
from deft_server.settings import OnHang, Settings

STOP_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Answered:
    """One frame's answer, and how long it waited for its batch."""

    chunk: ActionChunk
    queue_s: float
    batch_size: int


@dataclass(eq=False)
class _Frame:
    ticket: Ticket
    request: ActRequest
    session: RobotSession
    answer: asyncio.Future[Answered]
    joined_s: float

    def take(self, answer: ActAnswer, started_s: float, batch_size: int) -> None:
        """Hand the answer out, unless it comes too late: then it changes nothing."""
        if not self.answer.done():
            self.session.learn(answer.memory)
            queue_s = max(0.0, started_s - self.joined_s)
            self.answer.set_result(Answered(answer.chunk, queue_s, batch_size))

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Frames that are with the worker; `line` is what the waiting line knows them by."""

    frames: tuple[_Frame, ...]
    line: tuple[Ticket, ...]
    hang_timer: asyncio.TimerHandle | None


class Scheduler:
    """The frames that wait, and the batches that are with the worker.

    `answers_at_once` is true where the policy is immediate: then nothing ever waits.
    `on_ready` is called when the policy is loaded, `on_fatal` when only a new process can help.
    """

    def __init__(
        self,
        load: LoadPolicy,
        settings: Settings,
        readiness: Readiness,
        metrics: Metrics,
        start_worker: StartWorker = PolicyThread,
    ) -> None:
        self.policy: Policy | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_fatal: Callable[[ServerPhase], None] = lambda _: None
        self._load = load
        self._start_worker = start_worker
        self._settings = settings
        self._readiness = readiness
        self._metrics = metrics
        self._line = WaitingLine(_line_rules(settings))
        self._limit = BatchLimit(settings.max_batch)
        self._frames: dict[int, _Frame] = {}
        self._batches: dict[int, _Batch] = {}
        self._numbers = itertools.count(1)
        self.answers_at_once = False
        self._num_failed_batches = 0
        self._held_since_s: float | None = None  # when a batch first waited for company
        self._settled = asyncio.Event()
        self._worker: PolicyWorker
        self._wake: asyncio.TimerHandle | None = None
        metrics.waiting.set_function(lambda: len(self._line))
        metrics.in_flight.set_function(lambda: len(self._line.in_flight))
        metrics.max_batch.set(settings.max_batch)
        metrics.replicas.set_function(lambda: self._line.num_replicas if self.policy else 0)

    @property
    def num_waiting(self) -> int:
        """How many frames wait for a batch."""
        return len(self._line)

    def start(self) -> None:
        """Begin to load the policy; call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._settled.clear()
        self._worker = self._start_worker(self._load, self, self._loop)
        self._worker.start()

    async def settled(self) -> None:
        """Wait until the policy is loaded, or is known not to load."""
        await self._settled.wait()

    def next_number(self) -> int:
        """Return the number of the next frame."""
        return next(self._numbers)

    async def answer(self, request: ActRequest, ticket: Ticket, session: RobotSession) -> Answered:
        """Wait for the answer to a frame; cancelling gives up its place.

        The session's memory is handed in when the frame's batch starts, not before: a frame ahead
        of it may change it.
        """
        if self.answers_at_once:
            return self._answer_here(request, ticket, session)
        frame = self._join(request, ticket, session)
        timers = self._timers(frame)
        self._pump()
        try:
            return await frame.answer
        finally:
            for timer in timers:
                timer.cancel()
            self._leave(frame)

    def forget(self, flow: str) -> None:
        """Refuse the frame that a session has waiting, because the session was reset."""
        ticket = self._line.forget(flow)
        if ticket is not None:
            self._fail(ticket, SupersededFrameError("the session was reset while this waited"))

    async def close(self) -> None:
        """Refuse what still waits and end the worker, unless it hangs."""
        self._fail_all(NotReadyError("the server is stopping"))
        for timer in (self._wake, *(batch.hang_timer for batch in self._batches.values())):
            if timer is not None:
                timer.cancel()
        patience_s = 0.0 if self._batches else STOP_TIMEOUT_S
        if not await asyncio.to_thread(self._worker.stop, patience_s):
            logger.warning("the policy is left behind: it is still busy")

    def policy_loaded(self, worker: PolicyWorker, policy: Policy, num_replicas: int) -> None:
        """Start to take frames, or go on with more or fewer replicas."""
        if worker is not self._worker:
            return
        self._line.num_replicas = num_replicas
        if not num_replicas:
            self._readiness.enter(ServerPhase.LOADING, "no replica is running")
            self._fail_waiting(NotReadyError("no replica is running"))
            return
        is_new = self.policy is not policy
        self.policy = policy
        self.answers_at_once = is_immediate(policy)
        self._readiness.enter(ServerPhase.READY)
        self._settled.set()
        if is_new:
            logger.info("ready: policy %s", policy.info.policy)
            self.on_ready()
        self._pump()

    def policy_broken(self, worker: PolicyWorker, error: Exception) -> None:
        """Give up: there is nothing to serve."""
        if worker is not self._worker:
            return
        self._readiness.enter(ServerPhase.BROKEN, str(error))
        self._settled.set()
        self.on_fatal(ServerPhase.BROKEN)

    def batch_finished(self, worker: PolicyWorker, number: int, attempts: Attempts) -> None:
        """Hand out the answers and start the next batch."""
        if worker is not self._worker:
            return
        batch = self._batches.pop(number)
        if batch.hang_timer is not None:
            batch.hang_timer.cancel()
        now_s = time.monotonic()
        self._line.finish(now_s, None if attempts.failures else attempts.service_s, batch.line)
        self._note(attempts)
        started_s = now_s - attempts.service_s
        for frame, answer in zip(batch.frames, attempts.answers, strict=True):
            if isinstance(answer, Exception):
                frame.fail(answer)
            else:
                frame.take(answer, started_s, len(batch.frames))
        self._pump()

    def _answer_here(self, request: ActRequest, ticket: Ticket, session: RobotSession) -> Answered:
        """Answer on the event loop, where the policy says that this takes no time."""
        assert self.policy is not None
        if ticket.deadline_s <= time.monotonic():
            raise self._refusal(Admission.TOO_LATE, ticket.deadline_s)
        attempts = answer_batch(self.policy, (replace(request, memory=session.memory),))
        self._note(attempts)
        answer = attempts.answers[0]
        if isinstance(answer, Exception):
            raise answer
        session.learn(answer.memory)
        return Answered(answer.chunk, 0.0, 1)

    def _join(self, request: ActRequest, ticket: Ticket, session: RobotSession) -> _Frame:
        now_s = time.monotonic()
        offer = self._line.offer(ticket, now_s)
        if offer.admission is not Admission.WAITS:
            raise self._refusal(offer.admission, now_s)
        if offer.superseded is not None:
            self._fail(offer.superseded, SupersededFrameError("the session sent a newer frame"))
        if offer.displaced is not None:
            self._fail(offer.displaced, self._refusal(Admission.FULL, now_s))
        frame = _Frame(ticket, request, session, self._loop.create_future(), now_s)
        self._frames[ticket.number] = frame
        return frame

    def _leave(self, frame: _Frame) -> None:
        if self._frames.pop(frame.ticket.number, None) is not None:
            self._line.withdraw(frame.ticket.number)

    def _refusal(self, admission: Admission, now_s: float) -> RefusedFrameError:
        if admission is Admission.TOO_LATE:
            return DeadlineError("cannot be answered in time; nothing was computed")
        retry_after_s = self._line.clears_in_s(now_s)
        return OverloadedError(
            f"{len(self._line)} frames are waiting; try again in {retry_after_s * 1000:.0f} ms",
            retry_after_s,
        )

    def _timers(self, frame: _Frame) -> list[asyncio.TimerHandle]:
        """Have a frame fail when its time is over."""
        ticket, now_s = frame.ticket, frame.joined_s
        timers = []
        if ticket.deadline_s < math.inf:
            timers.append(self._loop.call_later(ticket.deadline_s - now_s, self._miss, frame))
        if ticket.stays_until_s is not None:
            left_s = ticket.stays_until_s - now_s
            timers.append(self._loop.call_later(left_s, self._give_up, ticket))
        return timers

    def _miss(self, frame: _Frame) -> None:
        frame.fail(DeadlineError("no answer was ready at the deadline"))

    def _give_up(self, ticket: Ticket) -> None:
        """Refuse a frame that waited as long as it may, unless it is with the policy by now."""
        if ticket.number in self._frames:
            self._line.withdraw(ticket.number)
            self._fail(ticket, self._refusal(Admission.FULL, time.monotonic()))

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        frame = self._frames.pop(ticket.number, None)
        if frame is not None:
            frame.fail(error)

    def _fail_all(self, error: Exception) -> None:
        self._fail_waiting(error)
        for batch in self._batches.values():
            for frame in batch.frames:
                frame.fail(error)

    def _fail_waiting(self, error: Exception) -> None:
        for frame in self._frames.values():
            self._line.withdraw(frame.ticket.number)
            frame.fail(error)
        self._frames.clear()

    def _pump(self) -> None:
        """Start the batches that the line wants started, or look again when it says."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        now_s = time.monotonic()
        while True:
            decision = self._line.decide(now_s)
            for ticket in decision.expired:
                self._fail(ticket, DeadlineError("waited too long; nothing was computed"))
            if not decision.batch:
                break
            self._start_batch(decision.batch, now_s)
        if decision.wake_s is not None:
            self._held_since_s = self._held_since_s or now_s
            self._wake = self._loop.call_later(decision.wake_s, self._pump)

    def _start_batch(self, line: tuple[Ticket, ...], now_s: float) -> None:
        self._metrics.company_seconds.observe(now_s - (self._held_since_s or now_s))
        self._held_since_s = None
        number = line[0].number
        frames = tuple(self._frames.pop(ticket.number) for ticket in line)
        timer = None
        if not self._worker.watches_itself:
            timer = self._loop.call_later(self._settings.hang_after_s, self._hang, number)
        self._batches[number] = _Batch(frames, line, timer)
        requests = [replace(one.request, memory=one.session.memory) for one in frames]
        self._worker.submit(number, requests)

    def _note(self, attempts: Attempts) -> None:
        """Draw the lessons of a batch: metrics, batch size, readiness."""
        size = len(attempts.answers)
        self._metrics.batch_size.observe(size)
        self._metrics.batch_seconds.observe(attempts.service_s)
        self._metrics.count_batch(attempts.replica, attempts.service_s)
        if self._settings.log_batches and not attempts.failures:
            logger.info("a batch of %d took %.3f ms", size, attempts.service_s * 1000)
        if attempts.failures:
            for failure in attempts.failures:
                self._metrics.policy_failures.labels(failure.value).inc()
            if Failure.DEVICE in attempts.failures:
                self._limit.gave_up(size)
        else:
            self._limit.succeeded()
        if self._limit.size != self._line.max_batch:
            logger.warning("batches now have at most %d frames", self._limit.size)
            self._line.max_batch = self._limit.size
            self._metrics.max_batch.set(self._limit.size)
        if attempts.failures or self._num_failed_batches:
            self._judge(attempts)

    def _judge(self, attempts: Attempts) -> None:
        broke = Failure.RAISED in attempts.failures or Failure.DEVICE in attempts.failures
        if broke and all(isinstance(one, Exception) for one in attempts.answers):
            self._num_failed_batches += 1
            if self._num_failed_batches >= self._settings.unready_after_failures:
                self._readiness.enter(ServerPhase.FAILING, f"{self._num_failed_batches} in a row")
        elif self._num_failed_batches:
            self._num_failed_batches = 0
            self._readiness.enter(ServerPhase.READY)

    def _hang(self, number: int) -> None:
        """Leave a policy behind that does not come back."""
        batch = self._batches[number]
        detail = f"a batch of {len(batch.frames)} took over {self._settings.hang_after_s:g} s"
        logger.error("the policy hangs: %s", detail)
        self._metrics.policy_failures.labels("hang").inc()
        self._readiness.enter(ServerPhase.STUCK, detail)
        self._fail_all(NotReadyError(f"the policy hangs: {detail}"))
        del self._batches[number]
        if self._settings.on_hang is OnHang.EXIT:
            self.on_fatal(ServerPhase.STUCK)
            return
        self._line.finish(time.monotonic(), None, batch.line)
        self.policy = None
        self._readiness.enter(ServerPhase.LOADING, "again, because it did not come back")
        self.start()


def _line_rules(settings: Settings) -> LineRules:
    return LineRules(
        max_batch=settings.max_batch,
        max_wait_s=settings.max_wait_ms / 1000,
        max_waiting=settings.max_waiting,
        newcomer_batches=settings.newcomer_batches,
        patience_s=settings.patience_ms / 1000,
    )
