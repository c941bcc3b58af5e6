"""A policy on a thread of this process, the only one that is allowed to touch it."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread

from deft_policies.base import ActRequest, Policy
from deft_policies.errors import PolicyError
from deft_server.hosting.attempts import answer_batch
from deft_server.hosting.host import HostedPolicy, Listener, LoadPolicy, load_and_warm
from deft_server.settings import SettingsError

logger = logging.getLogger(__name__)


class PolicyThread:
    """Owns a policy. One that hangs can only be left behind."""

    is_disposable = False
    watches_itself = False

    def __init__(self, load: LoadPolicy, listener: Listener) -> None:
        self._load = load
        self._listener = listener
        self._loop = asyncio.get_running_loop()
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
        """End after the batch in hand; a thread that does not is left behind."""
        self._batches.put(None)
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
        while (work := self._batches.get()) is not None:
            number, batch = work
            attempts = answer_batch(policy, batch)
            self._report(partial(self._listener.batch_finished, self, number, attempts))

    def _report(self, tell: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:
            logger.debug("the event loop has ended; nobody is left to tell")
