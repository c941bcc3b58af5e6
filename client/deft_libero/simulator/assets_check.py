"""Checks that assets and physics carry LIBERO's tasks: they load, take every initial state, stand
still, and what a task takes for granted is so.

Physics only, so it runs without OpenGL.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from deft_libero.simulator.assets import find_assets
from deft_libero.simulator.conventions import WAIT_STEPS, wait_action
from deft_libero.simulator.environment import EnvironmentSettings, LiberoEnvironment
from deft_libero.simulator.scene import Pose, Scene
from deft_libero.simulator.suites import Task

NUM_STEPS = 60
SETTLED_AFTER = 40  # objects are recorded up to 16 cm above their place, and fall first
MAX_SHIFT_METRES = 0.003
MAX_TURN_RADIANS = np.deg2rad(3.0)
MAX_JOINT_SHIFT = 0.003
MAX_OVERLAP_METRES = 0.002
# Where everything rests after the idle steps, with the published MuJoCo: an initial state is a raw
# placement, and another physics may let things fall elsewhere, where they stand just as still.
# Written by `deft-client assets record`.
FILE = "settled.npz"
MAX_STRAY_METRES = 0.01
MAX_STRAY_RADIANS = np.deg2rad(10.0)
_STEPS_PER_METRE = 10_000  # positions are stored to a tenth of a millimetre,
_STEPS_PER_UNIT = 127  # and the entries of rotations to half a degree

Poses = Mapping[str, Pose]
Members = Mapping[str, NDArray[np.integer]]  # of the file, or what `pack_poses` returns


def check_task(task: Task, trials: Sequence[int], settings: EnvironmentSettings) -> list[str]:
    """What is wrong with a task's trials; empty when all is well. Loading errors are raised."""
    settled = settle_task(task, trials, settings)
    # Other assets have shapes of their own, so things rest elsewhere on them.
    recorded = load_settled() if find_assets(settings.assets_folder).is_real else {}
    return [
        f"{task.suite} task {task.number} trial {trial}: {text}"
        for trial, (texts, poses) in zip(trials, settled, strict=True)
        for text in (*texts, *find_strays(recorded, task, trial, poses))
    ]


def settle_task(
    task: Task, trials: Sequence[int], settings: EnvironmentSettings
) -> list[tuple[list[str], Poses]]:
    """What is wrong in each of a task's trials, and where everything rests."""
    environment = LiberoEnvironment(task, settings)
    try:
        return [settle(environment, trial) for trial in trials]
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


def pack_poses(task: Task, trials: Sequence[Poses]) -> dict[str, NDArray[np.integer]]:
    """The file's members for a task's trials; bodies come in the order of their names."""
    rows = [[poses[name] for name in sorted(poses)] for poses in trials]
    positions = np.array([[pose.position for pose in row] for row in rows])
    rotations = np.array([[pose.rotation for pose in row] for row in rows])
    return {
        f"{task.suite}/{task.number}/positions": np.round(positions * _STEPS_PER_METRE).astype(
            "i2"
        ),
        f"{task.suite}/{task.number}/rotations": np.round(rotations * _STEPS_PER_UNIT).astype("i1"),
    }


def load_settled() -> Members:
    """What comes with Deft: all trials of the four suites of ten tasks."""
    path = files("deft_libero.simulator").joinpath(FILE)
    with path.open("rb") as file, np.load(file) as stored:
        return dict(stored)


def find_strays(recorded: Members, task: Task, trial: int, poses: Poses) -> list[str]:
    """What does not rest where it did with the published MuJoCo, in words."""
    place = f"{task.suite}/{task.number}"
    if f"{place}/positions" not in recorded:  # LIBERO-PRO's were not recorded
        return []
    positions = recorded[f"{place}/positions"][trial] / _STEPS_PER_METRE
    rotations = recorded[f"{place}/rotations"][trial] / _STEPS_PER_UNIT
    texts = []
    for name, position, rotation in zip(sorted(poses), positions, rotations, strict=True):
        shift = float(np.linalg.norm(poses[name].position - position))
        turn = turn_between(Pose(position, rotation), poses[name])
        if shift > MAX_STRAY_METRES or turn > MAX_STRAY_RADIANS:
            texts.append(
                f"{name} rests {shift * 1000:.1f} mm from where it did with the published "
                f"MuJoCo, turned by {np.rad2deg(turn):.0f} degrees"
            )
    return texts


def turn_between(one: Pose, other: Pose) -> float:
    """Angle between two rotations, radians."""
    cosine = (np.trace(one.rotation.T @ other.rotation) - 1.0) / 2.0
    return float(np.arccos(np.clip(cosine, -1.0, 1.0)))
