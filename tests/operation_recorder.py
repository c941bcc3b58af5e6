"""What a CUDA graph does, on a CPU and to the letter: operations, not Python, run again.

A recorded step knows the memory it read and wrote when it was captured and nothing else, so what it
took from an attribute, a list or a closure stays as it was then.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from deft_policies.model.graphs import CapturedStep
from deft_policies.model.layout import Step, Tensors


@dataclass
class Operation:
    """One call of the library, with the tensors it was given and those it gave."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]

    def run(self) -> None:
        """Do it again, into the memory it wrote to."""
        again, _ = tree_flatten(self.function(*self.args, **self.kwargs))
        for kept, new in zip(
            self.outputs, (x for x in again if isinstance(x, Tensor)), strict=True
        ):
            if kept.data_ptr() != new.data_ptr() and kept.numel() > 0:
                kept.copy_(new)


class Recording(TorchDispatchMode):
    """Writes down every operation, and what was read that neither came in nor was made inside."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.outside: dict[int, Tensor] = {}
        self._known = {one.untyped_storage().data_ptr() for one in inputs}
        self._kept: list[Tensor] = list(inputs)  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for one in tree_flatten((args, kwargs))[0]:
            if isinstance(one, Tensor):
                address = one.untyped_storage().data_ptr()
                if address not in self._known:
                    self.outside[address] = one
        result = func(*args, **kwargs)
        outputs = [one for one in tree_flatten(result)[0] if isinstance(one, Tensor)]
        self._known |= {one.untyped_storage().data_ptr() for one in outputs}
        self._kept += outputs
        self.operations.append(Operation(func, args, kwargs, outputs))
        return result


@dataclass
class RecordingCapturer:
    """A capturer of operations. `outside` is what its recordings read beside their inputs."""

    num_captured: int = 0
    outside: dict[int, Tensor] = field(default_factory=dict)

    def capture(self, step: Step, inputs: Tensors) -> CapturedStep:
        self.num_captured += 1
        step(*inputs)  # what is made once and remembered is made before
        recording = Recording(inputs)
        with recording:
            outputs = step(*inputs)
        self.outside |= recording.outside

        def replay() -> None:
            for operation in recording.operations:
                operation.run()

        return CapturedStep(inputs, outputs, replay)
