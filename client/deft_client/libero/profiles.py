"""Which conventions a server expects of its client, by the project it comes from.

The same episode goes wrong in four ways with four servers if one of these is mixed up, so each is
named, printed in every result, and checked against what a Deft server says about itself.
"""

from dataclasses import dataclass
from enum import Enum

from deft_client.libero.evaluate_errors import ProfileError
from deft_client.types import ServerInfo


class Protocol(Enum):
    """How observations travel."""

    DEFT = "deft"  # POST /v1/act
    OPENVLA = "openvla"  # POST /act, JSON with numpy arrays
    OFT = "oft"  # POST /act, several cameras in, a list of actions out
    OPENPI = "openpi"  # WebSocket, msgpack with numpy arrays


class Gripper(Enum):
    """What the last number of an answered action means."""

    DATASET = "dataset"  # 1 open, 0 close: what OpenVLA's policies were trained on
    ROBOSUITE = "robosuite"  # -1 open, +1 close: what the simulator takes


class ClientChain(Enum):
    """What the client does to a frame before it sends it."""

    NONE = "none"
    LIBERO = "libero"  # JPEG round trip, lanczos3 to 224, centre crop: OpenVLA's evaluation
    LIBERO_UNCROPPED = "libero-uncropped"  # the same for fine-tunes without image augmentation
    RESIZE_WITH_PAD = "resize-with-pad"  # bilinear to 224, black bars: openpi's evaluation


@dataclass(frozen=True)
class Profile:
    """The conventions of one project's server.

    `executed_steps` is how many actions of an answer are executed before the next observation is
    sent; None means all of them.
    """

    name: str
    protocol: Protocol
    gripper: Gripper
    client_chain: ClientChain
    executed_steps: int | None = None
    wrist_camera: bool = False


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("deft", Protocol.DEFT, Gripper.DATASET, ClientChain.NONE),
        Profile("openvla", Protocol.OPENVLA, Gripper.DATASET, ClientChain.LIBERO, executed_steps=1),
        Profile("oft", Protocol.OFT, Gripper.DATASET, ClientChain.NONE, wrist_camera=True),
        Profile(
            "openpi",
            Protocol.OPENPI,
            Gripper.ROBOSUITE,
            ClientChain.RESIZE_WITH_PAD,
            executed_steps=5,
            wrist_camera=True,
        ),
    )
}


def check_chain(profile: Profile, info: ServerInfo | None) -> None:
    """Raise ProfileError if frames would go through an image chain on both sides.

    `info` is what a Deft server says about itself; None for the servers of other projects, which
    say nothing and leave the chain to their clients.
    """
    if info is None or profile.client_chain is ClientChain.NONE:
        return
    if info.image_chain != ClientChain.NONE.value:
        raise ProfileError(
            f"the server applies the image chain {info.image_chain!r} itself, and so would this "
            f"client with profile {profile.name!r}; start the server with another chain, or leave "
            "the frames alone here with --image-chain none"
        )
