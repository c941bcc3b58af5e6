"""Frames in, frames to the policy, answers out. Lives on the event loop and never computes.

What goes when is decided by `queue`; `_start_frames` is the step that everything comes back to.
"""

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from operator import itemgetter
from typing import Literal

from deft_client.types import ActionChunk
from deft_policies.base import ActAnswer
from deft_server.errors import DeadlineError, NotReadyError, SupersededFrameError
from deft_server.serving.hosting import HostedPolicy, NewHost, PolicyHost
from deft_server.serving.metrics import Metrics
from deft_server.serving.queue import Answer, Failure, FrameQueue, QueuedFrame, QueueRules
from deft_server.settings import Settings, SettingsError

STOP_TIMEOUT_S = 5.0
STEADY_S = 60.0  # a policy that was ready for so long has lasted
LONGEST_PAUSE_S = 30.0  # before a policy that hung is loaded again
GOOD_ROUNDS_BEFORE_GROWTH = 100

logger = logging.getLogger(__name__)


class ServerPhase(Enum):
    """Where the server is in its life."""

    LOADING = "loading"
    READY = "ready"
    FAILING = "failing"  # all recent batches failed or answers were unsafe; frames are still tried
    STUCK = "stuck"  # the policy does not come back
    BROKEN = "broken"  # the policy could not be loaded
    DRAINING = "draining"  # stopping: frames in hand are finished, new ones refused


# What, a few times in a row, makes a server not ready; frames are still tried.
Trouble = Literal["batches failed", "answers were unsafe"]


_SENTENCES = {
    ServerPhase.LOADING: "the policy is loading",
    ServerPhase.READY: "ready",
    ServerPhase.FAILING: "the policy fails",
    ServerPhase.STUCK: "the policy hangs",
    ServerPhase.BROKEN: "the policy could not be loaded",
    ServerPhase.DRAINING: "the server is stopping",
}
_TAKES_FRAMES = (ServerPhase.READY, ServerPhase.FAILING)


class Readiness:
    """The phase the server is in. Draining is final."""

    def __init__(self, unready_after: int) -> None:
        """`unready_after` is how often in a row one kind of trouble is borne."""
        self._unready_after = unready_after
        self._phase = ServerPhase.LOADING
        self._detail = ""
        self._in_a_row: Counter[Trouble] = Counter()

    @property
    def phase(self) -> ServerPhase:
        """Where the server is in its life."""
        return self._phase

    @property
    def sentence(self) -> str:
        """The phase in words, with what is known about its cause."""
        return f"{_SENTENCES[self._phase]}{self._detail and ': '}{self._detail}"

    def enter(self, phase: ServerPhase, detail: str = "") -> None:
        """Go to another phase, unless the server is stopping already."""
        if self._phase is not ServerPhase.DRAINING:
            self._phase, self._detail = phase, detail
            self._in_a_row.clear()

    def note(self, trouble: Trouble, is_over: bool) -> None:
        """Count what went wrong, or start to count anew because it went well."""
        if is_over and trouble not in self._in_a_row:
            return
        if is_over:
            del self._in_a_row[trouble]
        else:
            self._in_a_row[trouble] += 1
        if self._phase in _TAKES_FRAMES:
            worst, count = max(self._in_a_row.items(), key=itemgetter(1), default=(trouble, 0))
            is_failing = count >= self._unready_after
            self._phase = ServerPhase.FAILING if is_failing else ServerPhase.READY
            self._detail = f"{count} {worst} in a row" if is_failing else ""

    def require(self) -> None:
        """Raise `NotReadyError` where no frame can be taken."""
        if self._phase not in _TAKES_FRAMES:
            raise NotReadyError(self.sentence)

    def require_health(self) -> None:
        """Raise `NotReadyError` where a frame would hardly be answered: for load balancers."""
        if self._phase is not ServerPhase.READY:
            raise NotReadyError(self.sentence)


