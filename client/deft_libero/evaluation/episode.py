"""One episode: observations to a policy, its actions to the simulator, until the goal holds.

In lock-step the simulator waits for every answer, so latency costs nothing. In real time it goes
on at 20 Hz whether or not an answer has come: as on a robot, a slow answer acts on a scene that
has moved on. What happened is recorded step by step; judging it is left to others. Knows neither
processes nor files.
"""

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deft_client.actions import ActionQueue
from deft_client.errors import NoActionError
from deft_core.measures.answers import AnswerRecord
from deft_core.types import ActionChunk, Image, Observation
from deft_libero.evaluation.runs import Pacing, RunConfig, VideoChoice
from deft_libero.policies.source import EpisodePolicy
from deft_libero.results.records import SeamSizes
from deft_libero.simulator import conventions
from deft_libero.simulator.environment import Environment

PERIOD_S = 1.0 / conventions.CONTROL_HZ
_LATE_S = 0.001  # later than this, the simulator did not keep pace
_ROUNDING = 1e-9  # 0.15 s are three periods of 0.05 s, whatever the division says


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


class Clock:
    """The time by which the simulator goes on."""

    def now_s(self) -> float:
        """Seconds of a clock that is never set."""
        return time.monotonic()

    def sleep_until(self, moment_s: float) -> None:
        """Return at `moment_s`, or at once if it has passed."""
        time.sleep(max(0.0, moment_s - self.now_s()))


