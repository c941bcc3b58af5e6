"""A server with its profile's conventions around it: simulator frames in, robosuite actions out."""

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_client.image_chain import ImageChain
from deft_client.libero import conventions
from deft_client.libero.episode import EpisodePolicy
from deft_client.libero.evaluate_errors import PeerAnswerError
from deft_client.libero.profiles import ClientChain, Gripper, Profile
from deft_client.types import ActionChunk, Image, Observation

OPENPI_SIZE = 224


class ProfilePolicy:
    """Applies the client's share of the image chain, and turns answers into robosuite's units."""

    def __init__(self, peer: EpisodePolicy, profile: Profile) -> None:
        self._peer = peer
        self._profile = profile

    def start(self, session_id: str) -> None:
        """Begin an episode."""
        self._peer.start(session_id)

    def act(self, observation: Observation) -> ActionChunk:
        """The actions that follow a simulator frame; the client's own work counts as preparing."""
        started = time.perf_counter()
        prepared = self._prepared(observation)
        own_ms = 1000 * (time.perf_counter() - started)
        chunk = self._peer.act(prepared)
        if self._profile.client_chain is not ClientChain.NONE:
            timings = chunk.timings
            timings = replace(
                timings,
                prepare_ms=timings.prepare_ms + own_ms,
                round_trip_ms=timings.round_trip_ms + own_ms,
            )
            chunk = replace(chunk, timings=timings)
        return replace(chunk, actions=self._in_robosuite_units(chunk.actions))

    def close(self) -> None:
        """Close the connection."""
        self._peer.close()

    def _prepared(self, observation: Observation) -> Observation:
        chain = self._profile.client_chain
        if chain is ClientChain.NONE:
            return observation
        return replace(
            observation,
            image=apply_chain(chain, observation.image),
            cameras={
                name: apply_chain(chain, image) for name, image in observation.cameras.items()
            },
        )

    def _in_robosuite_units(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        if actions.shape[1] != conventions.ACTION_DIM:
            raise PeerAnswerError(
                f"the server answers actions of {actions.shape[1]} numbers; LIBERO's robot takes "
                f"{conventions.ACTION_DIM}: is this the right policy?"
            )
        if self._profile.gripper is Gripper.ROBOSUITE:
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