class Scheduler:
    """The frames that wait, and those that are with the policy.

    `on_loaded` is called with every policy that is loaded, and may refuse it with `SettingsError`;
    `on_ready` is called when frames are taken, `on_fatal` when only a new server can help.
    """

    def __init__(
        self, new_host: NewHost, settings: Settings, readiness: Readiness, metrics: Metrics
    ) -> None:
        self.policy: HostedPolicy | None = None
        rules = QueueRules(settings.max_batch, settings.max_waiting, settings.patience_ms / 1000)
        self.queue = FrameQueue(rules)
        self.on_loaded: Callable[[HostedPolicy], None] = lambda _: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_fatal: Callable[[ServerPhase], None] = lambda _: None
        self._new_host = new_host
        self._settings = settings
        self._readiness = readiness
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._num_good_rounds = 0
        self._num_losses = 0
        self._loaded_s: float | None = None  # when the policy now in use, or the last, was ready
        self._settled = asyncio.Event()
        self._host: PolicyHost
        self._restart: asyncio.TimerHandle | None = None
        self._hang_timer: asyncio.TimerHandle | None = None
        metrics.waiting.set_function(lambda: len(self.queue))
        metrics.in_flight.set_function(lambda: len(self.queue.in_flight))
        metrics.max_batch.set(settings.max_batch)
        metrics.replicas.set_function(lambda: self.queue.num_replicas if self.policy else 0)

    @property
    def num_waiting(self) -> int:
        """How many frames wait for a batch."""
        return len(self.queue)

    @property
    def num_batches_waiting(self) -> float:
        """How many batches could be made of the frames that wait."""
        return len(self.queue) / self.queue.max_batch

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

    async def answer(self, frame: QueuedFrame) -> ActionChunk:
        """Wait for the answer to a frame; cancelling gives up its place.

        The session's memory is handed in when the frame goes to the policy, not before: a frame
        ahead of it may change it.
        """
        frame.answer = self._loop.create_future()
        now_s = time.monotonic()
        superseded = self.queue.offer(frame, now_s)
        if superseded is not None:
            superseded.fail(SupersededFrameError("the session sent a newer frame"))
        timers = []
        if frame.deadline_s < math.inf:
            timers.append(self._loop.call_later(frame.deadline_s - now_s, self._miss, frame))
        if frame.stays_until_s is not None:
            timers.append(self._loop.call_later(frame.stays_until_s - now_s, self._give_up, frame))
        self._loop.call_soon(self._start_frames)  # what comes in this turn goes along
        try:
            return await frame.answer
        finally:
            for timer in timers:
                timer.cancel()
            self.queue.remove(frame)

    def forget(self, flow: str) -> None:
        """Refuse the frame that a session has waiting, because the session was reset."""
        frame = self.queue.forget(flow)
        if frame is not None:
            frame.fail(SupersededFrameError("the session was reset while this waited"))

    async def close(self) -> None:
        """Refuse what still waits and end the policy thread, unless it hangs."""
        is_idle = not self.queue.in_flight
        self._fail_all(NotReadyError("the server is stopping"))
        for timer in (self._hang_timer, self._restart):
            if timer is not None:
                timer.cancel()
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
        self.queue.num_replicas, self.queue.is_stepped = num_replicas, policy.is_stepped
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
        self._start_frames()

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

    def round_played(
        self, host: PolicyHost, ended: Sequence[QueuedFrame], failures: Sequence[Failure]
    ) -> None:
        """Hand out the answers that are ready, and let waiting frames have their places."""
        if host is not self._host:
            return
        now_s = time.monotonic()
        for frame in ended:
            # One that was cut has told, too, how long it takes: longer than it had.
            is_measure = not failures and (frame.outcome or frame.deadline_s <= now_s)
            self.queue.finish(frame, now_s, frame.service_s if is_measure else None)
            if frame.outcome is not None:
                frame.queue_s = max(0.0, now_s - frame.service_s - frame.arrived_s)
                self._hand_out(frame, frame.outcome)
        if any(one.outcome is not None for one in ended):
            self._note(ended, failures)
        self._watch()
        self._start_frames()

    def _hand_out(self, frame: QueuedFrame, outcome: Answer) -> None:
        if isinstance(outcome, Exception):
            frame.fail(outcome)
        else:
            frame.take(outcome)
        self._loop.call_soon(self._metrics.count_frame, frame)

    def _start_frames(self) -> None:
        """Start what is to go now, and refuse what came too late for it."""
        while True:
            chosen, expired = self.queue.next_batch(time.monotonic())
            for frame in expired:
                frame.fail(DeadlineError("waited too long; nothing was computed"))
            if not chosen:
                return
            for frame in chosen:
                frame.ask()
            self._host.submit(chosen)
            if self._hang_timer is None:
                self._watch()

    def _watch(self) -> None:
        """Have every round end in time."""
        if self._hang_timer is not None:
            self._hang_timer.cancel()
            self._hang_timer = None
        if self.queue.in_flight and self._host.last_round_s is not None:
            after_s = self._settings.hang_after_s
            self._hang_timer = self._loop.call_later(after_s, self._hang)

    def _miss(self, frame: QueuedFrame) -> None:
        frame.fail(DeadlineError("no answer was ready at the deadline"))

    def _give_up(self, frame: QueuedFrame) -> None:
        """Refuse a frame that waited as long as it may, unless it is with the policy by now."""
        if self.queue.remove(frame):
            frame.fail(self.queue.refusal(time.monotonic()))

    def _fail_all(self, error: Exception) -> None:
        self._fail_waiting(error)
        for frame in self.queue.in_flight:
            frame.fail(error)

    def _fail_waiting(self, error: Exception) -> None:
        for frame in self.queue.frames:
            self.queue.remove(frame)
            frame.fail(error)

    def _note(self, ended: Sequence[QueuedFrame], failures: Sequence[Failure]) -> None:
        """Draw the lessons of a round: failures, batch size, readiness."""
        for failure in failures:
            self._metrics.policy_failures.labels(failure.value).inc()
        if not failures and self._settings.log_batches:
            for frame in ended:
                logger.info("a batch of %d took %.3f ms", frame.size, frame.service_s * 1000)
        if Failure.DEVICE in failures:
            self._num_good_rounds = 0
            size = max(len(ended), *(one.size for one in ended))
            self._limit_batches(max(1, min(self.queue.max_batch, size) // 2))
        elif not failures:
            self._num_good_rounds += 1
            most, allowed = self._settings.max_batch, self.queue.max_batch
            if allowed < most and self._num_good_rounds >= GOOD_ROUNDS_BEFORE_GROWTH:
                self._num_good_rounds = 0
                self._limit_batches(allowed + 1)
        broke = {Failure.RAISED, Failure.DEVICE}.intersection(failures)
        has_failed = bool(broke) and not any(isinstance(one.outcome, ActAnswer) for one in ended)
        self._readiness.note("batches failed", is_over=not has_failed)

    def _limit_batches(self, size: int) -> None:
        """Have batches smaller after the device gave up, larger again after many good ones."""
        if size != self.queue.max_batch:
            logger.warning("batches now have at most %d frames", size)
            self.queue.max_batch = size
            self._metrics.max_batch.set(size)

    def _hang(self) -> None:
        """Leave a policy behind that does not come back, unless it has played a round lately."""
        assert self._host.last_round_s is not None
        left_s = self._host.last_round_s + self._settings.hang_after_s - time.monotonic()
        if left_s > 0:
            self._hang_timer = self._loop.call_later(left_s, self._hang)
            return
        size, after_s = len(self.queue.in_flight), self._settings.hang_after_s
        detail = f"a batch of {size} took over {after_s:g} s"
        logger.error("the policy hangs: %s", detail)
        self._metrics.policy_failures.labels("hang").inc()
        if self._settings.on_hang == "reload":
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
        self._fail_all(NotReadyError(f"the policy is lost: {reason}", max(1.0, pause_s)))
        for frame in list(self.queue.in_flight):
            self.queue.finish(frame, now_s)
        self._watch()
        if self._readiness.phase is not ServerPhase.DRAINING:
            self._restart = self._loop.call_later(pause_s, self.start)
