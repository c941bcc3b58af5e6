"""Sends the scheduler's batches to replicas, each of which takes one at a time.

A batch whose replica dies is sent once more: its frames carry their sessions' memory along, so
that any other replica gives the same answers. Lives on the event loop.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Protocol

from deft_policies.base import ActRequest
from deft_policies.errors import PolicyError
from deft_server.hosting.attempts import Attempts
from deft_server.hosting.host import HostedPolicy, Listener
from deft_server.hosting.messages import PolicyFacts
from deft_server.hosting.process import hosted
from deft_server.replicas.remote import FrontState, ReplicaAnswers, lost
from deft_server.settings import SettingsError

LOOK_EVERY_S = 0.5
TRIES = 2

logger = logging.getLogger(__name__)


class ReplicaLostError(Exception):
    """A batch did not come back: its replica died, or cannot be reached."""


class ReplicaHangsError(ReplicaLostError):
    """A batch did not come back in time; another replica would hardly be quicker."""


class Cluster(Protocol):
    """Where the replicas are."""

    def connect(self) -> None:
        """Find or start the replicas; blocks until one answers. Raises `SettingsError`."""

    async def look(self) -> tuple[str, PolicyFacts]:
        """Ask a replica for the version of its policy, and what a server has to know of it."""

    async def answer(self, frames: Sequence[ActRequest], state: FrontState) -> ReplicaAnswers:
        """Have a free replica answer a batch, or raise `ReplicaLostError`."""

    def count(self) -> int:
        """Return how many replicas are running. Blocks."""

    def close(self) -> None:
        """Let go of the replicas. Blocks."""


class ReplicaHost:
    """A policy that lives in a cluster, several times. Its replicas end what hangs."""

    is_disposable = True
    watches_itself = True

    def __init__(self, cluster: Cluster, listener: Listener) -> None:
        self._cluster = cluster
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._policy: HostedPolicy | None = None
        self._version = ""
        self._count = 0
        self._name = uuid.uuid4().hex

    def start(self) -> None:
        """Begin to find the replicas."""
        self._run(self._watch())

    def submit(self, number: int, batch: Sequence[ActRequest]) -> None:
        """Send a batch to whichever replica is free."""
        self._run(self._answer(number, batch))

    def stop(self, timeout_s: float) -> bool:
        """Let go of the cluster; frames are no longer waited for."""
        self._loop.call_soon_threadsafe(self._cancel)
        self._cluster.close()
        return True

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Connect, then tell the scheduler whenever the number of replicas changes."""
        try:
            await asyncio.to_thread(self._cluster.connect)
            version, facts = await self._cluster.look()
            self._count = await asyncio.to_thread(self._cluster.count)
            self._learn(version, facts)
        except (SettingsError, PolicyError, ReplicaLostError) as error:
            logger.error("the replicas could not be started: %s", error)
            self._listener.policy_broken(self, error)
            return
        except Exception as error:
            logger.exception("the replicas could not be started")
            self._listener.policy_broken(self, error)
            return
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            count = await asyncio.to_thread(self._cluster.count)
            if count != self._count:
                self._count = count
                self._tell()

    def _learn(self, version: str, facts: PolicyFacts) -> None:
        """Tell what the policy is now, before an answer of it is let out."""
        self._version, self._policy = version, hosted(facts)
        self._tell()

    def _tell(self) -> None:
        assert self._policy is not None
        logger.info("%d replicas of version %s", self._count, self._version)
        self._listener.policy_loaded(self, self._policy, self._count)

    async def _answer(self, number: int, batch: Sequence[ActRequest]) -> None:
        started_s = time.perf_counter()
        attempts = await self._attempts(batch, started_s)
        self._listener.batch_finished(self, number, attempts)

    async def _attempts(self, batch: Sequence[ActRequest], started_s: float) -> Attempts:
        reason = ""
        num_waiting = self._listener.num_waiting / len(batch)
        for _ in range(TRIES):
            state = FrontState(self._name, self._version, num_waiting)
            try:
                returned = await self._cluster.answer(batch, state)
                if returned.facts is not None and returned.version != self._version:
                    self._learn(returned.version, returned.facts)
                return returned.attempts(time.perf_counter() - started_s)
            except ReplicaLostError as error:
                reason = str(error)
                logger.warning("a batch of %d was lost: %s", len(batch), reason)
                if isinstance(error, ReplicaHangsError):
                    break
            except Exception as error:
                reason = repr(error)
                logger.exception("a batch of %d was lost on its way", len(batch))
        return lost(len(batch), reason, time.perf_counter() - started_s)
