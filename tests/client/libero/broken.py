"""Policies and simulators that break, by the names that `--policy` and `--environment` take."""

import os
import signal

import numpy as np

from deft_client.errors import ServerUnreachableError
from deft_client.libero.errors import GraphicsError
from deft_client.libero.evaluation.episode import EpisodePolicy
from deft_client.libero.simulator.environment import Environment, EnvironmentSettings
from deft_client.libero.simulator.suites import Task
from deft_client.types import ActionChunk, Observation


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


def vanish(environment: Environment) -> EpisodePolicy:
    return VanishingServer()


def die(environment: Environment) -> EpisodePolicy:
    return EndingItsProcess()


def crash(environment: Environment) -> EpisodePolicy:
    return Defective()


def open_nothing(task: Task, settings: EnvironmentSettings) -> Environment:
    raise GraphicsError("no OpenGL library can render off screen; apt-get install it")
