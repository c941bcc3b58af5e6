"""From where the gripper is and where it should be to one action. Pure functions.

The robot's controller moves about a quarter of what an action asks for in one step, so an error
of 5 cm asks for full speed and what is nearer is approached ever more slowly.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.conventions import CLOSE, OPEN
from deft_client.libero.scene import Pose, Scene, Vector

POSITION_GAIN = 20.0  # action units per metre
ROTATION_GAIN = 2.0  # action units per radian
DOWN = np.array([0.0, 0.0, -1.0])


@dataclass(frozen=True, eq=False)
class Aim:
    """Where the gripper should go. `closing` is the horizontal direction its fingers close along.

    `lean` tips the hand: its horizontal part is added to the downward axis before normalising.
    """

    position: Vector
    closing: Vector
    closed: bool
    speed: float = 1.0  # the largest component of the translation
    rise: float | None = None  # limits upward speed alone
    lean: Vector = field(default_factory=lambda: np.zeros(3))


def steer(scene: Scene, aim: Aim) -> NDArray[np.float64]:
    """The action of 7 robosuite values that moves towards the aim."""
    translation = POSITION_GAIN * (aim.position - scene.gripper.position)
    translation *= min(1.0, aim.speed / max(float(np.abs(translation).max()), 1e-9))
    if aim.rise is not None:
        translation[2] = min(translation[2], aim.rise)
    turn = rotation_vector(wanted_rotation(aim, scene.gripper) @ scene.gripper.rotation.T)
    rotation = np.clip(ROTATION_GAIN * turn, -1.0, 1.0)
    return np.concatenate([translation, rotation, [CLOSE if aim.closed else OPEN]])


def wanted_rotation(aim: Aim, gripper: Pose) -> NDArray[np.float64]:
    """Axes of the hand: z down (with the lean), x along the closing direction nearest to now.

    The two fingers are alike, so the closing direction counts up to its sign.
    """
    z = DOWN + aim.lean
    z /= np.linalg.norm(z)
    sign = 1.0 if aim.closing @ gripper.rotation[:, 0] >= 0 else -1.0
    x = sign * aim.closing - (sign * aim.closing @ z) * z
    x /= np.linalg.norm(x)
    return np.stack([x, np.cross(z, x), z], axis=1)


def hand_pose(position: Vector, closing: Vector) -> Pose:
    """The pose of an upright hand at a position."""
    x = closing / np.linalg.norm(closing)
    return Pose(position, np.stack([x, np.cross(DOWN, x), DOWN], axis=1))


def rotation_vector(rotation: NDArray[np.float64]) -> Vector:
    """Axis times angle of a rotation matrix, for angles below pi."""
    angle = float(np.arccos(np.clip((np.trace(rotation) - 1.0) / 2.0, -1.0, 1.0)))
    axis = np.array(
        [
            rotation[2, 1] - rotation[1, 2],
            rotation[0, 2] - rotation[2, 0],
            rotation[1, 0] - rotation[0, 1],
        ]
    )
    sine = float(np.linalg.norm(axis))
    return np.zeros(3) if sine < 1e-9 else axis * (angle / sine)


def yaw_error(closing: Vector, gripper: Pose) -> float:
    """Angle between the fingers' closing axis and a direction, up to its sign, in radians."""
    flat = gripper.rotation[:2, 0]
    cosine = abs(float(flat @ closing[:2])) / max(float(np.linalg.norm(flat)), 1e-9)
    return float(np.arccos(np.clip(cosine, 0.0, 1.0)))
