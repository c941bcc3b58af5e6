"""Environments of the simulator that its tests share; each is built once."""

from functools import cache

from deft_libero.simulator.conventions import WAIT_STEPS, wait_action
from deft_libero.simulator.environment import EnvironmentSettings, LiberoEnvironment
from deft_libero.simulator.graphics import Renderer
from deft_libero.simulator.suites import find_task
from tests.standins import stand_ins

# What fast tests run on: no pictures, and simple scenes.
PHYSICS = EnvironmentSettings(renderer=Renderer.NONE, assets_folder=stand_ins(), fast=True)


@cache
def physics(suite: str, number: int) -> LiberoEnvironment:
    """A task's environment without pictures; shared, because an episode does not depend on it."""
    return LiberoEnvironment(find_task(suite, number), PHYSICS)


def settle(environment: LiberoEnvironment) -> None:
    """The idle steps of the start of an episode."""
    for _ in range(WAIT_STEPS):
        environment.advance(wait_action())
