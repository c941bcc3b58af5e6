"""What passes leave behind: results on the device, times, and the trace that is read at the end.

The host reads what happened in one transfer, after the last token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from deft_client.types import DecodeTrace, PassTrace, StageTimings
from deft_policies.decoding.plan import source_kinds
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree
from deft_policies.decoding.verify import AcceptedPath
from deft_policies.errors import NotFiniteError


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
class PassResult:
    """One finished target pass."""

    tree: DraftTree
    scores: Scores
    predictions: Tensor  # [row, node]
    accepted: AcceptedPath
    next_tokens: Tensor  # [row, step], token after each node of the path; the bonus is among them
    num_committed: Tensor  # [row], action tokens before the pass, the root included
    is_open: tuple[bool, ...]  # [row], whether the row still missed tokens before the pass
    is_prefill: bool = False


@dataclass(frozen=True)
class BatchProgress:
    """How far a batch of actions has come."""

    tokens: Tensor  # [row, position + 1], committed; anything beyond `num_committed`
    num_committed: Tensor  # [row]
    roots: Tensor  # [row], the last committed token
    fewest: int  # of num_committed over unfinished rows, known to the host
    length: int  # tokens of one action
    last: PassResult | None  # None before the prefill

    @property
    def depth(self) -> int:
        """Levels of the deepest tree that is still of use: the last token needs no guess."""
        return self.length - 1 - self.fewest


@dataclass(frozen=True)
class ActionCost:
    """What one batch has cost in milliseconds, and the passes its rows needed after the prefill."""

    prefill_ms: float  # drafting for it included
    passes_ms: float  # everything after the prefill
    num_passes: tuple[int, ...]  # [row]


@dataclass(frozen=True)
class PassRecord:
    """One finished pass, and the laps of the clock in which it was drafted, run and judged."""

    result: PassResult
    pass_lap: int
    judge_lap: int
    draft_lap: int
    commit_lap: int | None = None  # of what the pass before it had to keep

    def ms(self, clock: StageClock) -> float:
        """All of the round."""
        laps = (self.pass_lap, self.judge_lap, self.draft_lap, self.commit_lap)
        return sum(clock.milliseconds(lap) for lap in laps if lap is not None)


@dataclass(frozen=True)
class ActionRun:
    """A finished batch, still on the device."""

    tokens: Tensor  # [row, position], executed
    own: Tensor  # [row, position], the target's own token given those executed before
    margins: Tensor | None  # [row, position], gap between the two largest logits there
    is_finite: Tensor  # [row], whether all logits of all passes were
    records: tuple[PassRecord, ...]

    def cost(self, clock: StageClock) -> ActionCost:
        """What the batch has cost."""
        first, *later = self.records
        is_open = zip(*(record.result.is_open for record in later), strict=True)
        num_passes = tuple(sum(row) for row in is_open) if later else (0,) * len(self.tokens)
        return ActionCost(first.ms(clock), sum(one.ms(clock) for one in later), num_passes)

    def read(self, clock: StageClock) -> list[DecodeTrace]:
        """Tell what happened in every row, but not by which method and why.

        Passes after a row was finished are left out of it. Raises `NotFiniteError`.
        """
        first = [self.tokens, self.own, self.is_finite[:, None]]
        numbers = _read_together([*first, *_columns(self.records)])
        tokens, own, is_finite = numbers[:3]
        require_finite(is_finite)
        margins = [[]] * len(tokens) if self.margins is None else self.margins.tolist()
        passes: list[list[PassTrace]] = [[] for _ in tokens]
        for index, record in enumerate(self.records):
            start = len(first) + index * _NUM_COLUMNS
            columns = numbers[start : start + _NUM_COLUMNS]
            laps = (record.draft_lap, record.pass_lap, record.judge_lap)
            times = tuple(clock.milliseconds(lap) for lap in laps)
            for row, is_open in enumerate(record.result.is_open):
                if is_open:
                    one = _pass_trace([column[row] for column in columns], record, times)
                    passes[row].append(one)
        return [
            DecodeTrace(
                method="",
                tokens=tuple(tokens[row]),
                predicted=tuple(own[row]),
                margins=tuple(margins[row]),
                passes=tuple(passes[row]),
            )
            for row in range(len(tokens))
        ]


def require_finite(is_finite: Sequence[Sequence[int]]) -> None:
    """Raise `NotFiniteError` unless every row's one value is true."""
    broken = [row for row, (is_fine,) in enumerate(is_finite) if not is_fine]
    if broken:
        raise NotFiniteError(
            f"the model's logits hold NaN or infinity in rows {broken} of {len(is_finite)}; its "
            "weights or its number format are broken, nothing was answered"
        )


def cost_of_plain(traces: Sequence[DecodeTrace]) -> ActionCost:
    """What a batch without any guesses has cost: the same for all of its rows."""
    first, *later = traces[0].passes
    return ActionCost(first.pass_ms, sum(one.pass_ms for one in later), (len(later),) * len(traces))


_NUM_COLUMNS = 8


def _columns(records: Sequence[PassRecord]) -> list[Tensor]:
    columns: list[Tensor] = []
    for record in records:
        tree, accepted = record.result.tree, record.result.accepted
        columns += [
            tree.tokens,
            tree.parents,
            tree.sources,
            tree.is_real,
            record.result.predictions,
            accepted.path,
            accepted.num_accepted[:, None],
            accepted.bonus[:, None],
        ]
    return columns


def _read_together(parts: Sequence[Tensor]) -> list[list[list[int]]]:
    """Read many [row, width] integer tensors at the price of one transfer."""
    flat = torch.cat([part.flatten() for part in parts]).tolist()
    read, start = [], 0
    for part in parts:
        num_rows, width = part.shape
        read.append(
            [flat[start + row * width : start + (row + 1) * width] for row in range(num_rows)]
        )
        start += num_rows * width
    return read


def _pass_trace(
    columns: Sequence[list[int]], record: PassRecord, times: tuple[float, ...]
) -> PassTrace:
    """One row's pass, without the nodes that were only padding."""
    tokens, parents, sources, is_real, predictions, path, accepted, bonus = columns
    real = [node for node, kept in enumerate(is_real) if kept]
    number = {node: index for index, node in enumerate(real)}
    number[-1] = -1
    names = (*(kind.value for kind in source_kinds()), "")  # the root's source is -1: the last
    return PassTrace(
        is_prefill=record.result.is_prefill,
        tokens=tuple(tokens[node] for node in real),
        parents=tuple(number[parents[node]] for node in real),
        sources=tuple(names[sources[node]] for node in real),
        predictions=tuple(predictions[node] for node in real),
        path=tuple(number[node] for node in path[1 : accepted[0] + 1]),
        bonus=bonus[0],
        draft_ms=times[0],
        pass_ms=times[1],
        judge_ms=times[2],
    )
