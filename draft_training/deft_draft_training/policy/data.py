"""Training samples of a policy in memory: frames of the model's size, labels and their weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deft_draft_training.errors import DataError


@dataclass(frozen=True)
class AugmentConfig:
    """How far a frame may be changed; 0 everywhere leaves it alone."""

    shift_pixels: int = 3
    brightness: float = 0.15  # largest relative change
    contrast: float = 0.15
    colour: float = 0.05  # largest relative change of one channel against the others


def augment(frames: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Shifted and recoloured copies of uint8 frames [row, height, width, 3]."""
    shifted = _shift(frames.numpy(), config.shift_pixels, generator)
    rows = len(frames)
    gain = 1 + config.brightness * _uniform((rows, 1, 1), generator)
    gain = gain * (1 + config.colour * _uniform((rows, 1, 3), generator))
    contrast = 1 + config.contrast * _uniform((rows, 1, 1), generator)
    centre = torch.from_numpy(shifted.mean(axis=(1, 2, 3), dtype=np.float32)).view(rows, 1, 1)
    codes = torch.arange(256.0).view(256, 1)
    # What becomes of a byte depends on its frame and channel alone: 256 values, not 40,000 pixels.
    becomes = ((codes - centre) * contrast + centre).mul(gain).clamp(0, 255).round()
    for frame, table in zip(shifted, becomes.to(torch.uint8).numpy(), strict=True):
        for channel in range(3):
            frame[..., channel] = table[:, channel][frame[..., channel]]
    return torch.from_numpy(shifted)


def _shift(frames: NDArray[np.uint8], limit: int, generator: torch.Generator) -> NDArray[np.uint8]:
    """Copies of frames, each moved by up to `limit` pixels either way, repeating its border."""
    rows, height, width, _ = frames.shape
    edges = (limit, limit)
    padded = np.pad(frames, ((0, 0), edges, edges, (0, 0)), mode="edge")
    offsets = torch.randint(0, 2 * limit + 1, (rows, 2), generator=generator).tolist()
    cut = [one[y : y + height, x : x + width] for one, (y, x) in zip(padded, offsets, strict=True)]
    return np.stack(cut)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * 2 - 1


@dataclass(frozen=True, eq=False)
class PolicySamples:
    """Samples as parallel arrays. `prompt` indexes the prompts that the data set knows."""

    frames: NDArray[np.uint8]  # [sample, size, size, 3]
    labels: NDArray[np.int64]  # [sample, dim], action tokens
    positions: NDArray[np.float32]  # [sample, value], what the auxiliary head is asked for
    weights: NDArray[np.float32]  # [sample]
    prompt: NDArray[np.int64]  # [sample]

    def __len__(self) -> int:
        return len(self.labels)

    @staticmethod
    def join(parts: Iterable["PolicySamples"], num_samples: int) -> "PolicySamples":
        """All samples of several sets, in order.

        Their number is said beforehand, so that no frame is in memory twice.
        """
        joined: dict[str, NDArray[Any]] = {}
        start = 0
        for part in parts:
            stop = start + len(part)
            for field in fields(PolicySamples):
                rows = getattr(part, field.name)
                if field.name not in joined:
                    joined[field.name] = np.empty((num_samples, *rows.shape[1:]), rows.dtype)
                joined[field.name][start:stop] = rows
            start = stop
        if start == 0:
            raise DataError("there are no samples to train on; record demonstrations first")
        return PolicySamples(**joined)


@dataclass(frozen=True)
class PolicyBatch:
    """One step's samples as tensors."""

    frames: Tensor  # [row, size, size, 3] uint8
    labels: Tensor  # [row, dim]
    positions: Tensor  # [row, value]
    weights: Tensor  # [row]
    prompts: Tensor  # [row, text], right-padded
    lengths: Tensor  # [row]

    def to(self, device: torch.device) -> "PolicyBatch":
        """The same batch on a device."""
        moved = {one.name: getattr(self, one.name).to(device) for one in fields(self)}
        return PolicyBatch(**moved)


class PromptTable:
    """Prompts of a data set as one right-padded tensor."""

    def __init__(self, ids: Sequence[Sequence[int]]) -> None:
        self.ids = pad_sequence([torch.tensor(one) for one in ids], batch_first=True)
        self.lengths = torch.tensor([len(one) for one in ids])


def chosen_at(num_samples: int, batch_size: int, seed: int, step: int) -> NDArray[np.int64]:
    """Indices of a step's samples: every sample once an epoch, in an order of its own.

    A pure function of the step, so that a resumed run sees what the killed one would have seen.
    """
    per_epoch = num_samples // batch_size
    if per_epoch == 0:
        raise DataError(
            f"a batch of {batch_size} needs at least as many samples, got {num_samples}"
        )
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    return order[place * batch_size : (place + 1) * batch_size]


def take(samples: PolicySamples, prompts: PromptTable, chosen: NDArray[np.int64]) -> PolicyBatch:
    """The named samples as a batch."""
    names = ("frames", "labels", "positions", "weights")
    columns = {name: torch.from_numpy(getattr(samples, name)[chosen]) for name in names}
    prompt = torch.from_numpy(samples.prompt[chosen])
    return PolicyBatch(**columns, prompts=prompts.ids[prompt], lengths=prompts.lengths[prompt])
