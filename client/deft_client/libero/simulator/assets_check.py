"""Checks that assets carry LIBERO's tasks: they load, take every initial state, and stand still.

Physics only, so it runs without OpenGL.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deft_client.libero.simulator.conventions import wait_action
from deft_client.libero.simulator.environment import EnvironmentSettings, LiberoEnvironment
from deft_client.libero.simulator.scene import Pose, Scene
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
    try:
        problems = []
        for trial in trials:
            texts = _check_trial(environment, trial)
            problems += [AssetsProblem(task, trial, text) for text in texts]
        return problems
    finally:
        environment.close()


def _check_trial(environment: LiberoEnvironment, trial: int) -> list[str]:
    environment.restart(trial)
    start = environment.scene()
    texts: list[str] = []
    settled = start
    for step in range(NUM_STEPS):
        if environment.advance(wait_action()) and not texts:
            texts.append(f"the goal holds by itself after {step + 1} idle steps")
        if step + 1 == SETTLED_AFTER:
            settled = environment.scene()
    end = environment.scene()
    return texts + _unrest(settled, end) + _moved_joints(start, end) + _overlaps(environment)


def _unrest(settled: Scene, end: Scene) -> list[str]:
    texts: list[str] = []
    for name, pose in end.bodies.items():
        before = settled.bodies[name]
        shift = float(np.linalg.norm(pose.position - before.position))
        turn = _turn(before, pose)
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


def _turn(before: Pose, after: Pose) -> float:
    cosine = (np.trace(before.rotation.T @ after.rotation) - 1.0) / 2.0
    return float(np.arccos(np.clip(cosine, -1.0, 1.0)))


def _moved_joints(start: Scene, end: Scene) -> list[str]:
    return [
        f"joint {name} went from {start.joints[name]:.3f} to {value:.3f} by itself"
        for name, value in end.joints.items()
        if abs(value - start.joints[name]) > MAX_JOINT_SHIFT
    ]
