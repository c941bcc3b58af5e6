"""Host values on their way to the device, without the host waiting for what it is at work on."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = Sequence[int] | Sequence[float]
HostValues = Numbers | Sequence[Numbers] | Sequence[Sequence[Numbers]] | NDArray[np.uint8]


def to_device(
    values: HostValues, device: torch.device | None, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor of host values on a device.

    CUDA copies from pinned memory behind everything that is queued, while the host goes on; from
    other memory it would make the host wait until the queue is empty.
    """
    staged = torch.as_tensor(values, dtype=dtype)
    if device is None or device.type == "cpu":
        return staged
    if device.type == "cuda":
        staged = staged.pin_memory()
    return staged.to(device, non_blocking=True)
