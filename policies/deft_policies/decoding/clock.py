"""Where the time of an answer goes, stage by stage."""

import time
from enum import Enum

import torch

from deft_core.types import StageTimings


class Stage(Enum):
    """A part of answering an observation; the value is its field in `StageTimings`."""

    PREPARE = "prepare_ms"
    VISION = "vision_ms"
    PREFILL = "prefill_ms"
    DRAFT = "draft_ms"
    VERIFY = "verify_ms"
    JUDGE = "judge_ms"
    COMMIT = "commit_ms"
    FINISH = "finish_ms"


Mark = float | torch.cuda.Event
Span = tuple[Stage, Mark, Mark]  # what was done, from when to when


class StageClock:
    """Adds up time by stage, span by span, without making the host wait for the device.

    On a CUDA device a span is between events in the stream; events are read when timings are asked
    for, after the last token has been read.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spans: list[Span] = []
        self._num_taken = 0
        self._last = self._mark()

    def restart(self) -> None:
        """Restart the timer: time since the last mark belongs to no stage."""
        self._last = self._mark()

    def record(self, stage: Stage) -> None:
        """Add the time since the last mark to a stage."""
        start, self._last = self._last, self._mark()
        self._spans.append((stage, start, self._last))

    def pop_spans(self) -> list[Span]:
        """The spans since this was last asked: those of one pass."""
        taken = self._spans[self._num_taken :]
        self._num_taken = len(self._spans)
        return taken

    def timings(self) -> StageTimings:
        """The sums by stage."""
        sums = dict.fromkeys((stage.value for stage in Stage), 0.0)
        for stage, *marks in self._spans:
            sums[stage.value] += milliseconds(*marks)
        return StageTimings(total_ms=sum(sums.values()), **sums)

    def _mark(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def milliseconds(start: Mark, end: Mark) -> float:
    """The time between two marks."""
    if isinstance(start, float) and isinstance(end, float):
        return (end - start) * 1e3
    assert not isinstance(start, float)
    assert not isinstance(end, float)
    end.synchronize()
    return float(start.elapsed_time(end))
