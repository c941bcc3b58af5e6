"""Recording passes of fixed shape and replaying them: on CUDA, a pass becomes one launch.

Inputs are copied into tensors that never move, the recorded work runs on them, and outputs lie in
tensors that the next replay overwrites.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from deft_policies.model.layout import Step, Tensors


@dataclass(frozen=True)
class Recording:
    """A recorded step: replaying it reads `inputs` and overwrites `outputs`."""

    inputs: Tensors
    outputs: Tensors
    replay: Callable[[], None]


class Recorder(Protocol):
    """Turns a step into something that can be replayed."""

    def record(self, step: Step, inputs: Tensors) -> Recording:
        """Record `step(*inputs)`. The inputs are the recorder's to keep."""


class RecordedRunner:
    """Records a step the first time its key comes up, replays it from then on."""

    has_fixed_shapes = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recordings: dict[Hashable, Recording] = {}

    @property
    def num_recordings(self) -> int:
        """Distinct steps recorded so far."""
        return len(self._recordings)

    def run(self, key: Hashable, step: Step, inputs: Tensors) -> Tensors:
        """Replay the step on new inputs. Outputs are overwritten when the same key runs again."""
        recording = self._recordings.get(key)
        if recording is None:
            own = tuple(tensor.clone() for tensor in inputs)
            recording = self._recorder.record(step, own)
            self._recordings[key] = recording
        for kept, given in zip(recording.inputs, inputs, strict=True):
            kept.copy_(given, non_blocking=True)
        recording.replay()
        return recording.outputs

    def forget(self) -> None:
        """Drop every recording, because the memory they point to is gone."""
        self._recordings.clear()


class CudaRecorder:
    """Captures CUDA graphs. All share one memory pool, since only one runs at a time."""

    def __init__(self, num_warm_ups: int = 2, fuses_kernels: bool = False) -> None:
        """`fuses_kernels` compiles every step before capturing it: fewer kernels, minutes more."""
        self._num_warm_ups = num_warm_ups
        self._fuses_kernels = fuses_kernels
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step, inputs: Tensors) -> Recording:
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
        return Recording(inputs, outputs, graph.replay)
