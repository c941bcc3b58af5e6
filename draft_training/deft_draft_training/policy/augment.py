"""Small random changes of camera frames, the same for no two samples of a batch.

They act on uint8 frames of the model's own size, before normalisation, so that what the model
sees in training stays within what its image processor can produce.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor


@dataclass(frozen=True)
class AugmentConfig:
    """How far a frame may be changed; 0 everywhere leaves it alone."""

    shift_pixels: int = 3
    brightness: float = 0.15  # largest relative change
    contrast: float = 0.15
    colour: float = 0.05  # largest relative change of one channel against the others


def augment(frames: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Shifted and recoloured copies of uint8 frames [row, height, width, 3]."""
    shifted = _shift(frames, config.shift_pixels, generator)
    rows = len(frames)
    gain = 1 + config.brightness * _uniform((rows, 1, 1, 1), generator)
    gain = gain * (1 + config.colour * _uniform((rows, 1, 1, 3), generator))
    contrast = 1 + config.contrast * _uniform((rows, 1, 1, 1), generator)
    values = shifted.float()
    centre = values.mean(dim=(1, 2, 3), keepdim=True)
    return ((values - centre) * contrast + centre).mul(gain).clamp(0, 255).round().to(torch.uint8)


def _shift(frames: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    """Move each frame by up to `limit` pixels either way, repeating its border."""
    if limit == 0:
        return frames
    rows, height, width, _ = frames.shape
    padded = F.pad(frames.permute(0, 3, 1, 2).float(), (limit,) * 4, mode="replicate")
    padded = padded.to(torch.uint8).permute(0, 2, 3, 1)
    offsets = torch.randint(0, 2 * limit + 1, (rows, 2), generator=generator)
    row = torch.arange(rows)[:, None, None]
    down = (offsets[:, :1] + torch.arange(height))[:, :, None]
    along = (offsets[:, 1:] + torch.arange(width))[:, None, :]
    return padded[row, down, along]


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * 2 - 1
