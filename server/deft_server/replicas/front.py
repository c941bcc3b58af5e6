"""Sends the scheduler's frames to replicas.

A frame whose replica dies is sent once more: it carries its session's memory along, so that any
other replica gives the same answer. Lives on the event loop.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from textwrap import shorten
from typing import Protocol

from deft_policies.base import PolicyRequest
from deft_policies.errors import PolicyError
from deft_server.errors import NotReadyError
from deft_server.replicas.replica import FrontState, ReplicaAnswer
from deft_server.serving.frame import FailedCall, Outcome, QueuedFrame
from deft_server.serving.hosting import HostedPolicy, Listener
from deft_server.settings import SettingsError

LOOK_EVERY_S = 0.5
TRIES = 2
# So many answers of an older version in a row mean that it was deployed again, not that a
# replica of it is still there in an update.
BACK_AFTER_ANSWERS = 64
MAX_VERSIONS = 8  # that are remembered; an update has two at a time

logger = logging.getLogger(__name__)


class ReplicaLostError(Exception):
    """A frame did not come back: its replica died, or cannot be reached."""


class ReplicaHangsError(ReplicaLostError):
    """A frame's replica was ended after long work on it; it might end another one, too."""


class Cluster(Protocol):
    """Where the replicas are."""

    def connect(self) -> None:
        """Find or start the replicas; blocks until one answers. Raises `SettingsError`."""

    async def look(self) -> tuple[str, HostedPolicy]:
        """Ask a replica for the version of its policy, and what a server has to know of it."""

    async def answer(self, ask: PolicyRequest, state: FrontState) -> ReplicaAnswer:
        """Have a replica that has a place answer a frame, or raise `ReplicaLostError`.

        Cancelling the call has the replica drop the frame.
        """

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
        self._watching: asyncio.Task[None] | None = None
        self._answering: dict[QueuedFrame, asyncio.Task[tuple[Outcome, list[FailedCall]]]] = {}
        self._is_stopping = False
        self._policies: dict[str, HostedPolicy] = {}  # by version, the oldest first
        self._version = ""  # the one that the server says it has
        self._num_of_others = 0  # answers of other versions since one of this
        self._count = 0
        self._name = uuid.uuid4().hex

    @property
    def progress(self) -> str:
        """What is waited for: replicas say nothing while they load."""
        return "waiting for a replica to load it"

    def start(self) -> None:
        """Begin to find the replicas."""
        self._watching = self._loop.create_task(self._watch())

    def submit(self, frames: Sequence[QueuedFrame]) -> None:
        """Send each frame to whichever replica has a place."""
        for frame in frames:
            task = self._loop.create_task(self._outcome(frame))
            self._answering[frame] = task
            started_s = time.perf_counter()
            task.add_done_callback(partial(self._ended, frame, started_s))

    def cancel(self, frame: QueuedFrame) -> None:
        """Have the replica drop a frame, if it has it."""
        task = self._answering.get(frame)
        if task is not None:
            task.cancel()

    def stop(self, timeout_s: float) -> bool:
        """Let go of the cluster; frames are no longer waited for."""
        self._loop.call_soon_threadsafe(self._cancel)
        self._cluster.close()
        return True

    def _cancel(self) -> None:
        self._is_stopping = True
        for task in self._answering.values():
            task.cancel()
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        """Connect, then tell the scheduler whenever the number of replicas changes."""
        try:
            await asyncio.to_thread(self._cluster.connect)
            version, policy = await self._cluster.look()
            self._count = await asyncio.to_thread(self._cluster.count)
            self._policies[version] = policy
            self._show(version)
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

    def _policy_of(self, answer: ReplicaAnswer, known: Mapping[str, HostedPolicy]) -> HostedPolicy:
        """Return the policy that answered, and take in what its answer tells of versions.

        During an update replicas of two versions answer. The server says that it has the newer.
        """
        policy = self._policies.get(answer.version) or answer.policy or known[answer.version]
        is_new = answer.version not in self._policies
        self._policies[answer.version] = policy
        if len(self._policies) > MAX_VERSIONS:
            del self._policies[next(iter(self._policies))]
        is_other = answer.version != self._version
        self._num_of_others = self._num_of_others + 1 if is_other else 0
        if is_new or self._num_of_others == BACK_AFTER_ANSWERS:
            self._show(answer.version)
        return policy

    def _show(self, version: str) -> None:
        self._version, self._num_of_others = version, 0
        self._tell()

    def _tell(self) -> None:
        logger.info("%d replicas of version %s", self._count, shorten(self._version, 80))
        self._listener.policy_loaded(self, self._policies[self._version], self._count)

    def _ended(
        self,
        frame: QueuedFrame,
        started_s: float,
        task: asyncio.Task[tuple[Outcome, list[FailedCall]]],
    ) -> None:
        del self._answering[frame]
        if self._is_stopping:
            return
        failures: list[FailedCall] = []
        if task.cancelled():
            frame.num_tries += 1
        else:
            frame.outcome, failures = task.result()
        frame.service_s = time.perf_counter() - started_s  # with the journey
        self._listener.round_ended(self, [frame], failures)

    async def _outcome(self, frame: QueuedFrame) -> tuple[Outcome, list[FailedCall]]:
        request = replace(frame.policy_request, on_actions=None)  # a call does not travel
        reason, frame.batch_size = "", 1
        num_waiting = self._listener.num_batches_waiting
        for _ in range(TRIES):
            left_s = frame.deadline_s - time.monotonic()
            known = dict(self._policies)
            state = FrontState(self._name, tuple(known), num_waiting, left_s)
            try:
                returned = await self._cluster.answer(request, state)
                frame.answered_by = self._policy_of(returned, known)
                frame.replica, frame.batch_size = returned.replica, returned.batch_size
                frame.num_tries += returned.num_tries
                failures = [FailedCall(kind, returned.batch_size) for kind in returned.failures]
                return returned.unpacked(), failures
            except ReplicaLostError as error:
                reason = str(error)
                frame.num_tries += 1
                logger.warning("a frame was lost: %s", reason)
                if isinstance(error, ReplicaHangsError):
                    break
            except Exception as error:
                reason = repr(error)
                logger.exception("a frame was lost on its way")
        lost = NotReadyError(f"the replica was lost: {reason}; send the frame again")
        return lost, [FailedCall("lost", 1)]
