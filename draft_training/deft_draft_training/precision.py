"""In which numbers a training step computes. Weights and their moments are always float32."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


class TrainingPrecision(Enum):
    """Of a step's matrix products."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@contextmanager
def computing_in(precision: TrainingPrecision, device: torch.device) -> Iterator[None]:
    """Compute a forward pass and its loss so; sums and losses stay float32 either way."""
    is_half = precision is TrainingPrecision.BFLOAT16
    # On a CPU, going back through fused attention takes longer in bfloat16 than all the rest.
    is_slow = is_half and device.type == "cpu"
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=is_half),
        sdpa_kernel(SDPBackend.MATH) if is_slow else nullcontext(),
    ):
        yield
