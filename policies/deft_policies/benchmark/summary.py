"""From a run's answers to the numbers that are reported. Pure; prints nothing."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.results.statistics import Percentiles, percentiles
from deft_client.types import DecodeTrace
from deft_policies.benchmark.replay import Replay
from deft_policies.benchmark.speedup import Speedup
from deft_policies.decoding.acceptance.rule import ActionSpace, DimensionGroup

# Stage names as users know them, and their fields.
STAGES = (
    ("preprocess", "prepare_ms"),
    ("vision", "vision_ms"),
    ("prefill", "prefill_ms"),
    ("draft", "draft_ms"),
    ("decode", "verify_ms"),
    ("judge", "judge_ms"),
    ("commit", "commit_ms"),
    ("post", "finish_ms"),
)


@dataclass(frozen=True)
class Speed:
    """How long a contender took for one answer, in all and by stage."""

    name: str
    batch_size: int
    num_answers: int
    total: Percentiles
    stages: dict[str, Percentiles]
    chunk_length: int = 1

    @property
    def actions_per_s(self) -> float:
        """At the median, if whole chunks are executed."""
        return 1e3 * self.batch_size * self.chunk_length / self.total.p50


@dataclass(frozen=True)
class Decoding:
    """How a contender decoded, and how its actions differ from plain decoding's.

    Accepted and committed lengths are those of passes that checked drafts. `accepted_shares` tells
    which share of them kept 0, 1, 2... `committed_by_start` is the mean committed length of those
    whose first draft stands at each token, 0 where none does. `committed_by_pass` and
    `drafted_by_position` are means over the actions that have such a pass or position. Differences
    are over the tokens of all actions; units are 0 where unknown.
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
    speedup: Speedup | None = None  # None where nothing was drafted behind the prefill
    rule: str = ""  # with its numbers, and the plans that were used; empty where nothing drafts
    wait: str | None = None  # the line of its rule that makes the host wait for the device


def summarise_speed(run: Replay) -> Speed:
    """Quantiles of a run. Totals are wall-clock times around the whole call."""
    timings = [answer.chunk.timings for answer in run.answers]
    return Speed(
        name=run.contender.name,
        batch_size=run.contender.batch_size,
        num_answers=len(run.answers),
        total=percentiles([answer.wall_ms for answer in run.answers]),
        stages={
            stage: percentiles([getattr(timing, field) for timing in timings])
            for stage, field in STAGES
        },
        chunk_length=len(run.answers[0].chunk.actions),
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
    committed = [one.committed_length for own in own_traces for one in own.checked_passes]
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
        drafted_by_position=drafted_by_position(own_traces),
        speedup=Speedup.of(own_traces, [other for _, other, _ in pairs]),
        rule=_rule_of(own_traces),
    )


def _rule_of(traces: Sequence[DecodeTrace]) -> str:
    """How drafts were judged, and which plans made them how often."""
    if not traces or not traces[0].rule:
        return ""
    plans = Counter(trace.plan for trace in traces)
    return f"{traces[0].rule}; plans: " + ", ".join(f"{one} {num}x" for one, num in plans.items())


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
    lengths = [one.accepted_length for trace in traces for one in trace.checked_passes]
    return tuple(
        lengths.count(length) / len(lengths) for length in range(max(lengths, default=-1) + 1)
    )


def _committed_by_start(traces: list[DecodeTrace]) -> tuple[float, ...]:
    rows: list[list[float | None]] = []
    for trace in traces:
        row: list[float | None] = []
        for one in trace.passes:
            counted = one.committed_length if one.has_drafts else None
            row += [counted, *[None] * one.accepted_length]
        rows.append(row[: len(trace.tokens)])  # the published loop passes over the end as well
    return _column_means(rows)


def _committed_by_pass(traces: list[DecodeTrace]) -> tuple[float, ...]:
    return _column_means([[one.committed_length for one in trace.passes] for trace in traces])


def drafted_by_position(traces: Sequence[DecodeTrace]) -> tuple[float, ...]:
    """Share of the tokens at each position that were accepted drafts, not the target's own."""
    rows = []
    for trace in traces:
        drafted: list[float] = []
        for one in trace.passes:
            drafted += [1.0] * one.accepted_length + [0.0]
        rows.append(drafted[: len(trace.tokens)])
    return _column_means(rows)


def _column_means(rows: Iterable[Sequence[float | None]]) -> tuple[float, ...]:
    """By position, over the rows that have a number there; 0 where none has."""
    columns = zip_longest(*rows)
    return tuple(_mean([one for one in column if one is not None]) for column in columns)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
