"""What a CUDA graph does, on a CPU: records operations with their memory, and repeats them.

A replay runs no Python of the step: it repeats the recorded operations on the recorded memory. So
what the step read of the host is frozen, and what lay outside of the recording must still be
there: a tensor that nobody else holds any more is an error, as it would be garbage on a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from deft_policies.model.graphs import CapturedStep, Step, Tensors

# These make the host wait for the device, which no recording can.
_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"}


class OutsideTensor:
    """A tensor that was there before the recording: remembered, but not held."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._like = tensor.new_empty(0)
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._name = name

    def find(self) -> Tensor:
        """The memory as it is now."""
        if self._storage.expired():
            raise RuntimeError(f"{self._name} reads a tensor from outside the recording that died")
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        found = self._like.new_empty(0)
        found.set_(storage, *self._place)
        return found


@dataclass(frozen=True)
class Operation:
    """One recorded call; its results go to where they lay when it was recorded."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Tensor, ...]  # none where they alias what was given

    def repeat(self) -> None:
        args, kwargs = tree_map(_find, (self.args, self.kwargs))
        found = tree_flatten(self.func(*args, **kwargs))[0]
        if self.results:
            for kept, new in zip(self.results, found, strict=True):
                if isinstance(kept, Tensor):
                    kept.copy_(new)


def _find(value: object) -> object:
    return value.find() if isinstance(value, OutsideTensor) else value


class Recording(TorchDispatchMode):
    """Records everything inside of the block."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._inside = {_address(tensor) for tensor in inputs}
        self._held: list[object] = list(inputs)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS:
            raise RuntimeError(f"{name} makes the host wait for the device inside of a recording")
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        results = tree_flatten(found)[0]
        self._held.append(found)  # its memory is the recording's now
        made = {_address(one) for one in results if isinstance(one, Tensor)}
        given = {
            _address(one) for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)
        }
        is_alias = made <= given  # whatever it is called: `flatten` copies where it has to
        self._inside |= made - given
        if func._schema.is_mutable or not is_alias:
            held = tree_map(lambda value: self._hold(value, name), (tuple(args), dict(kwargs)))
            self.operations.append(Operation(func, *held, () if is_alias else tuple(results)))
        return found

    def _hold(self, value: object, name: str) -> object:
        if not isinstance(value, Tensor) or _address(value) in self._inside:
            return value
        return OutsideTensor(value, name)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class RecordingCapturer:
    """Captures steps operation by operation."""

    def __init__(self) -> None:
        self.num_captured = 0

    def capture(self, step: Step, inputs: Tensors) -> CapturedStep:
        self.num_captured += 1
        with Recording(inputs) as recording:
            outputs = step(*inputs)
        operations = recording.operations

        def replay() -> None:
            for operation in operations:
                operation.repeat()

        return CapturedStep(inputs, outputs, replay)


def frozen(step: Callable[..., Tensors], *inputs: Tensor) -> CapturedStep:
    """A step captured on its own."""
    return RecordingCapturer().capture(step, inputs)
