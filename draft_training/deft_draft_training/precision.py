"""In which numbers a training step computes. Weights and their moments are always float32."""

from contextlib import AbstractContextManager
from enum import Enum

import torch


class TrainingPrecision(Enum):
    """Of a step's matrix products."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def computing_in(
    precision: TrainingPrecision, device: torch.device
) -> AbstractContextManager[object]:
    """Compute a forward pass and its loss so; sums and losses stay float32 either way."""
    is_half = precision is TrainingPrecision.BFLOAT16
    return torch.autocast(device.type, torch.bfloat16, enabled=is_half)
