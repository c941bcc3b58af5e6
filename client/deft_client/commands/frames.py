"""Frames for commands that measure a server and have no camera."""

import numpy as np

from deft_client.types import ActOptions, Image, Observation, ServerInfo


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


def usual_options(info: ServerInfo) -> ActOptions:
    """Return options that name statistics even where the server has no default."""
    keys = info.default_statistics_key, *info.statistics_keys
    return ActOptions(statistics_key=next((key for key in keys if key is not None), None))
