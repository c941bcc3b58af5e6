"""Counts what would be launched on a GPU, operation by operation, on any device."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

# These allocate or describe memory; nothing runs on the device.
_NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh"}
# Out of place with a matrix to add: the library copies that first.
_TWO_LAUNCHES = {"addmm"}


def num_launches(operation: OpOverload, arguments: Sequence[Any]) -> int:
    """How many kernels one operation starts; copies to the host count as one."""
    name = operation.overloadpacket.__name__
    if operation.is_view or name in _NO_LAUNCH:
        return 0
    return 2 if name in _TWO_LAUNCHES and arguments[0].dim() == 2 else 1


class LaunchCounter(TorchDispatchMode):
    """Counts the launches of everything inside the block by the operation's name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All of them."""
        return self.counts.total()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.counts[func.overloadpacket.__name__] += num_launches(func, args)
        return func(*args, **(kwargs or {}))


def is_tensor(value: object) -> bool:
    """For the trees of arguments that operations take."""
    return isinstance(value, torch.Tensor)
