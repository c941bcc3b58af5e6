"""Sends the scheduler's frames to replicas.

A frame whose replica dies is sent once more: it carries its session's memory along, so that any
other replica gives the same answer. Lives on the event loop.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from textwrap import shorten
from typing import Protocol

from deft_policies.base import ActRequest
from deft_policies.errors import PolicyError
from deft_server.errors import NotReadyError
from deft_server.replicas.replica import FrontState, ReplicaAnswer
from deft_server.serving.hosting import HostedPolicy, Listener
from deft_server.serving.request import FailedCall, Outcome, Request
from deft_server.settings import SettingsError

LOOK_EVERY_S = 0.5
TRIES = 2

logger = logging.getLogger(__name__)


class ReplicaLostError(Exception):
    """A frame did not come back: its replica died, or cannot be reached."""


class ReplicaHangsError(ReplicaLostError):
    """A frame did not come back in time; another replica would hardly be quicker."""


class Cluster(Protocol):
    """Where the replicas are."""

    def connect(self) -> None:
        """Find or start the replicas; blocks until one answers. Raises `SettingsError`."""

    async def look(self) -> tuple[str, HostedPolicy]:
        """Ask a replica for the version of its policy, and what a server has to know of it."""

    async def answer(self, ask: ActRequest, state: FrontState) -> ReplicaAnswer:
        """Have a replica that has a place answer a frame, or raise `ReplicaLostError`."""

    def count(self) -> int:
        """Return how many replicas are running. Blocks."""

    def close(self) -> None:
        """Let go of the replicas. Blocks."""


class ReplicaHost:
    """A policy that lives in a cluster, several times."""

    last_round_s = None  # replicas end what hangs

    def __init__(self, cluster: Cluster, listener: Listener) -> None:
        self._cluster = cluster
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._policy: HostedPolicy  # that the replicas have, once one was asked
        self._version = ""
        self._count = 0
        self._name = uuid.uuid4().hex

    def start(self) -> None:
        """Begin to find the replicas."""
        self._run(self._watch())

    def submit(self, requests: Sequence[Request]) -> None:
        """Send each frame to whichever replica has a place."""
        for request in requests:
            self._run(self._answer(request))

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
            version, policy = await self._cluster.look()
            self._count = await asyncio.to_thread(self._cluster.count)
            self._learn(version, policy)
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
            try:
                count = await asyncio.to_thread(self._cluster.count)
            except Exception as error:  # noqa: BLE001  in an update Ray counts none for a moment
                logger.warning("the replicas could not be counted (%r); looking again", error)
                continue
            if count != self._count:
                self._count = count
                self._tell()

    def _learn(self, version: str, policy: HostedPolicy) -> None:
        """Tell what the policy is now, before an answer of it is let out."""
        self._version, self._policy = version, policy
        self._tell()

    def _tell(self) -> None:
        logger.info("%d replicas of version %s", self._count, shorten(self._version, 80))
        self._listener.policy_loaded(self, self._policy, self._count)

    async def _answer(self, request: Request) -> None:
        started_s = time.perf_counter()
        request.outcome, failures = await self._outcome(request)
        request.service_s = time.perf_counter() - started_s  # with the journey
        self._listener.round_ended(self, [request], failures)

    async def _outcome(self, request: Request) -> tuple[Outcome, list[FailedCall]]:
        ask = replace(request.ask, on_actions=None)  # a call does not travel
        reason, request.size = "", 1
        num_waiting = self._listener.num_batches_waiting
        for _ in range(TRIES):
            left_s = request.deadline_s - time.monotonic()
            state = FrontState(self._name, self._version, num_waiting, left_s)
            try:
                returned = await self._cluster.answer(ask, state)
                if returned.policy is not None and returned.version != self._version:
                    self._learn(returned.version, returned.policy)
                request.replica, request.size = returned.replica, returned.size
                request.num_tries = returned.num_tries
                failures = [FailedCall(kind, returned.size) for kind in returned.failures]
                return returned.unpacked(), failures
            except ReplicaLostError as error:
                reason = str(error)
                logger.warning("a frame was lost: %s", reason)
                if isinstance(error, ReplicaHangsError):
                    break
            except Exception as error:
                reason = repr(error)
                logger.exception("a frame was lost on its way")
        lost = NotReadyError(f"the replica was lost: {reason}; send the frame again")
        return lost, [FailedCall("lost", 1)]
