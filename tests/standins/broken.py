"""Policies and simulators that break, by the names that `--policy` and `--environment` take."""

import os
import signal

import numpy as np
from numpy.typing import NDArray

from deft_client.errors import ServerUnreachableError
from deft_core.types import ActionChunk, Observation
from deft_libero.errors import GraphicsError, UnstableError
from deft_libero.evaluation import point_world
from deft_libero.policies.source import EpisodePolicy
from deft_libero.simulator.conventions import WAIT_STEPS
from deft_libero.simulator.environment import Environment, EnvironmentSettings, Frame, StepResult
from deft_libero.simulator.suites import Task

find_suite = point_world.find_suite  # of the simulators in this module


class VanishingServer:
    """Answers three times, then the server is gone."""

    def __init__(self) -> None:
        self.num_answers = 0

    def start(self, session_id: str) -> None:
        self.num_answers = 0

    def act(self, observation: Observation) -> ActionChunk:
        self.num_answers += 1
        if self.num_answers > 3:
            raise ServerUnreachableError("the cable was pulled")
        return ActionChunk(np.zeros((1, 7)))

    def close(self) -> None:
        pass


class EndingItsProcess(VanishingServer):
    """Ends its process without a word."""

    def act(self, observation: Observation) -> ActionChunk:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Defective(VanishingServer):
    """Has a bug."""

    def act(self, observation: Observation) -> ActionChunk:
        raise ZeroDivisionError("somebody divided by nothing")


class Unmoved(VanishingServer):
    """Stays where it is."""

    def act(self, observation: Observation) -> ActionChunk:
        return ActionChunk(np.zeros((1, 7)))


def stay(environment: Environment) -> EpisodePolicy:
    return Unmoved()


def vanish(environment: Environment) -> EpisodePolicy:
    return VanishingServer()


def die(environment: Environment) -> EpisodePolicy:
    return EndingItsProcess()


def crash(environment: Environment) -> EpisodePolicy:
    return Defective()


class Exploding(point_world.PointWorld):
    """Its physics blows up in the third step of the second trial."""

    def reset(self, trial: int) -> Frame:
        self.is_unsound, self.num_steps = trial == 1, 0
        return super().reset(trial)

    def step(self, action: NDArray[np.float64]) -> StepResult:
        self.num_steps += 1
        if self.is_unsound and self.num_steps > WAIT_STEPS + 3:
            raise UnstableError("the simulation became unstable")
        return super().step(action)


def open_exploding(task: Task, settings: EnvironmentSettings) -> Environment:
    return Exploding(task, settings)


def open_nothing(task: Task, settings: EnvironmentSettings) -> Environment:
    raise GraphicsError("no OpenGL library can render off screen; apt-get install it")
