"""Memory of the host: copies to the device that need no waiting, and what a CPU's passes free."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = Sequence[int] | Sequence[float]
HostArray = NDArray[np.uint8] | NDArray[np.bool_]
HostValues = Numbers | Sequence[Numbers] | Sequence[Sequence[Numbers]] | HostArray


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


def keep_freed_memory() -> None:
    """Let the allocator of a Linux process keep what passes free, for the next pass.

    glibc hands the end of its heap back to the system, and a pass that asks for it again pays for
    every page: hundreds of page faults an answer. It keeps twice as much as the largest block that
    was ever freed, if that had no more than 32 MiB.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
