"""Capturing steps of fixed shape and replaying them: on CUDA, a pass becomes one launch.

Inputs are copied into tensors that never move, the captured work runs on them, and outputs lie in
tensors that the next replay of the same step overwrites, and no other.
"""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from deft_policies.model.layout import Reserve, Step, Tensors

_log = logging.getLogger(__name__)


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
    """Captures a step the first time its key comes up, replays it from then on.

    Once sealed it captures nothing more: what was not captured by then is run step by step, which
    takes milliseconds longer; capturing would hold up every robot for a good part of a second.
    """

    has_fixed_shapes = True

    def __init__(self, capturer: StepCapturer, reserve: Reserve | None = None) -> None:
        self.reserve = reserve or Reserve()
        self._capturer = capturer
        self._captured: dict[Hashable, CapturedStep] = {}
        self._is_capturing = False
        self._is_sealed = False
        self.uncaptured: set[Hashable] = set()  # what came up after sealing

    @property
    def num_captured(self) -> int:
        """Steps that can be replayed."""
        return len(self._captured)

    def run(self, key: Hashable, step: Step, inputs: Tensors) -> Tensors:
        """Replay the step on new inputs. Outputs are overwritten when the same key runs again."""
        captured = self._captured.get(key)
        if self._is_capturing or (captured is None and self._is_sealed):
            if not self._is_capturing:
                self._note(key)
            return step(*inputs)
        if captured is None:
            captured = self._captured[key] = self._capture(step, inputs)
        _copy_together(captured.inputs, inputs)
        captured.replay()
        return captured.outputs

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Capture what comes up inside of the block, and seal the runner at its end."""
        self._is_sealed = False
        yield
        self._is_sealed = True

    def _capture(self, step: Step, inputs: Tensors) -> CapturedStep:
        own = tuple(tensor.clone() for tensor in inputs)
        self._is_capturing = True  # steps inside of this one become part of it
        try:
            return self._capturer.capture(step, own)
        finally:
            self._is_capturing = False

    def _note(self, key: Hashable) -> None:
        if key not in self.uncaptured:
            self.uncaptured.add(key)
            _log.warning("not captured when the policy warmed up, so run step by step: %s", key)


def _copy_together(kept: Tensors, given: Tensors) -> None:
    """Copy inputs to where they are read, those of one format in one launch."""
    for dtype in {tensor.dtype for tensor in kept}:
        pairs = [pair for pair in zip(kept, given, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([one for one, _ in pairs], [other for _, other in pairs])


class CudaCapturer:
    """Captures CUDA graphs. All share one memory pool, since only one runs at a time."""

    def __init__(self, num_warm_ups: int = 2) -> None:
        self._num_warm_ups = num_warm_ups
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step, inputs: Tensors) -> CapturedStep:
        """Run the step a few times to settle libraries, then capture it.

        Memory of the pool that one graph has done with serves the next, so outputs are copied to
        where no graph computes.
        """
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._num_warm_ups - 1):
                step(*inputs)
            outputs = tuple(tensor.clone() for tensor in step(*inputs))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for kept, new in zip(outputs, step(*inputs), strict=True):
                kept.copy_(new)
        return CapturedStep(inputs, outputs, graph.replay)
