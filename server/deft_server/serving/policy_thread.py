"""The one thread that is allowed to touch the policy: it loads it, warms it, answers batches.

What happens on it is reported on the event loop, to a `Listener`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from deft_policies.base import ActRequest, Policy
from deft_policies.errors import PolicyError
from deft_server.serving.attempts import Attempts, answer_batch
from deft_server.settings import SettingsError

logger = logging.getLogger(__name__)

LoadPolicy = Callable[[], Policy]


@dataclass(frozen=True, eq=False)
class Finished:
    """One batch came back: the answers, and the seconds the policy thread spent on it."""

    attempts: Attempts
    service_s: float


class Listener(Protocol):
    """Who is told, on the event loop, what happens on the policy thread."""

    def policy_loaded(self, thread: "PolicyThread", policy: Policy) -> None:
        """The policy is loaded and warm."""

    def policy_broken(self, thread: "PolicyThread", error: Exception) -> None:
        """The policy could not be loaded or warmed up."""

    def batch_finished(self, thread: "PolicyThread", finished: Finished) -> None:
        """A batch came back."""


class PolicyThread:
    """Owns a policy. Abandon it, and what it still reports is thrown away."""

    def __init__(
        self, load: LoadPolicy, listener: Listener, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._load = load
        self._listener = listener
        self._loop = loop
        self._batches: SimpleQueue[Sequence[ActRequest] | None] = SimpleQueue()
        # A daemon, because a policy that hangs can only be left behind, never stopped.
        self._thread = Thread(target=self._run, name="policy", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def submit(self, batch: Sequence[ActRequest]) -> None:
        """Have a batch answered; the listener hears of it."""
        self._batches.put(batch)

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
        self._report(partial(self._listener.policy_loaded, self, policy))
        self._serve(policy)

    def _serve(self, policy: Policy) -> None:
        while (batch := self._batches.get()) is not None:
            started_s = time.perf_counter()
            attempts = answer_batch(policy, batch)
            finished = Finished(attempts, time.perf_counter() - started_s)
            self._report(partial(self._listener.batch_finished, self, finished))

    def _report(self, tell: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:
            logger.debug("the event loop has ended; nobody is left to tell")
