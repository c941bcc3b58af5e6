"""How LIBERO's numbers become what policies were trained on, and back. Pure functions only.

The rules are those of the published evaluations: pictures are turned by half a turn, the robot
state is position, axis-angle and finger positions, and the gripper speaks robosuite's dialect, -1
open and +1 close (`deft_core.peers.conventions` has the training data's).
"""

import math

import numpy as np
from numpy.typing import NDArray

from deft_client.actions import ActionRules

CONTROL_HZ = 20
ACTION_DIM = 7  # three translations, three rotations, one gripper
FRAME_SIZE = 256
WAIT_STEPS = 10  # idle steps at the start of an episode, while objects fall into place
OPEN, CLOSE = -1.0, 1.0  # robosuite's gripper values
ACTION_RULES = ActionRules(is_motion=(True,) * 6 + (False,), is_switch=(False,) * 6 + (True,))
METRES_PER_UNIT = 0.05  # what an action of 1.0 asks of the controller
RADIANS_PER_UNIT = 0.5


def wait_action() -> NDArray[np.float64]:
    """The action of the idle steps: no motion, gripper open."""
    return np.array([0.0] * 6 + [OPEN])


def axis_angle(quaternion_xyzw: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotation vector of a unit quaternion; the sign of the quaternion is kept as it comes."""
    w = min(max(float(quaternion_xyzw[3]), -1.0), 1.0)
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion_xyzw[:3] * 2.0 * math.acos(w) / sine, dtype=np.float64)


def robot_state(
    position: NDArray[np.float64],
    quaternion_xyzw: NDArray[np.float64],
    fingers: NDArray[np.float64],
) -> NDArray[np.float32]:
    """The 8 numbers policies may read: gripper position, its axis-angle, two finger joints."""
    return np.concatenate([position, axis_angle(quaternion_xyzw), fingers]).astype(np.float32)
