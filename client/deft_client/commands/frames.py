"""Frames for commands that measure a server and have no camera."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deft_core.errors import UsageError
from deft_core.types import ActOptions, Image, Observation, ServerInfo

MOST_BYTES = 2**28  # of recorded pictures that are kept


def noise_frames(info: ServerInfo, seed: int, count: int) -> list[Observation]:
    """Return pictures of noise, and a state, as the policy wants them."""
    chance = np.random.default_rng(seed)
    shape = (info.image_height, info.image_width, 3)
    instruction = info.instructions[seed % len(info.instructions)] if info.instructions else "wait"

    def picture() -> Image:
        return chance.integers(0, 256, shape, np.uint8)

    return [
        Observation(
            picture(),
            instruction,
            {f"wrist_{number}": picture() for number in range(1, info.num_pictures)},
            None if info.state_dim is None else np.zeros(info.state_dim, np.float32),
        )
        for _ in range(count)
    ]


def recorded_frames(path: Path, cameras: Sequence[str]) -> list[list[Observation]]:
    """Return the frames of a data set's first episodes, by episode: as many as are kept."""
    from deft_core.datasets.formats import read_dataset

    episodes: list[list[Observation]] = []
    num_bytes = 0
    for episode in read_dataset(path, cameras):
        frames: list[Observation] = []
        for step in episode.steps():
            pictures = (step.observation.image, *step.observation.cameras.values())
            num_bytes += sum(picture.nbytes for picture in pictures)
            if num_bytes > MOST_BYTES and (frames or episodes):
                break
            frames.append(step.observation)
        if frames:
            episodes.append(frames)
        if num_bytes > MOST_BYTES:
            break
    if not episodes:
        raise UsageError(f"{path}: no frames in it")
    return episodes


def usual_options(info: ServerInfo) -> ActOptions:
    """Return options that name statistics where the server has no default.

    Elsewhere they name none, so that recordings of these frames can be replayed by any policy.
    """
    if info.default_statistics_key is not None or not info.statistics_keys:
        return ActOptions()
    return ActOptions(statistics_key=info.statistics_keys[0])
