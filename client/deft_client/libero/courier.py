"""Carries observations to a policy in the background, and says how long each answer took."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from deft_client.libero.episode import EpisodePolicy
from deft_client.types import ActionChunk, Observation


class Clock(Protocol):
    """Time as the episode sees it."""

    def now_s(self) -> float:
        """Seconds since some fixed moment."""

    def sleep_until(self, moment_s: float) -> None:
        """Return at `moment_s`, or at once if it has passed."""


class WallClock:
    """The real time."""

    def now_s(self) -> float:
        """Seconds of a clock that is never set."""
        return time.monotonic()

    def sleep_until(self, moment_s: float) -> None:
        """Sleep."""
        time.sleep(max(0.0, moment_s - self.now_s()))


@dataclass(frozen=True, eq=False)
class Delivery:
    """An answer, and how long it took from the frame to the actions."""

    chunk: ActionChunk
    took_s: float


class Courier(Protocol):
    """Carries one observation at a time to the policy while the simulator goes on."""

    def send(self, observation: Observation) -> None:
        """Set out with an observation; the last one must have been delivered."""

    def collect(self) -> Delivery | None:
        """The answer if it has come; raises what the policy raised."""

    def close(self) -> None:
        """Wait for what is under way and drop it."""


class ThreadCourier:
    """Asks the policy from a thread of its own."""

    def __init__(self, policy: EpisodePolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="courier")
        self._pending: Future[Delivery] | None = None

    def send(self, observation: Observation) -> None:
        """Ask in the background."""
        self._pending = self._thread.submit(self._ask, observation, self._clock.now_s())

    def collect(self) -> Delivery | None:
        """The answer if it has come."""
        if self._pending is None or not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        """Wait for the thread; the client's timeouts bound how long that takes."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _ask(self, observation: Observation, sent_s: float) -> Delivery:
        chunk = self._policy.act(observation)
        return Delivery(chunk, self._clock.now_s() - sent_s)
