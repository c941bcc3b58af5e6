"""Where a policy lives: the seam behind the scheduler, and a policy's thread.

A thread of this process and replicas elsewhere are the same from here: frames go in, and come back
with their answers on the event loop. A policy keeps nothing of any robot, so it can be lost and
loaded again at any time.
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

from deft_core.types import ActOptions, Observation, ServerInfo
from deft_policies.base import ActionLimits, Policy
from deft_policies.errors import PolicyError
from deft_policies.model.statistics import find_statistics_key
from deft_policies.progress import describe_progress
from deft_server.serving.frame import FailedCall, QueuedFrame
from deft_server.serving.rounds import Rounds
from deft_server.settings import SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class HostedPolicy:
    """What a server knows of a policy, wherever it lives. Everything here is quick."""

    info: ServerInfo
    limits: dict[str, ActionLimits]  # by statistics key; empty where the policy tells none
    joins_midway: bool  # whether frames may join it while others are on their way
    here: Policy | None = None  # the policy itself, where it lives in this process

    @staticmethod
    def of(policy: Policy) -> "HostedPolicy":
        """A policy of this process."""
        limits_by_key = {key: policy.action_limits(key) for key in policy.info.statistics_keys}
        limits = {key: one for key, one in limits_by_key.items() if one is not None}
        return HostedPolicy(policy.info, limits, policy.joins_midway, policy)

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Raise `RequestError` for what is known beforehand to have no answer.

        Of a policy that lives elsewhere little is known; its replica checks the rest.
        """
        if self.here is None:
            self._key_of(options.statistics_key)
        else:
            self.here.check(observation, options)

    def limits_of(self, statistics_key: str | None) -> ActionLimits | None:
        """Return the range of actions under a key that `check` let pass, if the policy tells it."""
        return self.limits[self._key_of(statistics_key)] if self.limits else None

    def _key_of(self, statistics_key: str | None) -> str:
        key = self.info.default_statistics_key if statistics_key is None else statistics_key
        return find_statistics_key(self.info.statistics_keys, key)


class Listener(Protocol):
    """Called on the event loop with what becomes of a policy and its frames: the scheduler.

    Not a listener of the `EventBus`, which hears of answers that callers got.
    """

    @property
    def num_batches_waiting(self) -> float:
        """How many batches could be made of the frames that wait."""

    def policy_loaded(
        self, host: "PolicyHost", policy: HostedPolicy, num_replicas: int = 1
    ) -> None:
        """The policy is loaded and warm, and is there so many times; may come again."""

    def policy_broken(self, host: "PolicyHost", error: BaseException) -> None:
        """The policy could not be loaded or warmed up; trying again would not help."""

    def round_ended(
        self, host: "PolicyHost", ended: Sequence[QueuedFrame], failures: Sequence[FailedCall]
    ) -> None:
        """These frames came back from the policy, and these calls of it failed meanwhile.

        Not called after a round in which neither happened.
        """


class PolicyHost(Protocol):
    """Where a policy lives. Called on the event loop, but for `stop`."""

    @property
    def last_round_s(self) -> float | None:
        """When the last round ended, monotonic; None where hangs are ended elsewhere."""

    @property
    def progress(self) -> str:
        """What is done just now to have the policy; empty where that is not known."""

    def start(self) -> None:
        """Begin to load the policy and warm it; must not wait."""

    def submit(self, frames: Sequence[QueuedFrame]) -> None:
        """Have frames answered; never more in hand than `Admission.num_places`."""

    def cancel(self, frame: QueuedFrame) -> None:
        """The caller has left. The frame may have come back already."""

    def stop(self, timeout_s: float) -> bool:
        """Finish what is in hand, for so long, and end; return whether the policy ended.

        Blocks. The listener is not called any more.
        """


NewHost = Callable[[Listener], PolicyHost]


@dataclass(frozen=True)
class RemotePolicy:
    """Stands for a policy that this process does not load: `new_host` knows where it lives."""

    new_host: NewHost


LoadPolicy = Callable[[], Policy]


def load_and_warm(load: LoadPolicy) -> Policy:
    """Load a policy and make it ready to answer."""
    policy = load()
    policy.warm_up()
    return policy


class PolicyThread:
    """Owns a policy. One that hangs can only be left behind."""

    def __init__(self, load: LoadPolicy, listener: Listener) -> None:
        self._load = load
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.last_round_s = 0.0
        self._joining: SimpleQueue[Sequence[QueuedFrame] | None] = SimpleQueue()
        # A daemon, because a policy that hangs can only be left behind, never stopped.
        self._thread = Thread(target=self._run, name="policy", daemon=True)

    @property
    def progress(self) -> str:
        """What the policy's thread does to load it."""
        return describe_progress()

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def submit(self, frames: Sequence[QueuedFrame]) -> None:
        """Have frames join before the next round; the listener hears of their answers."""
        self._joining.put(frames)

    def cancel(self, frame: QueuedFrame) -> None:
        """Nothing to do: the thread drops cancelled frames before each round."""

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
            ended, failures = rounds.play([one for some in joining for one in some or ()])
            self.last_round_s = time.monotonic()
            if ended or failures:
                self._report(partial(self._listener.round_ended, self, ended, failures))

    def _report(self, report: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(report)
        except RuntimeError:
            logger.debug("the event loop has ended; nobody is left to report to")
