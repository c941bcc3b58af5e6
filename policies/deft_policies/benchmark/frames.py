"""The observations a benchmark replays: recorded episodes, listed pictures, or generated ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from deft_client.recordings import find_episodes, iterate_steps
from deft_client.types import Image, Observation
from deft_policies.base import Policy
from deft_policies.commands.act import load_image, read_cases
from deft_policies.errors import PolicyError

_INSTRUCTIONS = (
    "pick up the black bowl between the plate and the ramekin and place it on the plate",
    "put the white mug on the left plate",
    "open the top drawer",
)


@dataclass(frozen=True, eq=False)
class Frame:
    """An observation and the episode it belongs to: frames of one share a session."""

    observation: Observation
    episode: str
    statistics_key: str | None = None


def read_recordings(root: Path, limit: int) -> list[Frame]:
    """The first frames of the recordings under a directory."""
    frames = list(islice(_recorded(root), limit))
    if not frames:
        raise PolicyError(f"{root}: no recorded frames; record some with `deft serve --record DIR`")
    return frames


def read_pictures(path: Path, limit: int) -> list[Frame]:
    """The pictures that the lines of a file name, as for `deft act`."""
    return [
        Frame(
            Observation(load_image(case.image), case.instruction),
            case.session_id or f"line {number}",
            case.statistics_key,
        )
        for number, case in enumerate(read_cases(path)[:limit])
    ]


def generate_frames(count: int, seed: int = 0, size: int = 256) -> list[Frame]:
    """Blobs that drift over a fixed background, one instruction per ten frames."""
    rng = np.random.default_rng(seed)
    return [
        Frame(
            Observation(image, _INSTRUCTIONS[index // 10 % len(_INSTRUCTIONS)]),
            f"episode {index // 10}",
        )
        for index, image in enumerate(_scene(rng, count, size))
    ]


def with_statistics_key(frames: Sequence[Frame], policy: Policy) -> list[Frame]:
    """Frames that name no statistics get the first there are, where the policy has no default.

    Which ones they are changes units, not times.
    """
    info = policy.info
    if info.default_statistics_key is not None:
        return list(frames)
    first = info.statistics_keys[0]
    return [replace(frame, statistics_key=frame.statistics_key or first) for frame in frames]


def _recorded(root: Path) -> Iterator[Frame]:
    for path in find_episodes(root):
        for step in iterate_steps(path):
            yield Frame(step.observation, str(path), step.options.statistics_key)


def _scene(rng: np.random.Generator, count: int, size: int) -> Sequence[Image]:
    across, down = np.meshgrid(np.arange(size), np.arange(size))
    background = rng.integers(60, 160, (8, 8, 3)).repeat(size // 8, 0).repeat(size // 8, 1)
    centres = rng.uniform(0.2, 0.8, (3, 2)) * size
    speeds = rng.uniform(-0.01, 0.01, (3, 2)) * size
    colours = rng.integers(0, 256, (3, 3))
    images = []
    for step in range(count):
        image = background.copy()
        for centre, speed, colour in zip(centres, speeds, colours, strict=True):
            x, y = centre + speed * step
            image[(across - x) ** 2 + (down - y) ** 2 < (size * 0.08) ** 2] = colour
        noise = rng.integers(-2, 3, image.shape)
        images.append(np.clip(image + noise, 0, 255).astype(np.uint8))
    return images
