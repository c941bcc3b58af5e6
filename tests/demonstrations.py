"""Demonstrations of nothing in particular, for tests of whatever reads them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deft_core.datasets.demonstrations import (
    PRIVILEGED,
    Demonstration,
    DemonstrationHeader,
    episode_path,
)
from tiny_libero_recipe.demonstration_writer import encode_frame, save_demonstration

INSTRUCTIONS = ("pick up the butter", "open the top drawer")


def write_demonstrations(
    folder: Path, episodes: int = 3, steps: int = 4, instructions: Sequence[str] = INSTRUCTIONS
) -> Path:
    """Episodes whose frames drift slowly from one random picture to another."""
    for number in range(episodes):
        instruction = instructions[number % len(instructions)]
        episode = _episode(number, steps, instruction)
        save_demonstration(episode_path(folder, 0, number), episode)
    return folder


def _episode(number: int, steps: int, instruction: str) -> Demonstration:
    generator = np.random.default_rng(number)
    low, high = generator.integers(0, 256, (2, 4, 4, 3))
    mixes = np.linspace(0, 1, steps)[:, None, None, None]
    blocks = (low * (1 - mixes) + high * mixes).astype(np.uint8)
    frames = np.repeat(np.repeat(blocks, 16, axis=1), 16, axis=2)
    labels = generator.uniform(-1, 1, (steps, 7)).astype(np.float32)
    labels[:, 6] = labels[:, 6] > 0
    return Demonstration(
        header=DemonstrationHeader(
            suite="libero_object",
            task=0,
            episode=number,
            trial=number,
            instruction=instruction,
            succeeded=number != 2,
            assets="none",
            seed=0,
            noise_sigma=0.0,
            widened_metres=0.0,
            frame_size=64,
            encoding="png",
            phases=("approach", "close"),
        ),
        encoded=[encode_frame(frame, "png") for frame in frames],
        labels=labels,
        executed=labels,
        state=np.zeros((steps, 8), np.float32),
        privileged=generator.normal(size=(steps, len(PRIVILEGED))).astype(np.float32),
        phase=np.arange(steps, dtype=np.uint8) % 2,
        simulator=np.zeros((steps, 10)),
    )
