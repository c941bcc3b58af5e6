"""What passes leave behind: what is settled on the device, what the host knows, and the trace.

The host reads one small table per round; all else in one transfer, after the last token.
"""

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional

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


@dataclass(frozen=True)
class PassResult:
    """One finished target pass."""

    tree: DraftTree
    predictions: Tensor  # [row, node]
    accepted: AcceptedPath
    next_tokens: Tensor  # [row, step], token after each node of the path; the bonus is among them
    hidden: Tensor  # [row, step, width], the target's at each node of the path
    num_committed: Tensor  # [row], action tokens before the pass, the root included
    is_prefill: bool = False
    scores: Scores | None = None  # at every node; none where rounds are recorded

    def columns(self) -> Tensor:
        """All that a trace tells of the pass, [row, number]."""
        tree, accepted = self.tree, self.accepted
        parts = (tree.tokens, tree.parents, tree.sources, tree.is_real, self.predictions)
        ends = (accepted.path, accepted.num_accepted[:, None], accepted.bonus[:, None])
        return torch.cat((*parts, *ends), dim=1)

    def padded(self, num_nodes: int, num_steps: int) -> "PassResult":
        """The same with nodes that are not real behind, and a path of `num_steps`."""
        nodes = (0, num_nodes - self.tree.num_nodes)
        steps = (0, num_steps - self.next_tokens.shape[1])
        accepted = self.accepted
        return replace(
            self,
            tree=self.tree.padded(num_nodes),
            predictions=functional.pad(self.predictions, nodes),
            accepted=replace(
                accepted,
                path=functional.pad(accepted.path, steps),
                own=functional.pad(accepted.own, steps),
            ),
            next_tokens=functional.pad(self.next_tokens, steps),
            hidden=functional.pad(self.hidden, (0, 0, *steps)),
            scores=None,
        )


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
class Settled:
    """What is settled of a batch after a pass, and all that its next round starts from.

    Nothing but tensors changes from round to round, so that a round can be recorded.
    """

    # One column more than an action has: what overshoots is written there and never read.
    tokens: Tensor  # [row, position + 1], committed; anything beyond `num_committed`
    own: Tensor  # [row, position + 1], the target's own, given what was executed before
    num_committed: Tensor  # [row]
    sums: Tensor  # [row], of all logits so far: not finite where one of them was not
    margins: Tensor | None  # [row, position + 1], gap of the two largest logits, where wanted
    last: PassResult | None = None

    @staticmethod
    def nothing(like: Tensor, wants_margins: bool) -> "Settled":
        """Before the prefill of actions with one token for each [row, position] of `like`."""
        num_rows, length = like.shape
        tokens = torch.zeros(num_rows, length + 1, dtype=torch.int64, device=like.device)
        sums = torch.zeros(num_rows, device=like.device)
        margins = torch.zeros(tokens.shape, device=like.device) if wants_margins else None
        counts = tokens.new_zeros(num_rows)
        return Settled(tokens, torch.zeros_like(tokens), counts, sums, margins)

    @property
    def length(self) -> int:
        """Tokens of one action."""
        return self.tokens.shape[1] - 1

    def progress(self, roots: Tensor, fewest: int) -> BatchProgress:
        """What draft sources may see."""
        return BatchProgress(self.tokens, self.num_committed, roots, fewest, self.length, self.last)

    def padded(self, num_nodes: int) -> "Settled":
        """The same in shapes that do not depend on the last pass."""
        assert self.last is not None
        return replace(self, last=self.last.padded(num_nodes, self.length))

    def table(self) -> Tensor:
        """What the host reads: how many are committed, whether all was finite, tokens, own."""
        counts, is_finite = self.num_committed[:, None], self.sums.isfinite()[:, None]
        here = slice(self.length)
        return torch.cat((counts, is_finite, self.tokens[:, here], self.own[:, here]), dim=1)


@dataclass(frozen=True)
class ActionCost:
    """What one batch has cost in milliseconds, and the passes its rows needed after the prefill."""

    prefill_ms: float  # drafting for it included
    passes_ms: float  # everything after the prefill
    num_passes: tuple[int, ...]  # [row]


@dataclass(frozen=True)
class PassReport:
    """What a pass tells the host, still on the device."""

    table: Tensor  # [row, number], as in `Settled.table`
    columns: Tensor  # [row, number], as in `PassResult.columns`
    num_nodes: int
    has_guesses: bool  # else every row has one token more, and the host needs no telling

    @staticmethod
    def of(settled: Settled) -> "PassReport":
        """Of the pass that has just ended."""
        assert settled.last is not None
        num_nodes = settled.last.tree.num_nodes
        return PassReport(settled.table(), settled.last.columns(), num_nodes, num_nodes > 1)


@dataclass(frozen=True)
class PassRecord:
    """One finished pass, and the laps of the clock in which it was drafted and run."""

    report: PassReport
    is_open: tuple[bool, ...]  # [row], whether the row still missed tokens before the pass
    laps: range

    def ms(self, clock: StageClock) -> float:
        """All of the round."""
        return clock.sum_ms(self.laps, tuple(Stage))


