"""A policy, played round by round, so that a long answer blocks nobody; and its thread.

Called wherever the policy lives, on the one thread that may touch it. A bad frame, or too little
memory, does not spoil a round for the others.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread

from deft_policies.base import ActAnswer, ActRequest, Policy, Running, SteppedPolicy
from deft_policies.errors import DeviceError, PolicyError, RequestError
from deft_server.errors import PolicyFailedError
from deft_server.hosting.host import HostedPolicy, Listener, LoadPolicy, load_and_warm
from deft_server.serving.queue import ActBatch, Answer, Failure
from deft_server.settings import SettingsError

logger = logging.getLogger(__name__)


class PolicyThread:
    """Owns a policy. One that hangs can only be left behind."""

    def __init__(self, load: LoadPolicy, listener: Listener) -> None:
        self._load = load
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.last_round_s = 0.0
        self._joining: SimpleQueue[ActBatch | None] = SimpleQueue()
        # A daemon, because a policy that hangs can only be left behind, never stopped.
        self._thread = Thread(target=self._run, name="policy", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def submit(self, batch: ActBatch) -> None:
        """Have a batch join before the next round; the listener hears of its answers."""
        self._joining.put(batch)

    def stop(self, timeout_s: float) -> bool:
        """End after the round in hand; a thread that does not is left behind."""
        self._joining.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            policy = load_and_warm(self._load)
        except (PolicyError, SettingsError) as error:
            self._report(partial(self._listener.policy_broken, self, error))
            return
        except (Exception, SystemExit) as error:
            logger.exception("the policy could not be loaded")
            self._report(partial(self._listener.policy_broken, self, error))
            return
        self._report(partial(self._listener.policy_loaded, self, HostedPolicy.of(policy)))
        self._serve(policy)

    def _serve(self, policy: Policy) -> None:
        rounds = Rounds(policy)
        while True:
            joining = [] if rounds.num_running else [self._joining.get()]
            while not self._joining.empty():
                joining.append(self._joining.get())
            if None in joining:
                return
            ended = rounds.play([one for one in joining if one is not None])
            self.last_round_s = time.monotonic()
            if ended:
                self._report(partial(self._listener.round_played, self, ended))

    def _report(self, tell: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:
            logger.debug("the event loop has ended; nobody is left to tell")


class Rounds:
    """Batches join and leave a policy between its rounds.

    One that cannot be stepped answers all that has joined in one round.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._stepped = policy if isinstance(policy, SteppedPolicy) else None
        self._running: dict[Running, ActBatch] = {}  # of one frame each

    @property
    def num_running(self) -> int:
        """How many answers are on their way."""
        return len(self._running)

    def play(self, joining: Sequence[ActBatch]) -> list[ActBatch]:
        """Let batches join, play a round, and return what has ended: answered, or cut."""
        now_s = time.perf_counter()
        for batch in joining:
            batch.joined_s = now_s
        if self._stepped is not None:
            ended = self._step(self._stepped, joining)
        else:
            ended = list(joining)
            for batch in joining:
                batch.size = len(batch.requests)
                batch.answers, batch.failures = answer_batch(self._policy, batch.requests)
        now_s = time.perf_counter()
        for batch in ended:
            batch.service_s = now_s - batch.joined_s
        return ended

    def _step(self, policy: SteppedPolicy, joining: Sequence[ActBatch]) -> list[ActBatch]:
        touched, running = list(joining), self._running
        try:
            if joining:
                started = policy.start([batch.requests[0] for batch in joining])
                running.update(zip(started, joining, strict=True))
            touched = list(running.values())
            cut = self._cut(policy)
            for batch in running.values():
                batch.size = max(batch.size, len(running))
            if running:
                policy.step()
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is, callers are told
            for one in [one for one, batch in running.items() if batch in touched]:
                del running[one]
            return self._alone(touched, error)
        ended = [(one, running.pop(one)) for one in list(running) if one.has_ended]
        for one, batch in ended:
            _fill_in(batch, one)
        return [*cut, *(batch for _, batch in ended)]

    def _cut(self, policy: SteppedPolicy) -> list[ActBatch]:
        """Let go of what nobody waits for any more; it has no answers."""
        now_s = time.monotonic()
        over = [one for one, batch in self._running.items() if batch.is_over(now_s)]
        for one in over:
            policy.cancel(one)
        return [self._running.pop(one) for one in over]

    def _alone(self, batches: Sequence[ActBatch], error: BaseException) -> list[ActBatch]:
        """Answer each once more without the others, so that only the culprit fails."""
        told, failure = failure_of(error, len(batches))
        for batch in batches:
            batch.answers, batch.failures = [told], [failure]
            if len(batches) > 1 and not batch.is_over(time.monotonic()):
                batch.answers, again = answer_batch(self._policy, batch.requests)
                batch.failures += again
        return list(batches)


def _fill_in(batch: ActBatch, ended: Running) -> None:
    if ended.answer is not None:
        batch.answers = [ended.answer]
    elif ended.error is not None:
        error, failure = failure_of(ended.error, 1)
        batch.answers, batch.failures = [error], [failure]


def answer_batch(policy: Policy, batch: Sequence[ActRequest]) -> tuple[list[Answer], list[Failure]]:
    """Answer a batch, or as much of it as the policy can, and tell what went wrong on the way.

    Where the device gives up (out of memory), each half of the batch is tried once more. Where the
    policy raises, every frame of several is tried once more alone, so that only the culprit fails.
    """
    failures: list[Failure] = []
    answers = _call(policy, batch, failures)
    if failures == [Failure.DEVICE]:
        middle = (len(batch) + 1) // 2
        answers = _call(policy, batch[:middle], failures)
        if batch[middle:]:
            answers += _call(policy, batch[middle:], failures)
    elif failures and len(batch) > 1:
        answers = [_call(policy, [one], failures)[0] for one in batch]
    return answers, failures


def _call(policy: Policy, batch: Sequence[ActRequest], failures: list[Failure]) -> list[Answer]:
    """Return the policy's answers, or its failure once for every frame."""
    try:
        answers = policy.act(batch)
        strange = [type(one).__name__ for one in answers if not isinstance(one, ActAnswer)]
        if len(answers) == len(batch) and not strange:
            return list(answers)
        error: Exception = PolicyFailedError(
            f"the policy answered with {strange[0]}; ActAnswer was expected"
            if strange
            else f"{len(answers)} answers to {len(batch)} frames"
        )
        failures.append(Failure.RAISED)
    except (Exception, SystemExit) as raised:  # noqa: BLE001  whatever it is, callers are told
        error, failure = failure_of(raised, len(batch))
        failures.append(failure)
    return [error] * len(batch)


def failure_of(error: BaseException, size: int) -> tuple[Exception, Failure]:
    """Return what callers are told where the policy raised on so many frames, and of what kind."""
    if isinstance(error, RequestError):
        return error, Failure.REQUEST
    if isinstance(error, DeviceError):
        logger.warning("the device gave up on a batch of %d: %s", size, error)
        return error, Failure.DEVICE
    logger.error("the policy raised on a batch of %d", size, exc_info=error)
    told = PolicyFailedError(f"the policy raised {type(error).__name__}")
    told.__cause__ = error
    return told, Failure.RAISED
