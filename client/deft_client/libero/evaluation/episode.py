"""One episode in lock-step: the simulator waits for every answer, so latency costs nothing.

What happened is recorded step by step; judging it is left to others. Knows neither processes nor
files, and what a server is only as far as `EpisodePolicy` says.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.results.records import Answer
from deft_client.libero.simulator import conventions
from deft_client.libero.simulator.environment import Environment, Frame
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
    means all of them. `seed` settles Python's and numpy's global generators.
    """

    trial: int
    step_limit: int
    session_id: str
    executed_steps: int | None = None
    seed: int = 7
    keeps_images: bool = False


@dataclass
class EpisodeLog:
    """What happened, in order. Grows while the episode is played, so that a crash leaves a part."""

    actions: list[NDArray[np.float64]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)  # before each action, and after the last
    has_succeeded: bool = False
    held_steps: int = 0
    late_steps: int = 0

    def see(self, frame: Frame, plan: EpisodePlan) -> None:
        """Keep a frame if the plan wants a video."""
        if plan.keeps_images:
            self.images.append(frame.image)


StepHook = Callable[[EpisodeLog], None]


def ignore_step(log: EpisodeLog) -> None:
    """The hook of a caller that does not watch."""


def begin_episode(environment: Environment, policy: EpisodePolicy, plan: EpisodePlan) -> Frame:
    """Start afresh on both sides and wait until the objects have settled.

    The generators are seeded per episode and not per process, so that an episode's outcome does
    not depend on which worker plays it after which others.
    """
    random.seed(plan.seed)
    np.random.seed(plan.seed)
    frame = environment.reset(plan.trial)
    for _ in range(conventions.WAIT_STEPS):
        frame = environment.step(conventions.wait_action()).frame
    policy.start(plan.session_id)
    return frame


def observe(frame: Frame, environment: Environment) -> Observation:
    """What the policy is shown."""
    instruction = environment.task.instruction
    return Observation(frame.image, instruction, cameras=frame.cameras, state=frame.state)


def describe_answer(chunk: ActionChunk, asked_step: int, used_step: int) -> Answer:
    """What is kept of an answer beside its actions."""
    trace = chunk.trace
    if trace is None:
        return Answer(asked_step, used_step, chunk.timings)
    return Answer(
        asked_step,
        used_step,
        chunk.timings,
        accepted=trace.accepted_lengths,
        num_tokens=len(trace.tokens),
        num_relaxed=round(trace.relaxed_share * len(trace.tokens)),
        method=trace.method,
    )


def play_in_lock_step(
    environment: Environment,
    policy: EpisodePolicy,
    plan: EpisodePlan,
    log: EpisodeLog,
    after_step: StepHook = ignore_step,
) -> None:
    """Play until the goal holds or the steps are used up; what happens goes into `log`."""
    frame = begin_episode(environment, policy, plan)
    log.see(frame, plan)
    while len(log.actions) < plan.step_limit:
        chunk = policy.act(observe(frame, environment))
        step = len(log.actions)
        log.answers.append(describe_answer(chunk, step, step))
        for action in chunk.actions[: plan.executed_steps][: plan.step_limit - step]:
            result = environment.step(action)
            frame = result.frame
            log.actions.append(action)
            log.see(frame, plan)
            after_step(log)
            if result.done:
                log.has_succeeded = True
                return