class ActionRun:
    """What the host knows of a batch on its way, and of all its passes when it has ended."""

    def __init__(self, num_rows: int, length: int) -> None:
        self.length = length
        self.records: list[PassRecord] = []
        self.margins: Tensor | None = None  # [row, position], where wanted
        self._counts = [0] * num_rows  # of committed tokens
        self._rows: list[list[int]] | None = None  # the last table, if it was read

    @property
    def is_done(self) -> bool:
        """True once every row has its last token."""
        return self.fewest >= self.length

    @property
    def fewest(self) -> int:
        """Tokens that every row has."""
        return min(self._counts)

    def take(self, report: PassReport, clock: StageClock) -> None:
        """Learn from a pass what was committed."""
        is_open = tuple(count < self.length for count in self._counts)
        self.records.append(PassRecord(report, is_open, clock.take_laps()))
        self._rows = self.read_from_device(report.table) if report.has_guesses else None
        if self._rows is None:
            self._counts = [min(count + 1, self.length) for count in self._counts]
        else:
            self._counts = [row[0] for row in self._rows]

    def read_from_device(self, table: Tensor) -> list[list[int]]:
        """The one read in a round, and so the one place where the host waits for the device."""
        rows: list[list[int]] = table.tolist()
        return rows

    def cost(self, clock: StageClock) -> ActionCost:
        """What the batch has cost."""
        first, *later = self.records
        is_open = zip(*(record.is_open for record in later), strict=True)
        num_passes = tuple(sum(row) for row in is_open) if later else (0,) * len(self._counts)
        return ActionCost(first.ms(clock), sum(one.ms(clock) for one in later), num_passes)

    def read(self, clock: StageClock) -> list[DecodeTrace]:
        """Tell what happened in every row, but not by which method and why.

        Passes after a row was finished are left out of it. They are put into words when somebody
        asks for them, by which time the action has left. Raises `NotFiniteError`.
        """
        length = self.length
        rows = self._rows or self.read_from_device(self.records[-1].report.table)
        require_finite([row[1:2] for row in rows])
        gaps = [[]] * len(rows) if self.margins is None else self.margins.tolist()
        every = torch.cat([one.report.columns for one in self.records], dim=1).cpu()
        return [
            DecodeTrace(
                method="",
                tokens=tuple(row[2 : 2 + length]),
                predicted=tuple(row[2 + length :]),
                margins=tuple(gaps[index]),
                passes=LaterPasses(
                    sum(record.is_open[index] for record in self.records),
                    partial(self._passes, index, every[index], clock),
                ),
            )
            for index, row in enumerate(rows)
        ]

    def _passes(self, row: int, told: Tensor, clock: StageClock) -> Iterator[PassTrace]:
        numbers, start = told.tolist(), 0
        for index, record in enumerate(self.records):
            columns = numbers[start : start + record.report.columns.shape[1]]
            start += len(columns)
            if record.is_open[row]:
                yield _pass_trace(columns, record, clock, is_prefill=index == 0)


class LaterPasses(Sequence[PassTrace]):
    """Passes that are put into words when they are first looked at; how many is known before.

    Equal to any sequence of the same passes. What they are made of is on the host, so that any
    thread may ask.
    """

    def __init__(self, num_passes: int, tell: Callable[[], Iterable[PassTrace]]) -> None:
        self._num_passes = num_passes
        self._tell = tell

    @cached_property
    def _told(self) -> tuple[PassTrace, ...]:
        return tuple(self._tell())

    def __len__(self) -> int:
        return self._num_passes

    @overload
    def __getitem__(self, index: int) -> PassTrace: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PassTrace, ...]: ...
    def __getitem__(self, index: int | slice) -> PassTrace | tuple[PassTrace, ...]:
        return self._told[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._told == tuple(other)

    def __hash__(self) -> int:
        return hash(self._told)

    def __reduce__(self) -> tuple[type[tuple[PassTrace, ...]], tuple[tuple[PassTrace, ...]]]:
        return tuple, (self._told,)


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


def _pass_trace(
    columns: Sequence[int], record: PassRecord, clock: StageClock, is_prefill: bool
) -> PassTrace:
    """One row's pass, without the nodes that were only padding."""
    size = record.report.num_nodes
    tokens, parents, sources, is_real, predictions = (
        columns[start : start + size] for start in range(0, 5 * size, size)
    )
    *path, accepted, bonus = columns[5 * size :]
    real = [node for node, kept in enumerate(is_real) if kept]
    number = {node: index for index, node in enumerate(real)}
    number[-1] = -1
    names = (*(kind.value for kind in source_kinds()), "")  # the root's source is -1: the last
    return PassTrace(
        is_prefill=is_prefill,
        tokens=tuple(tokens[node] for node in real),
        parents=tuple(number[parents[node]] for node in real),
        sources=tuple(names[sources[node]] for node in real),
        predictions=tuple(predictions[node] for node in real),
        path=tuple(number[node] for node in path[1 : accepted + 1]),
        bonus=bonus,
        draft_ms=clock.sum_ms(record.laps, (Stage.DRAFT,)),
        pass_ms=clock.sum_ms(record.laps, (Stage.PREFILL, Stage.VERIFY)),
        judge_ms=clock.sum_ms(record.laps, (Stage.JUDGE,)),
    )
