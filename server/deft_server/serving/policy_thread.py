"""The one thread that is allowed to touch the policy: it loads it, warms it, answers batches.

One bad frame, or too little memory, does not spoil a batch. What happens on the thread is reported
on the event loop, to a `Listener`. Knows nothing of queues, sessions or HTTP.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from deft_policies.base import ActAnswer, ActRequest, Policy
from deft_policies.errors import DeviceError, PolicyError, RequestError
from deft_server.errors import PolicyFailedError
from deft_server.settings import SettingsError

logger = logging.getLogger(__name__)

LoadPolicy = Callable[[], Policy]
Answer = ActAnswer | Exception


class Failure(Enum):
    """Why a call of the policy did not answer its batch."""

    RAISED = "raised"
    DEVICE = "device"
    REQUEST = "request"
    LOST = "lost"  # the replica did not come back


@dataclass
class Attempts:
    """The answers of one batch, in order, what went wrong on the way, and the seconds it took.

    `replica` is who answered, where there are several.
    """

    answers: list[Answer]
    failures: list[Failure]
    service_s: float
    replica: str = "0"


def answer_batch(policy: Policy, batch: Sequence[ActRequest]) -> Attempts:
    """Answer a batch, or as much of it as the policy can.

    Where the device gives up (out of memory), each half of the batch is tried once more. Where the
    policy raises, every frame of several is tried once more alone, so that only the culprit fails.
    """
    started_s = time.perf_counter()
    failures: list[Failure] = []
    answers = _call(policy, batch, failures)
    if failures == [Failure.DEVICE]:
        middle = (len(batch) + 1) // 2
        answers = _call(policy, batch[:middle], failures)
        if batch[middle:]:
            answers += _call(policy, batch[middle:], failures)
    elif failures and len(batch) > 1:
        answers = [_call(policy, [one], failures)[0] for one in batch]
    return Attempts(answers, failures, time.perf_counter() - started_s)


def _call(policy: Policy, batch: Sequence[ActRequest], failures: list[Failure]) -> list[Answer]:
    """Return the policy's answers, or its failure once for every frame."""
    try:
        answers = policy.act(batch)
        if len(answers) == len(batch):
            return list(answers)
        error: Exception = PolicyFailedError(f"{len(answers)} answers to {len(batch)} frames")
        failures.append(Failure.RAISED)
    except DeviceError as device_error:
        logger.warning("the device gave up on a batch of %d: %s", len(batch), device_error)
        failures.append(Failure.DEVICE)
        error = device_error
    except RequestError as request_error:
        failures.append(Failure.REQUEST)
        error = request_error
    except Exception as unexpected:
        logger.exception("the policy raised on a batch of %d", len(batch))
        failures.append(Failure.RAISED)
        error = PolicyFailedError(f"the policy raised {type(unexpected).__name__}")
        error.__cause__ = unexpected
    return [error] * len(batch)


class PolicyWorker(Protocol):
    """Where a policy lives: on a thread, or in replicas elsewhere. Used on the event loop."""

    watches_itself: bool  # it ends batches that take too long by itself

    def start(self) -> None:
        """Begin to load."""

    def submit(self, number: int, batch: Sequence[ActRequest]) -> None:
        """Have a batch answered; the listener hears of it under the same number."""

    def stop(self, timeout_s: float) -> bool:
        """Finish the batches in hand and end; return whether it did. Blocks."""


class Listener(Protocol):
    """Who is told, on the event loop, what happens where the policy lives."""

    def policy_loaded(self, worker: PolicyWorker, policy: Policy, num_replicas: int) -> None:
        """The policy is loaded and warm, and takes so many batches at a time; may come again."""

    def policy_broken(self, worker: PolicyWorker, error: Exception) -> None:
        """The policy could not be loaded or warmed up."""

    def batch_finished(self, worker: PolicyWorker, number: int, attempts: Attempts) -> None:
        """A batch came back."""


StartWorker = Callable[[LoadPolicy, Listener, asyncio.AbstractEventLoop], PolicyWorker]


class PolicyThread:
    """Owns a policy. Abandon it, and what it still reports is thrown away."""

    watches_itself = False

    def __init__(
        self, load: LoadPolicy, listener: Listener, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._load = load
        self._listener = listener
        self._loop = loop
        self._batches: SimpleQueue[tuple[int, Sequence[ActRequest]] | None] = SimpleQueue()
        # A daemon, because a policy that hangs can only be left behind, never stopped.
        self._thread = Thread(target=self._run, name="policy", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def submit(self, number: int, batch: Sequence[ActRequest]) -> None:
        """Have a batch answered; the listener hears of it."""
        self._batches.put((number, batch))

    def stop(self, timeout_s: float) -> bool:
        """Finish the batch in hand and end; return whether the thread did. Blocks."""
        self._batches.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            policy = self._load()
            policy.warm_up()
        except (PolicyError, SettingsError) as error:
            logger.error("the policy could not be loaded: %s", error)
            self._report(partial(self._listener.policy_broken, self, error))
            return
        except Exception as error:
            logger.exception("the policy could not be loaded")
            self._report(partial(self._listener.policy_broken, self, error))
            return
        self._report(partial(self._listener.policy_loaded, self, policy, 1))
        self._serve(policy)

    def _serve(self, policy: Policy) -> None:
        while (work := self._batches.get()) is not None:
            number, batch = work
            attempts = answer_batch(policy, batch)
            self._report(partial(self._listener.batch_finished, self, number, attempts))

    def _report(self, tell: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:
            logger.debug("the event loop has ended; nobody is left to tell")
