"""What each peer's clients do to frames and actions themselves, so that nothing is done twice.

A frame may be prepared by its client, here (the chain of a protocol), or by the policy (its own
chain); which of them does is set explicitly.

OpenVLA's servers leave the camera's rotation, the LIBERO image chain and the gripper to the client;
openpi's and vla-eval's clients send the upright frame and execute what comes back. `/v1/info` shows
this table under `details`.
"""

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deft_client.image_chain import ImageChain
from deft_client.wire.messages import ActMessage


class ActProfile(Enum):
    """Which of OpenVLA's two servers `POST /act` stands in for."""

    OPENVLA = "openvla"  # one bare array per reply
    OFT = "oft"  # a list of arrays, one per action of the chunk


class Gripper(Enum):
    """What the last number of an action says about the gripper."""

    POLICY = "as the policy says it: for OpenVLA 0 closes and 1 opens"
    ROBOSUITE = "+1 closes, -1 opens"


@dataclass(frozen=True)
class Profile:
    """One protocol's conventions."""

    name: str
    frame: str  # what the client has done to the frame before it is sent
    gripper: Gripper
    reply: str

    def sentence(self, chain: ImageChain, policy_chain: str) -> str:
        """Say it in one line, for /v1/info."""
        return (
            f"frames: {self.frame}, then {chain.value!r} by this protocol and {policy_chain!r} by "
            f"the policy; gripper: {self.gripper.value}; reply: {self.reply}"
        )


OPENVLA = Profile(
    name="POST /act (openvla)",
    frame="rotated, JPEG round trip, resized and cropped by the client",
    gripper=Gripper.POLICY,
    reply="one array [action_dim], float64",
)
OFT = Profile(
    name="POST /act (oft)",
    frame="rotated by the client",
    gripper=Gripper.POLICY,
    reply="list of arrays [action_dim], float64, one per step of the chunk",
)
OPENPI = Profile(
    name="WebSocket / (openpi)",
    frame="upright, resized by the client",
    gripper=Gripper.ROBOSUITE,
    reply="actions [step, action_dim], float64, executed as they are",
)
VLA_EVAL = Profile(
    name="WebSocket / (vla-eval)",
    frame="upright, as rendered",
    gripper=Gripper.ROBOSUITE,
    reply="one array [action_dim] per observation, float64, executed as it is",
)
GROOT = Profile(
    name="ZMQ (groot)",
    frame="upright, as rendered",
    gripper=Gripper.ROBOSUITE,
    reply="one array [batch, step, 1] per dimension, float64",
)
ACT_PROFILES = {ActProfile.OPENVLA: OPENVLA, ActProfile.OFT: OFT}


def prepare(message: ActMessage, chain: ImageChain, size: int) -> ActMessage:
    """Return the message with its main frame as the chain leaves it, `size` pixels a side."""
    if chain is ImageChain.NONE:
        return message
    image = chain.apply(message.observation.image, size)
    return replace(message, observation=replace(message.observation, image=image))


def in_convention(actions: NDArray[np.float64], profile: Profile) -> NDArray[np.float64]:
    """Return actions [step, action_dim] with the gripper as the profile's clients expect it."""
    if profile.gripper is Gripper.POLICY:
        return actions
    converted = actions.copy()
    # Quicker than numpy for so few.
    converted[:, -1] = [-1.0 if value > 0.5 else 1.0 for value in actions[:, -1].tolist()]
    return converted
