"""One episode: observations to a policy, its actions to the simulator, until the goal holds.

In lock-step the simulator waits for every answer, so latency costs nothing. In real time it goes
on at 20 Hz whether or not an answer has come: as on a robot, a slow answer acts on a scene that
has moved on. What happened is recorded step by step; judging it is left to others. Knows neither
processes nor files, and what a server is only as far as `EpisodePolicy` says.
"""

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deft_client.chunks import ActionQueue, Moment, Seam, SeamSizes
from deft_client.libero.results.records import AnswerRecord
from deft_client.libero.simulator import conventions
from deft_client.libero.simulator.environment import Environment
from deft_client.types import ActionChunk, Image, Observation


class EpisodePolicy(Protocol):
    """Who answers during an episode. Actions are in robosuite's units."""

    def start(self, session_id: str) -> None:
        """Begin an episode: what was remembered of another one is void."""

    def act(self, observation: Observation) -> ActionChunk:
        """Answer an observation."""

    def close(self) -> None:
        """Free connections."""


@dataclass(frozen=True)
class EpisodePlan:
    """Which episode, and by which rules.

    `executed_steps` actions of an answer are executed before the next observation is sent; None
    means all of them. In real time `seam` says how one answer gives way to the next. `seed` settles
    Python's and numpy's global generators.
    """

    trial: int
    step_limit: int
    session_id: str
    executed_steps: int | None = None
    seam: Seam = Seam.FREEZE
    seed: int = 7
    keeps_images: bool = False


@dataclass
class EpisodeLog:
    """What happened, in order. Grows while the episode is played, so that a crash leaves a part."""

    actions: list[NDArray[np.float64]] = field(default_factory=list)
    answers: list[AnswerRecord] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)  # before each action, and after the last
    has_succeeded: bool = False
    held_steps: int = 0
    late_steps: int = 0
    seams: SeamSizes = SeamSizes()  # in real time


StepHook = Callable[[EpisodeLog], None]


def ignore_step(log: EpisodeLog) -> None:
    """The hook of a caller that does not watch."""


class _Simulation:
    """The simulator's side of an episode; what happens there goes into the log."""

    def __init__(
        self, environment: Environment, plan: EpisodePlan, log: EpisodeLog, after_step: StepHook
    ) -> None:
        """Start afresh and wait until the objects have settled.

        The generators are seeded per episode and not per process, so that an episode's outcome
        does not depend on which worker plays it after which others.
        """
        self._environment, self._plan = environment, plan
        self._log, self._after_step = log, after_step
        random.seed(plan.seed)
        np.random.seed(plan.seed)
        self._frame = environment.reset(plan.trial)
        for _ in range(conventions.WAIT_STEPS):
            self._frame = environment.step(conventions.wait_action()).frame
        self._keep_image()

    @property
    def is_over(self) -> bool:
        """Whether the goal was reached or the steps are used up."""
        return self._log.has_succeeded or len(self._log.actions) >= self._plan.step_limit

    def observe(self) -> Observation:
        """What the policy is shown."""
        frame, instruction = self._frame, self._environment.task.instruction
        return Observation(frame.image, instruction, cameras=frame.cameras, state=frame.state)

    def execute(self, action: NDArray[np.float64]) -> None:
        """Make a step."""
        result = self._environment.step(action)
        self._frame = result.frame
        self._log.actions.append(action)
        self._keep_image()
        self._after_step(self._log)
        self._log.has_succeeded = result.done

    def _keep_image(self) -> None:
        if self._plan.keeps_images:
            self._log.images.append(self._frame.image)


def play_in_lock_step(
    environment: Environment,
    policy: EpisodePolicy,
    plan: EpisodePlan,
    log: EpisodeLog,
    after_step: StepHook = ignore_step,
) -> None:
    """Play until the goal holds or the steps are used up; what happens goes into `log`."""
    simulation = _Simulation(environment, plan, log, after_step)
    policy.start(plan.session_id)
    while not simulation.is_over:
        chunk = policy.act(simulation.observe())
        step = len(log.actions)
        log.answers.append(AnswerRecord.of(chunk, step, step))
        for action in chunk.actions[: plan.executed_steps]:
            if not simulation.is_over:
                simulation.execute(action)


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
class TimedAnswer:
    """An answer, and how long it took from the frame to the actions."""

    chunk: ActionChunk
    took_s: float


