"""Carries out what the waiting line decides: frames in, batches to the policy's host, answers out.

Lives on the event loop and never computes. All rules are in `waiting_line`.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable

from deft_policies.base import ActRequest
from deft_policies.errors import PolicyError
from deft_server.errors import (
    DeadlineError,
    NotReadyError,
    OverloadedError,
    RefusedFrameError,
    SupersededFrameError,
)
from deft_server.hosting.attempts import Attempts, Failure
from deft_server.hosting.host import HostedPolicy, NewHost, PolicyHost
from deft_server.serving.estimates import BatchLimit
from deft_server.serving.metrics import Metrics
from deft_server.serving.pending import Answered, PendingBatch, PendingFrame
from deft_server.serving.readiness import Readiness, ServerPhase, Trouble
from deft_server.serving.sessions import RobotSession
from deft_server.serving.waiting_frames import Ticket
from deft_server.serving.waiting_line import Admission, LineRules, WaitingLine
from deft_server.settings import OnHang, Settings, SettingsError

STOP_TIMEOUT_S = 5.0
STEADY_S = 60.0  # a policy that was ready for so long has lasted
LONGEST_PAUSE_S = 30.0  # before a lost policy is loaded again
MAX_LOSSES_BEFORE_READY = 3

logger = logging.getLogger(__name__)


class Scheduler:
    """The frames that wait, and the batches that are with the policy.

    `on_loaded` is called with every policy that is loaded, and may refuse it with `SettingsError`;
    `on_ready` is called when frames are taken, `on_fatal` when only a new server can help.
    """

    def __init__(
        self, new_host: NewHost, settings: Settings, readiness: Readiness, metrics: Metrics
    ) -> None:
        self.policy: HostedPolicy | None = None
        self.on_loaded: Callable[[HostedPolicy], None] = lambda _: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_fatal: Callable[[ServerPhase], None] = lambda _: None
        self._new_host = new_host
        self._settings = settings
        self._readiness = readiness
        self._metrics = metrics
        self._line = WaitingLine(_line_rules(settings))
        self._limit = BatchLimit(settings.max_batch)
        self._frames: dict[int, PendingFrame] = {}
        self._batches: dict[int, PendingBatch] = {}
        self._numbers = itertools.count(1)
        self._num_losses = 0
        self._loaded_s: float | None = None  # when the policy now in use, or the last, was ready
        self._held_since_s: float | None = None  # when a batch first waited for company
        self._settled = asyncio.Event()
        self._host: PolicyHost
        self._wake: asyncio.TimerHandle | None = None
        self._restart: asyncio.TimerHandle | None = None
        metrics.waiting.set_function(lambda: len(self._line))
        metrics.in_flight.set_function(lambda: len(self._line.in_flight))
        metrics.max_batch.set(settings.max_batch)
        metrics.replicas.set_function(lambda: self._line.num_replicas if self.policy else 0)

    @property
    def answers_at_once(self) -> bool:
        """Whether the policy takes no time: then nothing ever waits."""
        return self.policy is not None and self.policy.answer_here is not None

    @property
    def num_waiting(self) -> int:
        """How many frames wait for a batch."""
        return len(self._line)

    def start(self) -> None:
        """Begin to load the policy; call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._settled.clear()
        self._host = self._new_host(self)
        self._host.start()

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
        """Refuse what still waits and end the policy thread, unless it hangs."""
        self._fail_all(NotReadyError("the server is stopping"))
        for batch in self._batches.values():
            batch.unwatch()
        for timer in (self._wake, self._restart):
            if timer is not None:
                timer.cancel()
        is_idle = not self._line.in_flight
        patience_s = STOP_TIMEOUT_S if is_idle else 0.0
        if not await asyncio.to_thread(self._host.stop, patience_s):
            logger.warning("the policy is left behind: it is still busy")

    def policy_loaded(self, host: PolicyHost, policy: HostedPolicy, num_replicas: int = 1) -> None:
        """Start to take frames, or go on with more or fewer replicas."""
        if host is not self._host:
            return
        is_new = self.policy is not policy
        try:
            if is_new:
                self.on_loaded(policy)
        except SettingsError as error:
            logger.error("the policy does not fit the settings: %s", error)
            self.policy_broken(host, error)
            return
        self._line.num_replicas = num_replicas
        if not num_replicas:
            self._readiness.enter(ServerPhase.LOADING, "no replica is running")
            self._fail_waiting(NotReadyError("no replica is running"))
            return
        self.policy = policy
        self._readiness.enter(ServerPhase.READY)
        self._settled.set()
        if is_new:
            self._loaded_s = time.monotonic()
            logger.info("ready: policy %s", policy.info.policy)
            self.on_ready()
        self._pump()

    def policy_broken(self, host: PolicyHost, error: BaseException) -> None:
        """Give up: there is nothing to serve."""
        if host is not self._host:
            return
        if self._loaded_s is not None:  # it could be loaded before, so it may be again
            self._load_again(f"it could not be loaded: {error}")
            return
        self._readiness.enter(ServerPhase.BROKEN, str(error))
        self._settled.set()
        self.on_fatal(ServerPhase.BROKEN)

    def policy_lost(self, host: PolicyHost, reason: str) -> None:
        """Load it again, unless it was lost in loading as often as may be by accident."""
        if host is not self._host:
            return
        logger.error("the policy is lost: %s", reason)
        self._metrics.policy_failures.labels("lost").inc()
        if self._loaded_s is None and self._num_losses >= MAX_LOSSES_BEFORE_READY:
            self.policy_broken(host, PolicyError(f"it was lost again and again: {reason}"))
        else:
            self._load_again(reason)

    def batch_finished(self, host: PolicyHost, number: int, attempts: Attempts) -> None:
        """Hand out the answers and start the next batch."""
        if host is not self._host:
            return
        batch = self._batches.pop(number)
        batch.unwatch()
        now_s = time.monotonic()
        self._line.finish(now_s, None if attempts.failures else attempts.service_s, batch.line)
        started_s = now_s - attempts.service_s
        for frame, answer in zip(batch.frames, attempts.answers, strict=True):
            if isinstance(answer, Exception):
                frame.fail(answer)
            else:
                frame.take(answer, started_s, len(batch.frames))
        self._note(attempts)
        # Counted once the answers are on their way, which they are at the end of the next turn.
        count = self._metrics.count_batch
        self._loop.call_soon(self._loop.call_soon, count, attempts, batch.company_s)
        self._pump()

    def _answer_here(self, request: ActRequest, ticket: Ticket, session: RobotSession) -> Answered:
        """Answer on the event loop, where the policy says that this takes no time."""
        assert self.policy is not None
        assert self.policy.answer_here is not None
        if ticket.deadline_s <= time.monotonic():
            raise self._refusal(Admission.TOO_LATE, ticket.deadline_s)
        attempts = self.policy.answer_here((request,))
        self._note(attempts)
        self._loop.call_soon(self._metrics.count_batch, attempts)
        answer = attempts.answers[0]
        if isinstance(answer, Exception):
            raise answer
        session.learn(answer.memory)
        return Answered(answer.chunk, 0.0, 1)

    def _join(self, request: ActRequest, ticket: Ticket, session: RobotSession) -> PendingFrame:
        now_s = time.monotonic()
        offer = self._line.offer(ticket, now_s)
        if offer.admission is not Admission.WAITS:
            raise self._refusal(offer.admission, now_s)
        if offer.superseded is not None:
            self._fail(offer.superseded, SupersededFrameError("the session sent a newer frame"))
        if offer.displaced is not None:
            self._fail(offer.displaced, self._refusal(Admission.FULL, now_s))
        frame = PendingFrame(ticket, request, session, self._loop.create_future(), now_s)
        self._frames[ticket.number] = frame
        return frame

    def _leave(self, frame: PendingFrame) -> None:
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

    def _timers(self, frame: PendingFrame) -> list[asyncio.TimerHandle]:
        """Have a frame fail when its time is over."""
        ticket, now_s = frame.ticket, frame.joined_s
        timers = []
        if ticket.deadline_s < math.inf:
            timers.append(self._loop.call_later(ticket.deadline_s - now_s, self._miss, frame))
        if ticket.stays_until_s is not None:
            left_s = ticket.stays_until_s - now_s
            timers.append(self._loop.call_later(left_s, self._give_up, ticket))
        return timers

    def _miss(self, frame: PendingFrame) -> None:
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
            batch.fail(error)

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
        number = line[0].number
        frames = tuple(self._frames.pop(ticket.number) for ticket in line)
        timer = None
        if not self._host.watches_itself:
            timer = self._loop.call_later(self._settings.hang_after_s, self._hang, number)
        company_s = now_s - (self._held_since_s or now_s)
        self._held_since_s = None
        batch = self._batches[number] = PendingBatch(frames, line, timer, company_s)
        self._host.submit(number, batch.requests)

    def _note(self, attempts: Attempts) -> None:
        """Draw the lessons of a batch: failures, batch size, readiness."""
        size = len(attempts.answers)
        if self._settings.log_batches and not attempts.failures:
            logger.info("a batch of %d took %.3f ms", size, attempts.service_s * 1000)
        has_failed = False
        if attempts.failures:
            for failure in attempts.failures:
                self._metrics.policy_failures.labels(failure.value).inc()
            if Failure.DEVICE in attempts.failures:
                self._limit.gave_up(size)
            broke = {Failure.RAISED, Failure.DEVICE}.intersection(attempts.failures)
            has_failed = bool(broke) and all(isinstance(one, Exception) for one in attempts.answers)
        else:
            self._limit.succeeded()
        if self._limit.size != self._line.max_batch:
            logger.warning("batches now have at most %d frames", self._limit.size)
            self._line.max_batch = self._limit.size
            self._metrics.max_batch.set(self._limit.size)
        self._readiness.note(Trouble.BATCHES, is_over=not has_failed)

    def _hang(self, number: int) -> None:
        """Leave a policy behind that does not come back."""
        size, after_s = len(self._batches[number].frames), self._settings.hang_after_s
        detail = f"a batch of {size} took over {after_s:g} s"
        logger.error("the policy hangs: %s", detail)
        self._metrics.policy_failures.labels("hang").inc()
        if self._settings.on_hang is OnHang.RELOAD or self._host.is_disposable:
            self._loop.run_in_executor(None, self._host.stop, 0.0)
            self._load_again("it did not come back")
            return
        self._readiness.enter(ServerPhase.STUCK, detail)
        self._fail_all(NotReadyError(f"the policy hangs: {detail}"))
        self.on_fatal(ServerPhase.STUCK)

    def _load_again(self, reason: str) -> None:
        """Refuse what is in hand and load another policy: at once, then ever later.

        One that lasted is replaced at once again.
        """
        now_s = time.monotonic()
        if self._loaded_s is not None and now_s - self._loaded_s > STEADY_S:
            self._num_losses = 0
        self._num_losses += 1
        pause_s = min(2.0 ** (self._num_losses - 2), LONGEST_PAUSE_S) if self._num_losses > 1 else 0
        self.policy = None
        self._readiness.enter(ServerPhase.LOADING, f"again, because {reason}")
        retry_after_s = max(1.0, pause_s)
        self._fail_all(NotReadyError(f"the policy is lost: {reason}", retry_after_s))
        for batch in self._batches.values():
            batch.unwatch()
            self._line.finish(now_s, batch=batch.line)
        self._batches.clear()
        if self._readiness.phase is not ServerPhase.DRAINING:
            self._restart = self._loop.call_later(pause_s, self.start)


def _line_rules(settings: Settings) -> LineRules:
    return LineRules(
        max_batch=settings.max_batch,
        max_wait_s=settings.max_wait_ms / 1000,
        max_waiting=settings.max_waiting,
        newcomer_batches=settings.newcomer_batches,
        patience_s=settings.patience_ms / 1000,
    )
