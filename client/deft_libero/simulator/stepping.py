"""Advances the simulation by one action with one pass of the physics per substep.

robosuite's own loop computes the same physics three times per substep and its controller mostly
in small Python calls; this does it once, to the same result up to the solver's tolerance. A
test compares both.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_libero.simulator.conventions import METRES_PER_UNIT, RADIANS_PER_UNIT

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


SUBSTEPS = 25


class LeanStepper:
    """Steps one robosuite environment; made anew after every reset of it."""

    def __init__(self, mujoco: Any, inner: Any) -> None:
        self._mujoco, self._inner = mujoco, inner
        self._model, self._data = inner.sim.model._model, inner.sim.data._data
        robot = inner.robots[0]
        self._gripper = robot.gripper
        self._site = robot.eef_site_id
        self._joints = np.array(robot._ref_joint_pos_indexes)
        self._freedoms = np.array(robot._ref_joint_vel_indexes)
        self._block = np.ix_(self._freedoms, self._freedoms)
        self._motors = np.array(robot._ref_joint_actuator_indexes)
        self._fingers = np.array(robot._ref_joint_gripper_actuator_indexes)
        self._limits = self._model.actuator_ctrlrange[self._motors].T
        self._finger_limits = self._model.actuator_ctrlrange[self._fingers].T
        self._rest = np.array(robot.controller.initial_joint)
        self._goal_rotation = np.array(robot.controller.goal_ori)
        self._first: ArmState | None = _state_at_reset(robot.controller)
        self._mass = np.zeros((self._model.nv, self._model.nv))
        self._jacobian = np.zeros((6, self._model.nv))

    def advance(self, action: NDArray[np.float64]) -> None:
        """Execute one action of 7 robosuite values."""
        mujoco, model, data = self._mujoco, self._model, self._data
        command = np.clip(action[:6], -1.0, 1.0)
        for substep in range(SUBSTEPS):
            mujoco.mj_step1(model, data)
            state = self._arm_state()
            if self._first is not None:
                state = replace(self._first, bias=state.bias)
                self._first = None
            if substep == 0:
                goal = state.position + METRES_PER_UNIT * command[:3]
                if command[3:].any():
                    self._goal_rotation = turned(state.rotation, RADIANS_PER_UNIT * command[3:])
            effort = torques(state, goal, self._goal_rotation, self._rest)
            data.ctrl[self._motors] = np.clip(effort, *self._limits)
            low, high = self._finger_limits
            wanted = self._gripper.format_action(action[6:])
            data.ctrl[self._fingers] = (low + high) / 2 + (high - low) / 2 * wanted
            mujoco.mj_step2(model, data)

    def _arm_state(self) -> ArmState:
        mujoco, model, data = self._mujoco, self._model, self._data
        mujoco.mj_jacSite(model, data, self._jacobian[:3], self._jacobian[3:], self._site)
        mujoco.mj_fullM(model, self._mass, data.qM)
        return ArmState(
            position=np.array(data.site_xpos[self._site]),
            rotation=np.array(data.site_xmat[self._site]).reshape(3, 3),
            jacobian=self._jacobian[:, self._freedoms],
            mass=self._mass[self._block],
            bias=data.qfrc_bias[self._freedoms],
            joints=data.qpos[self._joints],
            velocities=data.qvel[self._freedoms],
        )


def _state_at_reset(controller: Any) -> ArmState:
    """What robosuite's controller remembers of the reset, before the initial state was set.

    Its first substep of an episode, and the goal of its first action, still go by that. The 10 idle
    steps make it harmless, but it moves the arm by a centimetre, so it is part of the protocol.
    """
    return ArmState(
        position=np.array(controller.ee_pos),
        rotation=np.array(controller.ee_ori_mat),
        jacobian=np.array(controller.J_full),
        mass=np.array(controller.mass_matrix),
        bias=np.zeros(len(controller.joint_pos)),
        joints=np.array(controller.joint_pos),
        velocities=np.array(controller.joint_vel),
    )