class BackgroundCalls(Protocol):
    """Calls the policy, one observation at a time, while the simulator goes on."""

    def send(self, observation: Observation) -> None:
        """Send an observation; the answer to the last one must have been collected."""

    def collect(self) -> TimedAnswer | None:
        """The answer if it has come; raises what the policy raised."""

    def close(self) -> None:
        """Wait for a call that has not ended, and drop its answer."""


class ThreadedCalls:
    """Asks the policy from a thread of its own."""

    def __init__(self, policy: EpisodePolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")
        self._pending: Future[TimedAnswer] | None = None

    def send(self, observation: Observation) -> None:
        """Ask in the background."""
        self._pending = self._thread.submit(self._ask, observation, self._clock.now_s())

    def collect(self) -> TimedAnswer | None:
        """The answer if it has come."""
        if self._pending is None or not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        """Wait for the thread; the client's timeouts bound how long that takes."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _ask(self, observation: Observation, sent_s: float) -> TimedAnswer:
        chunk = self._policy.act(observation)
        return TimedAnswer(chunk, self._clock.now_s() - sent_s)


PERIOD_S = 1.0 / conventions.CONTROL_HZ
_LATE_S = 0.001  # later than this, the simulator did not keep pace
_ROUNDING = 1e-9  # 0.15 s are three periods of 0.05 s, whatever the division says


class RealTimePlayer:
    """Plays episodes of one environment at its own pace.

    Until an answer comes, the last action is held. An answer takes effect at the first step that
    is at least its own latency after the step whose frame it answers: with a simulator that keeps
    pace this is the moment it arrives, and with one that does not, waiting for the simulator is
    not counted in the policy's favour.
    """

    def __init__(
        self,
        environment: Environment,
        policy: EpisodePolicy,
        clock: Clock | None = None,
        calls: BackgroundCalls | None = None,
    ) -> None:
        self._environment = environment
        self._policy = policy
        self._clock = clock or WallClock()
        self._calls = calls or ThreadedCalls(policy, self._clock)

    def play(self, plan: EpisodePlan, log: EpisodeLog, after_step: StepHook = ignore_step) -> None:
        """Play until the goal holds or the steps are used up; what happens goes into `log`."""
        simulation = _Simulation(self._environment, plan, log, after_step)
        self._policy.start(plan.session_id)
        control = _Control(self._calls, plan, log)
        due_s = self._clock.now_s()
        for step in range(plan.step_limit):
            control.receive(step)
            control.ask(step, simulation.observe())
            simulation.execute(control.next_action())
            if log.has_succeeded:
                return
            due_s = self._wait_for_next_step(due_s, log)

    def close(self) -> None:
        """Wait for an answer that is still on its way."""
        self._calls.close()

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

    def __init__(self, calls: BackgroundCalls, plan: EpisodePlan, log: EpisodeLog) -> None:
        self._calls = calls
        self._log = log
        self._queue = ActionQueue(conventions.ACTION_RULES, plan.seam, plan.executed_steps)
        self._asked: Moment | None = None  # while an observation is on its way
        self._sent_step = 0
        self._arrived: TimedAnswer | None = None  # answered, but not yet due

    def receive(self, step: int) -> None:
        """Put the newest answer in force if it is due."""
        if self._asked is None:
            return
        self._arrived = self._arrived or self._calls.collect()
        if self._arrived is None:
            return
        latency_steps = max(1, math.ceil(self._arrived.took_s / PERIOD_S - _ROUNDING))
        if step < self._sent_step + latency_steps:
            return
        chunk, self._arrived = self._arrived.chunk, None
        self._log.answers.append(AnswerRecord.of(chunk, self._sent_step, step))
        self._queue.refill(chunk, self._asked)
        self._asked = None

    def ask(self, step: int, observation: Observation) -> None:
        """Send the newest frame unless an older one is on its way, or there is no need yet."""
        if self._asked is None and self._queue.is_due:
            self._calls.send(observation)
            self._asked, self._sent_step = self._queue.now, step

    def next_action(self) -> NDArray[np.float64]:
        """The action meant for this step, or the last one there was, held."""
        action = self._queue.next()
        self._log.seams = self._queue.seams
        if action is not None:
            return action
        if not self._log.answers:
            self._log.held_steps += bool(self._log.actions)
            return conventions.wait_action()
        self._log.held_steps += 1
        self._queue.note(self._log.actions[-1])
        return self._log.actions[-1]
