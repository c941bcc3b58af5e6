"""What happened while actions were decoded, and how long each stage took.

While decoding runs, everything stays on the device; it is read once, at the end.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from deft_client.types import DecodeTrace, PassTrace, StageTimings
from deft_policies.decoding.tree import DraftTree


class Stage(Enum):
    """A part of answering an observation; the value is its field in `StageTimings`."""

    PREPARE = "prepare_ms"
    VISION = "vision_ms"
    PREFILL = "prefill_ms"
    DRAFT = "draft_ms"
    VERIFY = "verify_ms"
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


@dataclass(frozen=True)
class PassRecord:
    """One pass over a batch, still on the device; laps are numbers of the clock's laps."""

    is_prefill: bool
    tree: DraftTree
    predictions: Tensor  # [row, node]
    path: Tensor  # [row, step], accepted nodes after the root, padded with anything
    accepted: Tensor  # [row], how many steps of the path count
    bonus: Tensor  # [row], the target's token after the path
    pass_lap: int
    draft_lap: int | None = None


@dataclass(frozen=True)
class Decoded:
    """Actions of a batch, as tokens. Margins are empty where nobody asked for them."""

    tokens: tuple[tuple[int, ...], ...]  # [row, step], executed
    traces: tuple[DecodeTrace, ...]  # [row]


@dataclass(frozen=True)
class Answers:
    """What decoding settled for each position, still on the device."""

    tokens: Tensor  # [row, step], executed
    predicted: Tensor  # [row, step], the target's greedy token given those executed before
    margins: Tensor | None = None  # [row, step], gap between the two largest logits


def read_back(
    method: str,
    answers: Answers,
    records: Sequence[PassRecord],
    clock: StageClock,
    source_names: Sequence[str] = (),
) -> Decoded:
    """Bring the results of a batch to the host; the first read waits for the device."""
    tokens = answers.tokens.tolist()
    predicted = answers.predicted.tolist()
    margins = [()] * len(tokens) if answers.margins is None else answers.margins.tolist()
    passes = [_read_pass(record, clock, source_names) for record in records]
    traces = tuple(
        DecodeTrace(
            method=method,
            tokens=tuple(tokens[row]),
            predicted=tuple(predicted[row]),
            margins=tuple(margins[row]),
            passes=tuple(one[row] for one in passes),
        )
        for row in range(len(tokens))
    )
    return Decoded(tuple(tuple(row) for row in tokens), traces)


def _read_pass(record: PassRecord, clock: StageClock, names: Sequence[str]) -> list[PassTrace]:
    rows = _PassRows.read(record)
    draft_ms = 0.0 if record.draft_lap is None else clock.milliseconds(record.draft_lap)
    pass_ms = clock.milliseconds(record.pass_lap)
    traces = []
    for row in range(len(rows.tokens)):
        real = [node for node, is_real in enumerate(rows.is_real[row]) if is_real]
        number = {node: index for index, node in enumerate(real)}
        sources = rows.sources[row]
        traces.append(
            PassTrace(
                is_prefill=record.is_prefill,
                tokens=tuple(rows.tokens[row][node] for node in real),
                parents=tuple(number.get(rows.parents[row][node], -1) for node in real),
                sources=tuple(names[sources[n]] if sources[n] >= 0 else "" for n in real),
                predictions=tuple(rows.predictions[row][node] for node in real),
                path=tuple(number[node] for node in rows.path[row][: rows.accepted[row]]),
                bonus=rows.bonus[row],
                draft_ms=draft_ms,
                pass_ms=pass_ms,
            )
        )
    return traces


@dataclass(frozen=True)
class _PassRows:
    """A `PassRecord` on the host, row by row."""

    tokens: list[list[int]]
    parents: list[list[int]]
    is_real: list[list[bool]]
    sources: list[list[int]]
    predictions: list[list[int]]
    path: list[list[int]]
    accepted: list[int]
    bonus: list[int]

    @staticmethod
    def read(record: PassRecord) -> "_PassRows":
        tree = record.tree
        return _PassRows(
            tokens=tree.tokens.tolist(),
            parents=tree.parents.tolist(),
            is_real=tree.is_real.tolist(),
            sources=tree.sources.tolist(),
            predictions=record.predictions.tolist(),
            path=record.path.tolist(),
            accepted=record.accepted.tolist(),
            bonus=record.bonus.tolist(),
        )
