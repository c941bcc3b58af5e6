"""Where everything rests after the idle steps, as recorded with the published MuJoCo.

An initial state is a raw placement: things fall into place during an episode's first steps, and
another physics may let them fall elsewhere, where they stand just as still. Written by
`deft-client assets record`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.simulator.scene import Pose
from deft_client.libero.simulator.suites import Task

FILE = "settled.npz"
MAX_STRAY_METRES = 0.01
MAX_STRAY_RADIANS = np.deg2rad(10.0)
_STEPS_PER_METRE = 10_000  # positions are stored to a tenth of a millimetre,
_STEPS_PER_UNIT = 127  # and the entries of rotations to half a degree

Poses = Mapping[str, Pose]


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


@dataclass(frozen=True, eq=False)
class SettledPoses:
    """What the file holds, or `pack_poses` of several tasks together."""

    members: Mapping[str, NDArray[np.integer]]

    @classmethod
    def load(cls) -> "SettledPoses":
        """Those that come with Deft: all trials of the four suites of ten tasks."""
        path = files("deft_client.libero.simulator").joinpath(FILE)
        with path.open("rb") as file, np.load(file) as stored:
            return cls(dict(stored))

    def find_strays(self, task: Task, trial: int, poses: Poses) -> list[str]:
        """What does not rest where it did with the published MuJoCo, in words."""
        place = f"{task.suite}/{task.number}"
        positions = self.members[f"{place}/positions"][trial] / _STEPS_PER_METRE
        rotations = self.members[f"{place}/rotations"][trial] / _STEPS_PER_UNIT
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
