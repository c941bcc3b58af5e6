"""From a run's answers to the numbers that are reported. Pure; prints nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_client.types import DecodeTrace, StageTimings
from deft_policies.benchmark.replay import Replay
from deft_policies.decoding.acceptance.rule import ActionSpace, DimensionGroup

# Stage names as users know them, and their fields.
STAGES = (
    ("preprocess", "prepare_ms"),
    ("vision", "vision_ms"),
    ("prefill", "prefill_ms"),
    ("draft", "draft_ms"),
    ("decode", "verify_ms"),
    ("commit", "commit_ms"),
    ("post", "finish_ms"),
)


@dataclass(frozen=True)
class Quantiles:
    """Of milliseconds, and their mean."""

    p50: float
    p95: float
    p99: float
    mean: float

    @staticmethod
    def of(values: Sequence[float]) -> "Quantiles":
        """Of at least one value."""
        p50, p95, p99 = np.percentile(np.array(values), [50, 95, 99])
        return Quantiles(float(p50), float(p95), float(p99), float(np.mean(values)))


@dataclass(frozen=True)
class Speed:
    """How long a contender took for one answer, in all and by stage."""

    name: str
    batch_size: int
    num_answers: int
    total: Quantiles
    stages: dict[str, Quantiles]

    @property
    def actions_per_s(self) -> float:
        """At the median."""
        return 1e3 * self.batch_size / self.total.p50


@dataclass(frozen=True)
class Decoding:
    """How a contender decoded, and how its actions differ from plain decoding's.

    Of the passes that had guesses, `accepted_shares` tells which share kept 0, 1, 2... of them.
    `committed_by_start` is the mean committed length of passes that start at each token, 0 where
    none does. `committed_by_pass` and `drafted_by_position` are means over the actions that have
    such a pass or position. Differences are over the tokens of all actions; units are 0 where
    unknown.
    """

    name: str
    passes: float
    committed: float
    relaxed_share: float
    equal_actions: float
    mean_bins: float
    max_bins: int
    mean_mm: float
    mean_deg: float
    accepted_shares: tuple[float, ...]
    committed_by_start: tuple[float, ...]
    committed_by_pass: tuple[float, ...]
    drafted_by_position: tuple[float, ...]


def summarise_speed(run: Replay) -> Speed:
    """Quantiles of a run. Totals are wall-clock times around the whole call."""
    timings = [answer.chunk.timings for answer in run.answers]
    return Speed(
        name=run.contender.name,
        batch_size=run.contender.batch_size,
        num_answers=len(run.answers),
        total=Quantiles.of([answer.wall_ms for answer in run.answers]),
        stages={
            stage: Quantiles.of([_stage_ms(timing, field) for timing in timings])
            for stage, field in STAGES
        },
    )


def summarise_decoding(run: Replay, plain: Replay, spaces: Sequence[ActionSpace]) -> Decoding:
    """Compare a run with plain decoding of the same frames; `spaces` is per frame."""
    traces = [answer.chunk.trace for answer in run.answers]
    reference = [answer.chunk.trace for answer in plain.answers]
    pairs = [
        (own, other, space)
        for own, other, space in zip(traces, reference, spaces, strict=True)
        if own is not None and other is not None
    ]
    bins = [_bins_apart(own, other) for own, other, _ in pairs]
    passes = [own.num_passes for own, _, _ in pairs if own.num_passes]
    own_traces = [own for own, _, _ in pairs]
    committed = [one.committed_length for own in own_traces for one in own.passes]
    return Decoding(
        name=run.contender.name,
        passes=_mean(passes),
        committed=_mean(committed),
        relaxed_share=_mean([own.relaxed_share for own in own_traces]),
        equal_actions=_mean([own.tokens == other.tokens for own, other, _ in pairs]),
        mean_bins=_mean([float(one.mean()) for one in bins]),
        max_bins=max((int(one.max()) for one in bins), default=0),
        mean_mm=_mean_distance(bins, [space for _, _, space in pairs], DimensionGroup.MOVE),
        mean_deg=_mean_distance(bins, [space for _, _, space in pairs], DimensionGroup.TURN),
        accepted_shares=_accepted_shares(own_traces),
        committed_by_start=_committed_by_start(own_traces),
        committed_by_pass=_committed_by_pass(own_traces),
        drafted_by_position=_drafted_by_position(own_traces),
    )


def _stage_ms(timings: StageTimings, field: str) -> float:
    value: float = getattr(timings, field)
    return value


def _bins_apart(own: DecodeTrace, other: DecodeTrace) -> NDArray[np.int64]:
    apart: NDArray[np.int64] = np.abs(np.array(own.tokens) - np.array(other.tokens))
    return apart


def _mean_distance(
    bins: list[NDArray[np.int64]], spaces: Sequence[ActionSpace], group: DimensionGroup
) -> float:
    """Mean over the positions of the group whose unit is known."""
    moved = [
        float(apart) * unit
        for row, space in zip(bins, spaces, strict=True)
        for apart, unit, own in zip(row, space.unit_per_bin, space.groups, strict=True)
        if own is group and unit > 0.0
    ]
    return _mean(moved)


def _accepted_shares(traces: list[DecodeTrace]) -> tuple[float, ...]:
    lengths = [
        one.accepted_length for trace in traces for one in trace.passes if len(one.tokens) > 1
    ]
    return tuple(
        lengths.count(length) / len(lengths) for length in range(max(lengths, default=-1) + 1)
    )


def _committed_by_start(traces: list[DecodeTrace]) -> tuple[float, ...]:
    longest = max((len(trace.tokens) for trace in traces), default=0)
    lengths: list[list[int]] = [[] for _ in range(longest)]
    for trace in traces:
        start = 0
        for one in trace.passes:
            lengths[start].append(one.committed_length)
            start += one.committed_length
    return tuple(_mean(found) for found in lengths)


def _committed_by_pass(traces: list[DecodeTrace]) -> tuple[float, ...]:
    longest = max((len(trace.passes) for trace in traces), default=0)
    return tuple(
        _mean([t.passes[index].committed_length for t in traces if len(t.passes) > index])
        for index in range(longest)
    )


def _drafted_by_position(traces: list[DecodeTrace]) -> tuple[float, ...]:
    """Share of the tokens at each position that were accepted drafts, not the target's own."""
    shares: list[list[bool]] = []
    for trace in traces:
        drafted: list[bool] = []
        for one in trace.passes:
            drafted += [True] * one.accepted_length + [False]
        shares.append(drafted[: len(trace.tokens)])
    longest = max((len(row) for row in shares), default=0)
    return tuple(
        _mean([row[position] for row in shares if len(row) > position])
        for position in range(longest)
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
