"""Capturing steps of fixed shape and replaying them: on CUDA, a pass becomes one launch.

Inputs are copied into tensors that never move, the captured work runs on them, and outputs lie in
tensors that the next replay of the same step overwrites, and no other.
"""

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_log = logging.getLogger(__name__)

Tensors = tuple[Tensor, ...]
Step = Callable[..., Tensors]
LENGTH_STEP = 16  # captured prompts have multiples of so many positions
_SHARES = (1 / 8, 1 / 4, 3 / 8, 5 / 8, 1)  # of the way to the longest prompt: most are short


@dataclass(frozen=True)
class Reserve:
    """What memory is set aside for, and passes are captured for, before the first frame."""

    rows: int = 8
    shortest: int = 16  # positions of a prompt, patches included
    longest: int = 320

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions of captured prompts, the shortest first; others are padded to the next."""
        span = self.longest - self.shortest
        counts = [math.ceil((self.shortest + share * span) / LENGTH_STEP) for share in _SHARES]
        return tuple(dict.fromkeys(LENGTH_STEP * count for count in counts))

    def padded(self, num_positions: int) -> int | None:
        """The captured length that a prompt is padded to; None where it is too long."""
        return next((length for length in self.lengths if length >= num_positions), None)

    @property
    def batches(self) -> tuple[int, ...]:
        """Every number of rows that is captured, the largest first."""
        return tuple(1 << power for power in reversed(range((self.rows - 1).bit_length() + 1)))


@dataclass(frozen=True)
class CapturedStep:
    """A step that was captured: replaying it reads `inputs` and overwrites `outputs`."""

    inputs: Tensors
    outputs: Tensors
    replay: Callable[[], None]
    outside: Tensors = ()  # what it reads besides, which must not be freed before it


# Captures `step(*inputs)`. The inputs are the capture's to keep.
Capture = Callable[[Step, Tensors], CapturedStep]


class StepRunner:
    """Runs steps as they come; with a `capture`, captures each when its key first comes up.

    Once sealed it captures nothing more: what was not captured by then is run step by step, which
    takes milliseconds longer; capturing would hold up every robot for a good part of a second.
    """

    def __init__(self, capture: Capture | None = None, reserve: Reserve | None = None) -> None:
        # What passes of fixed shapes are for; without it, passes have any shape.
        self.reserve = reserve or (None if capture is None else Reserve())
        self._capture = capture
        self._captured: dict[Hashable, CapturedStep] = {}
        self._is_capturing = False
        self._is_sealed = False
        self.uncaptured: set[Hashable] = set()  # what came up after sealing

    @property
    def num_captured(self) -> int:
        """Steps that can be replayed."""
        return len(self._captured)

    def run(self, key: Hashable, step: Step, inputs: Tensors) -> Tensors:
        """Return what `step(*inputs)` returns; valid until the same key runs again.

        `key` names the step and every shape and number baked into it.
        """
        if self._capture is None or self._is_capturing:
            return step(*inputs)
        captured = self._captured.get(key)
        if captured is None:
            if self._is_sealed:
                self.note(key)
                return step(*inputs)
            captured = self._captured[key] = self._capture_step(self._capture, step, inputs)
        _copy(captured.inputs, inputs)
        captured.replay()
        return captured.outputs

    def run_batch(self, key: Hashable, step: Step, inputs: Tensors) -> Tensors:
        """The same for tensors of so many rows each, padded to a captured batch if there is one."""
        num_rows = len(inputs[0])
        if self.reserve is not None and num_rows <= self.reserve.rows:
            inputs = tuple(_pad_batch(tensor) for tensor in inputs)
        shapes = tuple(tensor.shape for tensor in inputs)
        return tuple(output[:num_rows] for output in self.run((key, shapes), step, inputs))

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """A block in which steps are captured; once it has ended, no more are."""
        self._is_sealed = False
        yield
        self._is_sealed = True

    def _capture_step(self, capture: Capture, step: Step, inputs: Tensors) -> CapturedStep:
        own = tuple(tensor.clone() for tensor in inputs)
        self._is_capturing = True  # steps inside of this one become part of it
        try:
            step(*own)  # settles libraries, and makes what is remembered from then on
            with _Outside(own) as outside:
                captured = capture(step, own)
        finally:
            self._is_capturing = False
        return replace(captured, outside=tuple(outside.held.values()))

    def note(self, key: Hashable) -> None:
        """Say once that something was not captured."""
        if key not in self.uncaptured:
            self.uncaptured.add(key)
            _log.warning("not captured when the policy warmed up, so run step by step: %s", key)


def _pad_batch(values: Tensor) -> Tensor:
    """The batch with copies of its first row behind, up to the next power of two."""
    missing = (1 << (len(values) - 1).bit_length()) - len(values)
    if missing == 0:
        return values
    return torch.cat((values, values[:1].expand(missing, *values.shape[1:])))


def _copy(targets: Tensors, sources: Tensors) -> None:
    """Copy tensors to where they are read, those of one format in one launch."""
    for dtype in {tensor.dtype for tensor in targets}:
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([one for one, _ in pairs], [other for _, other in pairs])


class _Outside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Holds the tensors that a step reads and has not made: replays read them too.

    Who made them may forget them, as a cache of limited size does; what a replay then read would
    be anything. Programs that are launched without operations read weights and caches alone.
    """

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: dict[int, Tensor] = {}
        self._made = {_address(tensor) for tensor in inputs}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs)):
            if _address(tensor) not in self._made:
                self.held[_address(tensor)] = tensor
        self._made |= {_address(one) for one in _tensors(outputs)} - self.held.keys()
        return outputs


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@cache
def _stream_of(device: int) -> "torch.cuda.Stream":
    """One for all captures: whatever multiplies on a stream leaves it a workspace for good."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def capture_on_cuda(pool: Any, step: Step, inputs: Tensors) -> CapturedStep:
    """Run the step once more on a stream of its own, then capture it as a CUDA graph.

    All graphs share the memory of one `pool`, since only one runs at a time. What one graph has
    done with serves the next, so outputs are copied to where no graph computes.
    """
    stream = _stream_of(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = tuple(tensor.clone() for tensor in step(*inputs))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for kept, new in zip(outputs, step(*inputs), strict=True):
            kept.copy_(new)
    return CapturedStep(inputs, outputs, graph.replay)
