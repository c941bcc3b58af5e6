"""Operational-space control of an arm with a redundant joint: from a goal pose to joint torques.

The law is robosuite's OSC_POSE with its default gains: position and rotation are decoupled, each a
critically damped spring in task space, and what freedom is left pulls the joints towards where
they began. Pure arithmetic; knows no simulator.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STIFFNESS = 150.0
DAMPING = 2.0 * np.sqrt(STIFFNESS)
JOINT_STIFFNESS = 10.0
JOINT_DAMPING = 2.0 * np.sqrt(JOINT_STIFFNESS)

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ArmState:
    """What the law reads at one instant."""

    position: Array  # [3] of the grip site
    rotation: Array  # [3, 3]
    jacobian: Array  # [6, joint], translation above rotation
    mass: Array  # [joint, joint]
    bias: Array  # [joint], gravity and velocity forces
    joints: Array  # [joint]
    velocities: Array  # [joint]


def torques(state: ArmState, goal_position: Array, goal_rotation: Array, rest: Array) -> Array:
    """Joint torques [joint] towards the goal; `rest` is where spare freedom pulls the joints."""
    motion = state.jacobian @ state.velocities
    force = STIFFNESS * (goal_position - state.position) - DAMPING * motion[:3]
    error = rotation_error(goal_rotation, state.rotation)
    moment = STIFFNESS * error - DAMPING * motion[3:]
    compliance = np.linalg.solve(state.mass, state.jacobian.T)  # [joint, 6]
    inertia = state.jacobian @ compliance  # [6, 6], the inverse of the task-space mass
    wrench = np.concatenate(
        [np.linalg.solve(inertia[:3, :3], force), np.linalg.solve(inertia[3:, 3:], moment)]
    )
    posture = state.mass @ (
        JOINT_STIFFNESS * (rest - state.joints) - JOINT_DAMPING * state.velocities
    )
    # The posture may not move the hand: take out what the dynamically consistent inverse passes.
    passed = np.linalg.solve(inertia, compliance.T @ posture)
    return np.asarray(state.jacobian.T @ (wrench - passed) + posture + state.bias)


def rotation_error(goal: Array, current: Array) -> Array:
    """Half the sum of the cross products of corresponding axes: small-angle rotation vector."""
    product = goal @ current.T
    return 0.5 * np.array(
        [
            product[2, 1] - product[1, 2],
            product[0, 2] - product[2, 0],
            product[1, 0] - product[0, 1],
        ]
    )


def turned(rotation: Array, vector: Array) -> Array:
    """A rotation turned further by a rotation vector in the world frame."""
    angle = float(np.linalg.norm(vector))
    if angle == 0.0:
        return rotation
    x, y, z = vector / angle
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    step = np.eye(3) + np.sin(angle) * cross + (1.0 - np.cos(angle)) * (cross @ cross)
    return np.asarray(step @ rotation)
