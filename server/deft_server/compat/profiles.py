"""What each peer's clients do to frames and actions themselves, so that nothing is done twice.

A frame may be prepared by its client, here (the chain of a protocol), or by the policy (its own
chain); which of them does is set explicitly.

OpenVLA's servers leave the camera's rotation, the LIBERO image chain and the gripper to the client;
openpi's and vla-eval's clients send the upright frame and execute what comes back. `/v1/info` shows
this table under `details`.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from deft_client.image_chain import ImageChain
from deft_client.types import ServerInfo
from deft_client.wire.messages import ActMessage
from deft_server.serving.access import Caller
from deft_server.serving.service import Service
from deft_server.settings import Settings


class Gripper(Enum):
    """What the last number of an action says about the gripper."""

    POLICY = "as the policy says it: for OpenVLA 0 closes and 1 opens"
    ROBOSUITE = "+1 closes, -1 opens"


@dataclass(frozen=True)
class PeerProfile:
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


OPENVLA = PeerProfile(
    name="POST /act (openvla)",
    frame="rotated, JPEG round trip, resized and cropped by the client",
    gripper=Gripper.POLICY,
    reply="one array [action_dim], float64",
)
OFT = PeerProfile(
    name="POST /act (oft)",
    frame="rotated by the client",
    gripper=Gripper.POLICY,
    reply="list of arrays [action_dim], float64, one per step of the chunk",
)
OPENPI = PeerProfile(
    name="WebSocket / (openpi)",
    frame="upright, resized by the client",
    gripper=Gripper.ROBOSUITE,
    reply="actions [step, action_dim], float64, executed as they are",
)
REALTIME = PeerProfile(
    name="WebSocket /v1/realtime/robot/openpi (vLLM-Omni)",
    frame="upright, resized by the client",
    gripper=Gripper.ROBOSUITE,
    reply="one array [step, action_dim], float32, executed as it is",
)
VLA_EVAL = PeerProfile(
    name="WebSocket / (vla-eval)",
    frame="upright, as rendered",
    gripper=Gripper.ROBOSUITE,
    reply="one array [action_dim] per observation, float64, executed as it is",
)
ACT_PROFILES = {"openvla": OPENVLA, "oft": OFT}


def conventions(settings: Settings, info: ServerInfo) -> dict[str, str]:
    """Return a sentence about every protocol that is served, by its name."""
    chains = {
        ACT_PROFILES[settings.profile]: settings.act_image_chain,
        OPENPI: settings.socket_image_chain,
        REALTIME: settings.socket_image_chain,
        VLA_EVAL: settings.socket_image_chain,
    }
    return {
        profile.name: profile.sentence(chain, info.image_chain) for profile, chain in chains.items()
    }


ARM_DIMENSIONS = 7  # position, rotation and gripper: the only layout whose gripper is known
_STAYS_S = 10.0


def staying(caller: Caller) -> Caller:
    """Return a caller whose frames wait where others are told to try again.

    Peers' clients know nothing of 429, and could not try again.
    """
    return replace(caller, stays_s=_STAYS_S)


async def prepared(message: ActMessage, chain: ImageChain, service: Service) -> ActMessage:
    """Return the message with its main frame as the chain leaves it, as large as the policy's."""
    if chain is ImageChain.NONE:
        return message
    seen, size = message.observation, service.info.image_height
    image = await service.threads.run(partial(chain.apply, seen.image, size))
    return replace(message, observation=replace(seen, image=image))


def in_convention(actions: NDArray[np.float64], profile: PeerProfile) -> NDArray[np.float64]:
    """Return actions [step, action_dim] with the gripper as the profile's clients expect it.

    Actions of another layout than one arm's (joints of two arms) are sent as the policy says them.
    """
    if profile.gripper is Gripper.POLICY or actions.shape[1] != ARM_DIMENSIONS:
        return actions
    converted = actions.copy()
    # Quicker than numpy for so few.
    converted[:, -1] = [-1.0 if value > 0.5 else 1.0 for value in actions[:, -1].tolist()]
    return converted
