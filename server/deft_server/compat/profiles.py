"""What each peer's clients do to frames and actions themselves, so that nothing is done twice.

OpenVLA's servers leave the camera's rotation, the LIBERO image chain and the gripper to the client;
openpi's and vla-eval's clients send the upright frame and execute what comes back. `/v1/info` shows
this table under `details`.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


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

    def sentence(self, image_chain: str) -> str:
        """Say it in one line, for /v1/info."""
        return (
            f"frames: {self.frame}; the server then applies {image_chain!r}; "
            f"gripper: {self.gripper.value}; reply: {self.reply}"
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
ACT_PROFILES = {ActProfile.OPENVLA: OPENVLA, ActProfile.OFT: OFT}


def in_convention(actions: NDArray[np.float64], profile: Profile) -> NDArray[np.float64]:
    """Return actions [step, action_dim] with the gripper as the profile's clients expect it."""
    if profile.gripper is Gripper.POLICY:
        return actions
    converted = actions.copy()
    converted[:, -1] = np.where(actions[:, -1] > 0.5, -1.0, 1.0)
    return converted
