"""One episode in real time: the simulator goes on at 20 Hz whether or not an answer has come.

As on a robot, a slow answer acts on a scene that has moved on. Until it comes, the last action is
held. An answer takes effect at the first step that is at least its own latency after the step
whose frame it answers: with a simulator that keeps pace this is the moment it arrives, and with one
that does not, waiting for the simulator is not counted in the policy's favour.
"""

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.evaluation.episode import (
    EpisodeLog,
    EpisodePlan,
    EpisodePolicy,
    StepHook,
    begin_episode,
    describe_answer,
    ignore_step,
    observe,
)
from deft_client.libero.simulator import conventions
from deft_client.libero.simulator.environment import Environment
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


PERIOD_S = 1.0 / conventions.CONTROL_HZ
_LATE_S = 0.001  # later than this, the simulator did not keep pace
_ROUNDING = 1e-9  # 0.15 s are three periods of 0.05 s, whatever the division says


class RealTimePlayer:
    """Plays episodes of one environment at its own pace."""

    def __init__(
        self,
        environment: Environment,
        policy: EpisodePolicy,
        clock: Clock | None = None,
        courier: Courier | None = None,
    ) -> None:
        self._environment = environment
        self._policy = policy
        self._clock = clock or WallClock()
        self._courier = courier or ThreadCourier(policy, self._clock)

    def play(self, plan: EpisodePlan, log: EpisodeLog, after_step: StepHook = ignore_step) -> None:
        """Play until the goal holds or the steps are used up; what happens goes into `log`."""
        frame = begin_episode(self._environment, self._policy, plan)
        log.see(frame, plan)
        control = _Control(self._courier, plan.executed_steps, log)
        due_s = self._clock.now_s()
        for step in range(plan.step_limit):
            control.receive(step)
            control.ask(step, observe(frame, self._environment))
            action = control.next_action(step)
            result = self._environment.step(action)
            frame = result.frame
            log.actions.append(action)
            log.see(frame, plan)
            after_step(log)
            if result.done:
                log.has_succeeded = True
                return
            due_s = self._wait_for_next_step(due_s, log)

    def close(self) -> None:
        """Wait for an answer that is still on its way."""
        self._courier.close()

    def _wait_for_next_step(self, due_s: float, log: EpisodeLog) -> float:
        """Sleep until the period is over. After a late step the rhythm starts anew: it is never
        caught up by hurrying, because hurried steps would be shorter for the policy too."""
        due_s += PERIOD_S
        now_s = self._clock.now_s()
        if now_s > due_s + _LATE_S:
            log.late_steps += 1
            return now_s
        self._clock.sleep_until(due_s)
        return due_s


class _Control:
    """Decides what is executed at each step, and when to ask again."""

    def __init__(self, courier: Courier, executed_steps: int | None, log: EpisodeLog) -> None:
        self._courier = courier
        self._executed_steps = executed_steps
        self._log = log
        self._actions = conventions.wait_action()[None]  # [step, action_dim], in force
        self._asked_step = 0  # step whose frame they answer
        self._next_ask = 0
        self._sent_step: int | None = None  # step of the observation that is on its way
        self._arrived: Delivery | None = None  # answered, but not yet due
        self._last_index = -1

    def receive(self, step: int) -> None:
        """Put the newest answer in force if it is due."""
        if self._sent_step is None:
            return
        self._arrived = self._arrived or self._courier.collect()
        if self._arrived is None:
            return
        latency_steps = max(1, math.ceil(self._arrived.took_s / PERIOD_S - _ROUNDING))
        if step < self._sent_step + latency_steps:
            return
        chunk, self._arrived = self._arrived.chunk, None
        self._log.answers.append(describe_answer(chunk, self._sent_step, step))
        self._actions, self._asked_step = chunk.actions, self._sent_step
        self._last_index = -1
        # Ask so early that the next answer should be there when these actions are used up.
        wanted = self._executed_steps or len(chunk.actions)
        self._next_ask = self._asked_step + max(1, wanted - latency_steps)
        self._sent_step = None

    def ask(self, step: int, observation: Observation) -> None:
        """Send the newest frame unless an older one is on its way, or there is no need yet."""
        if self._sent_step is None and step >= self._next_ask:
            self._courier.send(observation)
            self._sent_step = step

    def next_action(self, step: int) -> NDArray[np.float64]:
        """The action meant for this step, or the last one there is, held."""
        index = min(step - self._asked_step, len(self._actions) - 1)
        if index == self._last_index:
            self._log.held_steps += 1
        self._last_index = index
        action: NDArray[np.float64] = self._actions[index]
        return action
