"""Capturing steps of fixed shape and replaying them: on CUDA, a pass becomes one launch.

Inputs are copied into tensors that never move, the captured work runs on them, and outputs lie in
tensors that the next replay overwrites.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from deft_policies.model.layout import Step, Tensors


@dataclass(frozen=True)
class CapturedStep:
    """A step that was captured: replaying it reads `inputs` and overwrites `outputs`."""

    inputs: Tensors
    outputs: Tensors
    replay: Callable[[], None]


class StepCapturer(Protocol):
    """Turns a step into something that can be replayed."""

    def capture(self, step: Step, inputs: Tensors) -> CapturedStep:
        """Capture `step(*inputs)`. The inputs are the capturer's to keep."""


class CapturedRunner:
    """Captures a step the first time its key comes up, replays it from then on."""

    has_fixed_shapes = True

    def __init__(self, capturer: StepCapturer) -> None:
        self._capturer = capturer
        self._captured: dict[Hashable, CapturedStep] = {}

    def run(self, key: Hashable, step: Step, inputs: Tensors) -> Tensors:
        """Replay the step on new inputs. Outputs are overwritten when the same key runs again."""
        captured = self._captured.get(key)
        if captured is None:
            own = tuple(tensor.clone() for tensor in inputs)
            captured = self._capturer.capture(step, own)
            self._captured[key] = captured
        for kept, given in zip(captured.inputs, inputs, strict=True):
            kept.copy_(given, non_blocking=True)
        captured.replay()
        return captured.outputs

    def forget(self) -> None:
        """Drop what was captured, because the memory they point to is gone."""
        self._captured.clear()


class CudaCapturer:
    """Captures CUDA graphs. All share one memory pool, since only one runs at a time."""

    def __init__(self, num_warm_ups: int = 2, fuses_kernels: bool = False) -> None:
        """`fuses_kernels` compiles every step before capturing it: fewer kernels, minutes more."""
        self._num_warm_ups = num_warm_ups
        self._fuses_kernels = fuses_kernels
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step, inputs: Tensors) -> CapturedStep:
        """Run the step a few times to settle libraries, then capture it."""
        if self._fuses_kernels:
            step = torch.compile(step, fullgraph=True, dynamic=False)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._num_warm_ups):
                step(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = step(*inputs)
        return CapturedStep(inputs, outputs, graph.replay)
