"""Frames in, frames to the policy, answers out. Lives on the event loop and never computes.

`queue` decides which frames go; `_dispatch` runs after every arrival, and whenever the policy's
thread reports frames that ended.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from deft_core.types import ActionChunk
from deft_policies.base import PolicyAnswer
from deft_server.errors import DeadlineError, NotReadyError, SupersededFrameError
from deft_server.serving.frame import FailedCall, Outcome, QueuedFrame
from deft_server.serving.hang_watch import HangWatch
from deft_server.serving.hosting import HostedPolicy, NewHost, PolicyHost
from deft_server.serving.lifecycle import Readiness, Reloads, ServerPhase
from deft_server.serving.metrics import Metrics
from deft_server.serving.queue import FrameQueue
from deft_server.settings import Settings

STOP_TIMEOUT_S = 5.0
LOG_PROGRESS_EVERY_S = 5.0  # while the policy loads

logger = logging.getLogger(__name__)


class Scheduler:
    """The frames that wait, and those that are with the policy.

    `on_loaded` is called with every policy that is loaded, `on_ready` when frames are taken,
    `on_fatal` when only a new server can help.
    """

    def __init__(
        self, new_host: NewHost, settings: Settings, readiness: Readiness, metrics: Metrics
    ) -> None:
        self.policy: HostedPolicy | None = None
        patience_s = settings.patience_ms / 1000
        self.queue = FrameQueue(settings.max_batch, settings.max_waiting, patience_s)
        self._admission = self.queue.admission
        self.on_loaded: Callable[[HostedPolicy], None] = lambda _: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_fatal: Callable[[ServerPhase], None] = lambda _: None
        self._answers: dict[QueuedFrame, asyncio.Future[ActionChunk]] = {}  # that callers wait for
        self._new_host = new_host
        self._settings = settings
        self._readiness = readiness
        self._metrics = metrics
        self._reloads = Reloads()
        self._hang_watch = HangWatch(settings.hang_after_s, self._handle_hang)
        self._settled = asyncio.Event()
        self._host: PolicyHost
        self._restart: asyncio.TimerHandle | None = None
        self._progress_log: asyncio.TimerHandle | None = None
        metrics.waiting.set_function(lambda: len(self.queue))
        metrics.in_flight.set_function(lambda: len(self._admission.in_flight))
        metrics.max_batch.set_function(lambda: self._admission.max_batch)
        metrics.replicas.set_function(lambda: self._admission.num_replicas if self.policy else 0)

    @property
    def num_waiting(self) -> int:
        """How many frames wait for a batch."""
        return len(self.queue)

    @property
    def num_batches_waiting(self) -> float:
        """How many batches could be made of the frames that wait."""
        return len(self.queue) / self._admission.max_batch

    def start(self) -> None:
        """Begin to load the policy; call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._settled.clear()
        self._host = host = self._new_host(self)
        self._readiness.progress = lambda: host.progress
        self._host.start()
        if self._progress_log is not None:
            self._progress_log.cancel()
        self._log_progress(time.monotonic())

    def _log_progress(self, began_s: float) -> None:
        """Log every few seconds what the load is doing."""
        if self._readiness.phase is not ServerPhase.LOADING:
            return
        spent_s = time.monotonic() - began_s
        if spent_s >= LOG_PROGRESS_EVERY_S:
            logger.info("%s (%.0f s so far)", self._readiness.sentence, spent_s)
        self._progress_log = self._loop.call_later(
            LOG_PROGRESS_EVERY_S, self._log_progress, began_s
        )

    async def settled(self) -> None:
        """Wait until the policy is loaded, or is known not to load."""
        await self._settled.wait()

    async def submit(self, frame: QueuedFrame) -> ActionChunk:
        """Queue a frame and wait for its answer; cancelling takes it out of the queue."""
        now_s = frame.queued_s = time.monotonic()
        superseded = self.queue.enqueue(frame, now_s)
        if superseded is not None:
            self._deliver(superseded, SupersededFrameError("the session sent a newer frame"))
        timers = []
        if frame.has_deadline:
            timers.append(self._call_at(frame.deadline_s, self._expire, frame))
        if frame.overfills_until_s is not None:
            timers.append(self._call_at(frame.overfills_until_s, self._refuse_overfilling, frame))
        self._loop.call_soon(self._dispatch)  # what comes in this turn goes along
        answer: asyncio.Future[ActionChunk] = self._loop.create_future()
        self._answers[frame] = answer
        try:
            return await answer
        finally:
            # After an answer the rest changes nothing.
            del self._answers[frame]
            frame.is_cancelled = True
            if not self.queue.remove(frame):
                self._host.cancel(frame)
            for timer in timers:
                timer.cancel()

    def forget(self, flow: str) -> None:
        """Refuse the frame that a session has waiting, because the session was reset."""
        frame = self.queue.remove_session(flow)
        if frame is not None:
            error = SupersededFrameError("the session was reset while this waited")
            self._deliver(frame, error)

    async def close(self) -> None:
        """Refuse the waiting frames and end the policy thread, unless it hangs."""
        is_idle = not self._admission.in_flight
        self._fail_all(NotReadyError("the server is stopping"))
        self._hang_watch.stop()
        for timer in (self._restart, self._progress_log):
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
        if is_new:
            self.on_loaded(policy)
        self._admission.num_replicas = num_replicas
        self._admission.joins_midway = policy.joins_midway
        if not num_replicas:
            self._readiness.enter(ServerPhase.LOADING, "no replica is running")
            self._fail_waiting(NotReadyError("no replica is running"))
            return
        self.policy = policy
        self._readiness.enter(ServerPhase.READY)
        self._settled.set()
        if is_new:
            self._reloads.loaded(time.monotonic())
            logger.info("ready: policy %s", policy.info.policy)
            self.on_ready()
        self._dispatch()

    def policy_broken(self, host: PolicyHost, error: BaseException) -> None:
        """There is no policy to serve: load again if one was loaded before, else stop."""
        if host is not self._host:
            return
        if self._reloads.has_loaded:  # it could be loaded before, so it may be again
            self._reload(f"it could not be loaded: {error}")
            return
        self._readiness.enter(ServerPhase.BROKEN, str(error))
        self._settled.set()
        self.on_fatal(ServerPhase.BROKEN)

    def round_ended(
        self, host: PolicyHost, ended: Sequence[QueuedFrame], failures: Sequence[FailedCall]
    ) -> None:
        """Deliver the answers that are ready, and start waiting frames in their places."""
        if host is not self._host:
            return
        now_s = time.monotonic()
        for frame in ended:
            # One that was cut shows, too, how long it takes: longer than it had.
            is_measure = (
                not failures
                and frame.num_tries == 1
                and (frame.outcome or frame.deadline_s <= now_s)
            )
            self._admission.finish(frame, now_s, frame.service_s if is_measure else None)
            if frame.outcome is not None:
                frame.queue_s = max(0.0, now_s - frame.service_s - frame.queued_s)
                self._deliver(frame, frame.outcome)
                self._loop.call_soon(self._metrics.count_frame, frame)
        if failures or any(one.outcome is not None for one in ended):
            self._record_round(ended, failures)
        self._watch_for_hang()
        self._dispatch()

    def _dispatch(self) -> None:
        """Start the frames that go now, and refuse those that would be late."""
        while True:
            chosen, expired = self.queue.next_batch(time.monotonic())
            for frame in expired:
                self._deliver(frame, DeadlineError("waited too long; nothing was computed"))
            if not chosen:
                return
            self._host.submit(chosen)
            if not self._hang_watch.is_on:
                self._watch_for_hang()

    def _deliver(self, frame: QueuedFrame, outcome: Outcome) -> None:
        """Resolve the caller's future; drop the outcome if the caller has left."""
        answer = self._answers.get(frame)
        if answer is None or answer.done():
            return
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
            return
        frame.session.memory = outcome.memory
        if outcome.error is None:
            answer.set_result(outcome.chunk)
        else:
            answer.set_exception(outcome.error)

    def _call_at(
        self, at_s: float, work: Callable[[QueuedFrame], None], frame: QueuedFrame
    ) -> asyncio.TimerHandle:
        return self._loop.call_later(at_s - time.monotonic(), work, frame)

    def _expire(self, frame: QueuedFrame) -> None:
        self._deliver(frame, DeadlineError("no answer was ready at the deadline"))

    def _refuse_overfilling(self, frame: QueuedFrame) -> None:
        """Refuse a frame that overfilled the queue for as long as it may, if it still waits."""
        if self.queue.remove(frame):
            self._deliver(frame, self.queue.refusal(time.monotonic()))

    def _fail_all(self, error: Exception) -> None:
        self._fail_waiting(error)
        for frame in self._admission.in_flight:
            self._deliver(frame, error)

    def _fail_waiting(self, error: Exception) -> None:
        for frame in self.queue.waiting:
            self.queue.remove(frame)
            self._deliver(frame, error)

    def _record_round(self, ended: Sequence[QueuedFrame], failures: Sequence[FailedCall]) -> None:
        """Count failures, adapt the batch size and the readiness."""
        for call in failures:
            self._metrics.policy_failures.labels(call.kind).inc()
        if not failures and self._settings.log_batches:
            for frame in ended:
                logger.info("a batch of %d took %.3f ms", frame.batch_size, frame.service_s * 1000)
        before = self._admission.max_batch
        self._admission.limit_batches(failures)
        if self._admission.max_batch != before:
            logger.warning("batches now have at most %d frames", self._admission.max_batch)
        has_answered = any(isinstance(one.outcome, PolicyAnswer) for one in ended)
        # A batch counts once, however many of its frames fail again.
        has_failed = any(one.kind in ("raised", "device") and not one.is_retry for one in failures)
        if has_answered or has_failed:
            self._readiness.note("batches failed", is_over=has_answered)

    def _watch_for_hang(self) -> None:
        """Watch the round that runs now, if any."""
        if self._admission.in_flight:
            self._hang_watch.restart(self._host)
        else:
            self._hang_watch.stop()

    def _handle_hang(self) -> None:
        """Abandon a policy that does not return: load it again or stop, as `on_hang` says."""
        size, after_s = len(self._admission.in_flight), self._settings.hang_after_s
        detail = f"a batch of {size} took over {after_s:g} s"
        logger.error("the policy hangs: %s", detail)
        self._metrics.policy_failures.labels("hang").inc()
        if self._settings.on_hang == "reload":
            self._loop.run_in_executor(None, self._host.stop, 0.0)
            self._reload("it did not come back")
            return
        self._readiness.enter(ServerPhase.STUCK, detail)
        self._fail_all(NotReadyError(f"the policy hangs: {detail}"))
        self.on_fatal(ServerPhase.STUCK)

    def _reload(self, reason: str) -> None:
        """Refuse all frames and load the policy again."""
        now_s = time.monotonic()
        pause_s = self._reloads.pause_s(now_s)
        self.policy = None
        self._readiness.enter(ServerPhase.LOADING, f"again, because {reason}")
        self._fail_all(NotReadyError(f"the policy is lost: {reason}", max(1.0, pause_s)))
        for frame in list(self._admission.in_flight):
            self._admission.finish(frame, now_s)
        self._hang_watch.stop()
        if self._readiness.phase is not ServerPhase.DRAINING:
            self._restart = self._loop.call_later(pause_s, self.start)
