"""A server with its profile's conventions around it: simulator frames in, robosuite actions out."""

import time
import typing
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_client.image_chain import ImageChain
from deft_client.libero.errors import PeerAnswerError, SelectionError
from deft_client.libero.simulator import conventions
from deft_client.types import ActionChunk, Image, Observation, ServerInfo


class Protocol(Enum):
    """How observations travel."""

    DEFT = "deft"  # POST /v1/act
    OPENVLA = "openvla"  # POST /act, JSON with numpy arrays
    OFT = "oft"  # POST /act, several cameras in, a list of actions out
    OPENPI = "openpi"  # WebSocket, msgpack with numpy arrays


class GripperConvention(Enum):
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
    gripper: GripperConvention
    client_chain: ClientChain
    executed_steps: int | None = None
    wrist_camera: bool = False


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("deft", Protocol.DEFT, GripperConvention.DATASET, ClientChain.NONE),
        Profile(
            "openvla",
            Protocol.OPENVLA,
            GripperConvention.DATASET,
            ClientChain.LIBERO,
            executed_steps=1,
        ),
        Profile(
            "oft", Protocol.OFT, GripperConvention.DATASET, ClientChain.NONE, wrist_camera=True
        ),
        Profile(
            "openpi",
            Protocol.OPENPI,
            GripperConvention.ROBOSUITE,
            ClientChain.RESIZE_WITH_PAD,
            executed_steps=5,
            wrist_camera=True,
        ),
    )
}


def check_chain(profile: Profile, info: ServerInfo | None) -> None:
    """Raise SelectionError if frames would go through an image chain on both sides.

    `info` is what a Deft server says about itself; None for the servers of other projects, which
    say nothing and leave the chain to their clients.
    """
    if info is None or profile.client_chain is ClientChain.NONE:
        return
    if info.image_chain != ClientChain.NONE.value:
        raise SelectionError(
            f"the server applies the image chain {info.image_chain!r} itself, and so would this "
            f"client with profile {profile.name!r}; start the server with another chain, or leave "
            "the frames alone here with --image-chain none"
        )


OPENPI_SIZE = 224


class EpisodePolicy(typing.Protocol):
    """Who answers during an episode. Actions are in robosuite's units."""

    def start(self, session_id: str) -> None:
        """Begin an episode: what was remembered of another one is void."""

    def act(self, observation: Observation) -> ActionChunk:
        """Answer an observation."""

    def close(self) -> None:
        """Free connections."""


class ProfilePolicy:
    """A policy with its profile's conventions around it, at the far end of a network.

    Applies the client's share of the image chain, and turns answers into robosuite's units. A
    policy of this process has no profile: it answers in those units, and a call is its round trip.
    """

    def __init__(
        self, peer: EpisodePolicy, profile: Profile | None, network_delay_ms: float = 0.0
    ) -> None:
        self._peer = peer
        self._profile = profile
        self._delay_ms = network_delay_ms  # half before and half after the call

    def start(self, session_id: str) -> None:
        """Begin an episode."""
        self._peer.start(session_id)

    def act(self, observation: Observation) -> ActionChunk:
        """The actions that follow a simulator frame; the client's own work counts as preparing."""
        started = time.perf_counter()
        own_ms = 0.0
        if self._profile is not None and self._profile.client_chain is not ClientChain.NONE:
            observation = _prepared(observation, self._profile.client_chain)
            own_ms = 1000 * (time.perf_counter() - started)
        time.sleep(self._delay_ms / 2000)
        asked = time.perf_counter()
        chunk = self._peer.act(observation)
        trip_ms = chunk.timings.round_trip_ms
        if self._profile is None:
            trip_ms = 1000 * (time.perf_counter() - asked)
        time.sleep(self._delay_ms / 2000)
        timings = replace(
            chunk.timings,
            prepare_ms=chunk.timings.prepare_ms + own_ms,
            round_trip_ms=trip_ms + own_ms + self._delay_ms,
        )
        actions = chunk.actions
        if self._profile is not None:
            actions = _in_robosuite_units(actions, self._profile.gripper)
        return replace(chunk, actions=actions, timings=timings)

    def close(self) -> None:
        """Free connections."""
        self._peer.close()


def _prepared(observation: Observation, chain: ClientChain) -> Observation:
    cameras = {name: apply_chain(chain, image) for name, image in observation.cameras.items()}
    return replace(observation, image=apply_chain(chain, observation.image), cameras=cameras)


def _in_robosuite_units(
    actions: NDArray[np.float64], gripper: GripperConvention
) -> NDArray[np.float64]:
    if actions.shape[1] != conventions.ACTION_DIM:
        raise PeerAnswerError(
            f"the server answers actions of {actions.shape[1]} numbers; LIBERO's robot takes "
            f"{conventions.ACTION_DIM}: is this the right policy?"
        )
    if gripper is GripperConvention.ROBOSUITE:
        return actions
    return np.stack([conventions.to_robosuite(action) for action in actions])


def apply_chain(chain: ClientChain, image: Image) -> Image:
    """One frame as the server expects it."""
    if chain is ClientChain.RESIZE_WITH_PAD:
        return resize_with_pad(image, OPENPI_SIZE)
    return ImageChain(chain.value).apply(image)


def resize_with_pad(image: Image, size: int) -> Image:
    """Scale to fit a square without distortion, bilinear, black bars around it."""
    height, width = image.shape[:2]
    scale = size / max(height, width)
    shape = (max(1, round(width * scale)), max(1, round(height * scale)))
    resized = PillowImage.fromarray(image).resize(shape, PillowImage.Resampling.BILINEAR)
    square = PillowImage.new("RGB", (size, size))
    square.paste(resized, ((size - shape[0]) // 2, (size - shape[1]) // 2))
    return np.asarray(square)