class BackgroundCalls:
    """Asks the policy from a thread of its own, one observation at a time."""

    def __init__(self, policy: EpisodePolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")
        self._pending: Future[tuple[ActionChunk, float]] | None = None

    def send(self, observation: Observation) -> None:
        """Send an observation; the answer to the last one must have been collected."""
        self._pending = self._thread.submit(self._ask, observation, self._clock.now_s())

    def collect(self) -> tuple[ActionChunk, float] | None:
        """The answer and the seconds it took, if it has come; raises what the policy raised."""
        if self._pending is None or not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        """Wait for a call that has not ended; the client's timeouts bound how long that takes."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _ask(self, observation: Observation, sent_s: float) -> tuple[ActionChunk, float]:
        chunk = self._policy.act(observation)
        return chunk, self._clock.now_s() - sent_s


class EpisodePlayer:
    """Plays one episode. `log` is what has happened in it so far, whatever ends it."""

    def __init__(
        self,
        environment: Environment,
        policy: EpisodePolicy,
        config: RunConfig,
        after_step: StepHook = lambda log: None,
    ) -> None:
        self.log = EpisodeLog()
        self._environment, self._policy, self._config = environment, policy, config
        self._after_step = after_step

    def play(
        self,
        trial: int,
        session_id: str,
        clock: Clock | None = None,
        calls: BackgroundCalls | None = None,
    ) -> EpisodeLog:
        """Play until the goal holds or the steps are used up. The last two are for real time.

        Global generators are seeded per episode and not per process, so that its outcome does not
        depend on which worker plays it after which others.
        """
        random.seed(self._config.seed)
        np.random.seed(self._config.seed)
        self._frame = self._environment.reset(trial)
        for _ in range(conventions.WAIT_STEPS):  # until the objects have settled
            self._frame = self._environment.step(conventions.wait_action()).frame
        self._keep_image()
        self._policy.start(session_id)
        if self._config.pacing is Pacing.LOCK_STEP:
            self._play_in_lock_step()
            return self.log
        clock = clock or Clock()
        calls = calls or BackgroundCalls(self._policy, clock)
        try:
            self._play_in_real_time(clock, calls)
        finally:
            calls.close()
        return self.log

    def _play_in_lock_step(self) -> None:
        queue = self._new_queue()
        while not self._is_over:
            step = len(self.log.actions)
            if queue.is_due:
                try:
                    chunk = self._policy.act(self._observe())
                except NoActionError:
                    pass  # an ensemble goes on with what is left of it
                else:
                    self.log.answers.append(AnswerRecord.of(chunk, step, step))
                    queue.ask()
                    queue.refill(chunk)
            action = queue.next()
            self._execute(self._hold() if action is None else action)

    def _play_in_real_time(self, clock: Clock, calls: BackgroundCalls) -> None:
        """Make a step every 1/20 s with the action there is; without one the arm holds.

        An answer takes effect at the first step that is at least its own latency after the step
        whose frame it answers: with a simulator that keeps pace this is the moment it arrives, and
        with one that does not, waiting for the simulator is not counted in the policy's favour.
        """
        queue = self._new_queue()
        asked_step: int | None = None  # whose frame is on its way
        answer: tuple[ActionChunk, float] | None = None  # has come, but is not yet due
        action: NDArray[np.float64] | None = None
        due_s = clock.now_s()
        for step in range(self._config.step_limit):
            if asked_step is not None:
                try:
                    answer = answer or calls.collect()
                except NoActionError:
                    asked_step = None  # it holds, and is asked with the next frame
            if (
                asked_step is not None
                and answer is not None
                and step >= asked_step + _latency_steps(answer[1])
            ):
                self.log.answers.append(AnswerRecord.of(answer[0], asked_step, step))
                self._note_changes(inside=largest_change(answer[0].actions))
                queue.refill(answer[0])
                asked_step = answer = None
            if asked_step is None and queue.is_due:
                calls.send(self._observe())
                queue.ask()
                asked_step = step
            before, action = action, queue.next()
            if before is not None and action is not None:
                self._note_changes(commanded=largest_change(np.stack([before, action])))
            self._execute(self._hold() if action is None else action)
            if self.log.has_succeeded:
                return
            due_s += PERIOD_S
            if clock.now_s() > due_s + _LATE_S:
                # The rhythm starts anew: hurried steps would be shorter for the policy, too.
                self.log.late_steps += 1
                due_s = clock.now_s()
            else:
                clock.sleep_until(due_s)

    def _new_queue(self) -> ActionQueue:
        config = self._config
        weights = config.source.profile.weights
        return ActionQueue(
            conventions.ACTION_RULES, config.blending, config.executed_steps, weights
        )

    @property
    def _is_over(self) -> bool:
        return self.log.has_succeeded or len(self.log.actions) >= self._config.step_limit

    def _observe(self) -> Observation:
        """What the policy is shown."""
        frame, instruction = self._frame, self._environment.task.instruction
        return Observation(frame.image, instruction, cameras=frame.cameras, state=frame.state)

    def _execute(self, action: NDArray[np.float64]) -> None:
        """Make a step."""
        result = self._environment.step(action)
        self._frame = result.frame
        self.log.actions.append(action)
        self._keep_image()
        self._after_step(self.log)
        self.log.has_succeeded = result.done

    def _hold(self) -> NDArray[np.float64]:
        """What keeps the arm where it is, as on a robot."""
        self.log.held_steps += bool(self.log.actions)
        if not self.log.answers:
            return conventions.wait_action()
        held = conventions.ACTION_RULES.hold(self.log.actions[-1])
        assert held is not None
        return held

    def _note_changes(self, commanded: float = 0.0, inside: float = 0.0) -> None:
        """Keep the largest change from action to action: as executed, and within an answer."""
        sizes = self.log.seams
        self.log.seams = SeamSizes(max(sizes.commanded, commanded), max(sizes.inside, inside))

    def _keep_image(self) -> None:
        if self._config.video is not VideoChoice.NONE:
            self.log.images.append(self._frame.image)


def _latency_steps(took_s: float) -> int:
    return max(1, math.ceil(took_s / PERIOD_S - _ROUNDING))


def largest_change(actions: NDArray[np.float64]) -> float:
    """The largest change of any dimension but the gripper, from one action to the next."""
    motions = actions[:, conventions.ACTION_RULES.motions]  # [step, dim]
    return float(np.abs(np.diff(motions, axis=0)).max(initial=0.0))
