"""How each project's clients and servers speak. Our client and our server read the same table.

OpenVLA's servers leave the camera's rotation, the LIBERO image chain and the gripper to the client;
openpi's and vla-eval's clients send the upright frame and execute what comes back.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deft_core.types import ChunkBlending, Image

ARM_DIMENSIONS = 7  # position, rotation and gripper: the only layout whose gripper is known


class Gripper(Enum):
    """What the last number of an action means."""

    DATASET = "dataset"  # 1 open, 0 close: what OpenVLA's policies were trained on
    ROBOSUITE = "robosuite"  # -1 open, +1 close: what the simulator takes

    @property
    def meaning(self) -> str:
        """In words, for /v1/info and for clients that ask."""
        if self is Gripper.ROBOSUITE:
            return "+1 closes, -1 opens"
        return "as the policy says it: for OpenVLA 0 closes and 1 opens"


class ClientChain(Enum):
    """What a client does to a frame before it sends it."""

    NONE = "none"
    LIBERO = "libero"  # JPEG round trip, lanczos3 to 224, centre crop: OpenVLA's evaluation
    LIBERO_UNCROPPED = "libero-uncropped"  # the same for fine-tunes without image augmentation
    RESIZE_WITH_PAD = "resize-with-pad"  # bilinear to 224, black bars: openpi's evaluation


@dataclass(frozen=True)
class Convention:
    """One project's conventions.

    `executed_steps` is how many actions of an answer its client executes before it sends the next
    observation; None means all of them. `weights` are of the answers of an ensemble, the newest
    first.
    """

    name: str
    gripper: Gripper = Gripper.DATASET
    client_chain: ClientChain = ClientChain.NONE
    executed_steps: int | None = None
    wrist_camera: bool = False
    blending: ChunkBlending = ChunkBlending.WAIT
    weights: tuple[float, ...] = ()
    # Of our server, where its clients may call, for /v1/info:
    endpoint: str = ""
    frame: str = ""  # what the client has done to the frame before it is sent
    reply: str = ""

    @property
    def asks_deft(self) -> bool:
        """Whether evaluations ask in our own protocol."""
        return self.name in ("deft", "vla0")

    def sentence(self, chain: str, policy_chain: str, policys_gripper: str = "") -> str:
        """Say it in one line; `chain` is what the endpoint does to frames.

        `policys_gripper` is what the policy itself says of its gripper, where it says anything.
        """
        gripper = self.gripper.meaning
        if self.gripper is Gripper.DATASET and policys_gripper:
            gripper = policys_gripper
        return (
            f"frames: {self.frame}, then {chain!r} by this protocol and {policy_chain!r} by "
            f"the policy; gripper: {gripper}; reply: {self.reply}"
        )

    def from_policy(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Actions [step, action_dim] with the gripper as the clients expect it.

        Actions of another layout than one arm's (joints of two arms) are sent as the policy says.
        """
        if self.gripper is Gripper.DATASET or actions.shape[-1] != ARM_DIMENSIONS:
            return actions
        return to_robosuite(actions)


DEFT = Convention(
    "deft",
    endpoint="POST /v1/act, WebSocket /v1/stream (deft)",
    frame="upright, as a person would see it",
    reply="actions [step, action_dim], float64, as the policy says them",
)
OPENVLA = Convention(
    "openvla",
    client_chain=ClientChain.LIBERO,
    executed_steps=1,
    endpoint="POST /act (openvla)",
    frame="rotated, JPEG round trip, resized and cropped by the client",
    reply="one array [action_dim], float64",
)
OFT = Convention(
    "oft",
    wrist_camera=True,
    endpoint="POST /act (oft)",
    frame="rotated by the client",
    reply="list of arrays [action_dim], float64, one per step of the chunk",
)
OPENPI = Convention(
    "openpi",
    Gripper.ROBOSUITE,
    ClientChain.RESIZE_WITH_PAD,
    executed_steps=5,
    wrist_camera=True,
    endpoint="WebSocket / (openpi)",
    frame="upright, resized by the client",
    reply="actions [step, action_dim], float64, executed as they are",
)
REALTIME = Convention(
    "realtime",
    Gripper.ROBOSUITE,
    endpoint="WebSocket /v1/realtime/robot/openpi (vLLM-Omni)",
    frame="upright, resized by the client",
    reply="one array [step, action_dim], float32, executed as it is",
)
VLA_EVAL = Convention(
    "vla-eval",
    Gripper.ROBOSUITE,
    endpoint="WebSocket / (vla-eval)",
    frame="upright, as rendered",
    reply="one array [action_dim] per observation, float64, executed as it is",
)
VLA0 = Convention(
    "vla0",
    Gripper.ROBOSUITE,
    executed_steps=1,
    wrist_camera=True,
    blending=ChunkBlending.ENSEMBLE,
    weights=(1.0,) + (0.5,) * 7,
    endpoint="POST /predict_base64 (VLA-0)",
    frame="rotated by the client",
    reply="list of lists [step][action_dim], as the policy says it",
)
CONVENTIONS = {one.name: one for one in (DEFT, OPENVLA, OFT, OPENPI, REALTIME, VLA_EVAL, VLA0)}


def to_robosuite(actions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Actions [..., 7] of the training data's dialect as the simulator wants them.

    A gripper of exactly 0.5 closes: vla-eval's clients expect one of two values. The input is kept.
    """
    converted = np.array(actions, dtype=np.float64)
    converted[..., -1] = np.where(converted[..., -1] > 0.5, -1.0, 1.0)
    return converted


def from_robosuite(actions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Actions [..., 7] of the simulator in the training data's dialect; undoes `to_robosuite`."""
    converted = np.array(actions, dtype=np.float64)
    converted[..., -1] = 1.0 - np.clip(converted[..., -1], 0.0, 1.0)
    return converted


def upright(rendered: Image) -> Image:
    """Turn a frame as OpenGL delivers it (first row at the bottom) by half a turn."""
    return np.ascontiguousarray(rendered[::-1, ::-1])
