"""Where the time of an answer goes, stage by stage."""

import time
from collections.abc import Container, Iterable
from enum import Enum

import torch

from deft_client.types import StageTimings


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


class StageClock:
    """Adds up time by stage, lap by lap, without making the host wait for the device.

    On a CUDA device a lap is an event in the stream; events are read when timings are asked for,
    after the last token has been.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._laps: list[tuple[Stage, int]] = []
        self._num_taken = 0
        self._marks: list[float | torch.cuda.Event] = []
        self._mark()

    def skip(self) -> None:
        """Start the next lap now; what passed since the last one belongs to no stage."""
        self._mark()

    def lap(self, stage: Stage) -> int:
        """Book the time since the last mark; returns the lap's number, for `milliseconds`."""
        self._laps.append((stage, len(self._marks)))
        self._mark()
        return len(self._laps) - 1

    def take_laps(self) -> range:
        """The numbers of the laps since this was last asked: those of one pass."""
        laps = range(self._num_taken, len(self._laps))
        self._num_taken = len(self._laps)
        return laps

    def sum_ms(self, laps: Iterable[int], stages: Container[Stage]) -> float:
        """How long those of the laps that belong to these stages took."""
        return sum(self.milliseconds(lap) for lap in laps if self._laps[lap][0] in stages)

    def milliseconds(self, lap: int) -> float:
        """How long a lap took."""
        after = self._laps[lap][1]
        start, end = self._marks[after - 1], self._marks[after]
        if isinstance(start, float) and isinstance(end, float):
            return (end - start) * 1e3
        assert not isinstance(start, float)
        assert not isinstance(end, float)
        end.synchronize()
        return float(start.elapsed_time(end))

    def timings(self) -> StageTimings:
        """The sums by stage."""
        sums = dict.fromkeys((stage.value for stage in Stage), 0.0)
        for index, (stage, _) in enumerate(self._laps):
            sums[stage.value] += self.milliseconds(index)
        return StageTimings(total_ms=sum(sums.values()), **sums)

    def _mark(self) -> None:
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)
