"""Checks that assets and physics carry LIBERO's tasks: they load, take every initial state, stand
still, and what a task takes for granted is so.

Physics only, so it runs without OpenGL.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deft_client.libero.simulator.assets import AssetsKind
from deft_client.libero.simulator.conventions import WAIT_STEPS, wait_action
from deft_client.libero.simulator.environment import EnvironmentSettings, LiberoEnvironment
from deft_client.libero.simulator.scene import Scene
from deft_client.libero.simulator.settled import Poses, SettledPoses, turn_between
from deft_client.libero.simulator.suites import Task

NUM_STEPS = 60
SETTLED_AFTER = 40  # objects are recorded up to 16 cm above their place, and fall first
MAX_SHIFT_METRES = 0.003
MAX_TURN_RADIANS = np.deg2rad(3.0)
MAX_JOINT_SHIFT = 0.003
MAX_OVERLAP_METRES = 0.002


@dataclass(frozen=True)
class AssetsProblem:
    """One thing that is wrong with one trial."""

    task: Task
    trial: int
    text: str

    def __str__(self) -> str:
        return f"{self.task.suite} task {self.task.number} trial {self.trial}: {self.text}"


def check_task(
    task: Task, trials: Sequence[int], settings: EnvironmentSettings
) -> list[AssetsProblem]:
    """What is wrong with a task's trials; empty when all is well. Loading errors are raised."""
    environment = LiberoEnvironment(task, settings)
    # The stand-ins have shapes of their own, so things rest elsewhere on them.
    recorded = SettledPoses.load() if environment.assets.kind is AssetsKind.REAL else None
    try:
        problems = []
        for trial in trials:
            texts, poses = settle(environment, trial)
            texts += recorded.find_strays(task, trial, poses) if recorded else []
            problems += [AssetsProblem(task, trial, text) for text in texts]
        return problems
    finally:
        environment.close()


def settle_task(task: Task, trials: Sequence[int], settings: EnvironmentSettings) -> list[Poses]:
    """Where everything rests in each of a task's trials."""
    environment = LiberoEnvironment(task, settings)
    try:
        return [settle(environment, trial)[1] for trial in trials]
    finally:
        environment.close()


def settle(environment: LiberoEnvironment, trial: int) -> tuple[list[str], Poses]:
    """Wait until all is at rest; what is wrong then, and where everything is."""
    environment.restart(trial)
    start = environment.scene()
    texts: list[str] = []
    settled = start
    for step in range(NUM_STEPS):
        if environment.advance(wait_action()) and not texts:
            texts.append(f"the goal holds by itself after {step + 1} idle steps")
        if step + 1 == WAIT_STEPS:
            texts += [f"{one} does not hold" for one in environment.broken_premises()]
        if step + 1 == SETTLED_AFTER:
            settled = environment.scene()
    end = environment.scene()
    texts += _unrest(settled, end) + _moved_joints(start, end) + _overlaps(environment)
    return texts, end.bodies


def _unrest(settled: Scene, end: Scene) -> list[str]:
    texts: list[str] = []
    for name, pose in end.bodies.items():
        before = settled.bodies[name]
        shift = float(np.linalg.norm(pose.position - before.position))
        turn = turn_between(before, pose)
        if shift > MAX_SHIFT_METRES or turn > MAX_TURN_RADIANS:
            texts.append(
                f"{name} moved {shift * 1000:.1f} mm and turned {np.rad2deg(turn):.1f} degrees "
                f"between idle steps {SETTLED_AFTER} and {NUM_STEPS}"
            )
    return texts


def _overlaps(environment: LiberoEnvironment) -> list[str]:
    """A knob that was sunk into the table could not be turned, and nothing else showed it."""
    return [
        f"{one} and {other} overlap by {depth * 1000:.1f} mm"
        for one, other, depth in environment.overlaps()
        if depth > MAX_OVERLAP_METRES
    ]


def _moved_joints(start: Scene, end: Scene) -> list[str]:
    return [
        f"joint {name} went from {start.joints[name]:.3f} to {value:.3f} by itself"
        for name, value in end.joints.items()
        if abs(value - start.joints[name]) > MAX_JOINT_SHIFT
    ]
