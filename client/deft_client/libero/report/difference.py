"""Two runs on the same episodes: what differs, how sure that is, and what would make it sure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deft_client.libero.report.phases import (
    ArmPhase,
    degrees_apart,
    millimetres_apart,
    phases_of,
)
from deft_client.libero.report.speed import SpeedUp, speedup_of
from deft_client.libero.report.tables import LUCK, Comparison, compare, points_text
from deft_client.libero.report.trace_metrics import passes_of
from deft_client.libero.results.records import EpisodeRecord, Outcome
from deft_client.libero.results.statistics import (
    Interval,
    bootstrap_interval,
    paired_interval,
    pairs_to_decide,
)
from deft_client.libero.results.store import RunResults

Pair = tuple[EpisodeRecord, EpisodeRecord]
Sums = Callable[[EpisodeRecord], tuple[float, float]]  # what is summed, and over how many


@dataclass(frozen=True)
class MeasureDifference:
    """A mean in either run, and the second's minus the first's with its 95% interval."""

    name: str
    first: float
    second: float
    interval: Interval


@dataclass(frozen=True)
class PhaseDeviation:
    """How far the second's commands are from the first's in one phase, with 95% intervals."""

    phase: str
    num_steps: int
    mm: float
    mm_interval: Interval
    deg: float
    deg_interval: Interval


@dataclass(frozen=True, eq=False)
class Difference:
    """All of it. `margin` is the loss of success, in shares, that is to be ruled out."""

    comparison: Comparison
    interval: Interval  # of the success of the second minus that of the first
    margin: float
    speedup: SpeedUp | None  # of the second over the first
    pairs: tuple[Pair, ...]  # of the episodes that both have

    @cached_property
    def measures(self) -> tuple[MeasureDifference, ...]:
        """What the answers of both took and brought."""
        return tuple(_measures(self.pairs))

    @cached_property
    def deviations(self) -> tuple[PhaseDeviation, ...]:
        """By phase of the first run, over the steps that both episodes have, and of all."""
        return tuple(_deviations(self.pairs))

    @cached_property
    def apart(self) -> tuple[float, float]:
        """Mean millimetres and degrees between the commands; NaN without a step."""
        sums = (
            np.sum([_apart(*pair) for pair in self.pairs], axis=(0, 1)) if self.pairs else [0] * 3
        )
        mm, deg, steps = map(float, sums)
        return (mm / steps, deg / steps) if steps else (float("nan"), float("nan"))

    @property
    def is_not_worse(self) -> bool:
        """Whether a loss of success as large as the margin is ruled out for the second."""
        one = self.comparison
        is_same = one.num_pairs > 0 and one.num_same_actions == one.num_pairs
        return is_same or self.interval.low > -self.margin


def difference(
    first: RunResults, second: RunResults, names: tuple[str, str], margin: float
) -> Difference:
    """Compare two runs by the episodes that both have."""
    others = {one.key: one for one in second.records if one.outcome is not Outcome.ERRORED}
    pairs = [
        (one, others[one.key])
        for one in first.records
        if one.outcome is not Outcome.ERRORED and one.key in others
    ]
    found = compare(first, second, *names)
    return Difference(
        comparison=found,
        interval=paired_interval(found.only_first, found.only_second, found.num_pairs),
        margin=margin,
        speedup=speedup_of(second, first),
        pairs=tuple(pairs),
    )


def conclusion(found: Difference) -> str:
    """What can and cannot be concluded, and how many more episodes would decide."""
    one, margin = found.comparison, f"{100 * found.margin:g} points"
    if not one.num_pairs:
        return "No episode was judged in both: nothing can be said of success."
    if not one.have_same_assets:
        return "The runs were played on different assets: their success must not be compared."
    if one.num_same_actions == one.num_pairs:
        return (
            f"{one.second} acted as {one.first} did, to the last bit, in all {one.num_pairs} "
            "episodes: they differ in time alone."
        )
    seen = f"{100 * one.difference:+.1f} points (95%: {points_text(found.interval)})"
    if one.p_value < LUCK:
        better = one.second if one.difference > 0 else one.first
        return (
            f"{better} succeeds more often: {one.second} minus {one.first} is {seen} over "
            f"{one.num_pairs} episodes, McNemar p = {one.p_value:.3g}."
        )
    start = (
        f"{one.num_pairs} episodes show no difference of success: {one.second} minus {one.first} "
        f"is {seen}, McNemar p = {one.p_value:.3g}. "
    )
    if found.is_not_worse:
        return start + f"That {one.second} loses {margin} or more is ruled out."
    wanted = pairs_to_decide(one.only_first, one.only_second, one.num_pairs, found.margin)
    return start + (
        f"That {one.second} loses {margin} is not ruled out; if the shares stay as they are, about "
        f"{wanted - one.num_pairs} more episodes would decide."
    )


def _measures(pairs: Sequence[Pair]) -> Iterator[MeasureDifference]:
    for name, sums in _SUMS.items():
        counted = np.array([[*sums(one), *sums(other)] for one, other in pairs])
        total = counted.sum(axis=0)
        if len(pairs) and total[1] and total[3]:
            interval = bootstrap_interval(
                counted, lambda sums: sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1]
            )
            yield MeasureDifference(name, total[0] / total[1], total[2] / total[3], interval)


def _committed(record: EpisodeRecord) -> tuple[float, float]:
    kept = [
        accepted + 1
        for answer in record.answers
        for accepted, guesses in passes_of(answer)
        if guesses
    ]
    return float(sum(kept)), float(len(kept))


_SUMS: dict[str, Sums] = {
    "committed length": _committed,
    "passes per action": lambda record: (
        float(sum(len(answer.accepted) for answer in record.answers)),
        float(sum(bool(answer.accepted) for answer in record.answers)),
    ),
    "relaxed tokens, %": lambda record: (
        100.0 * sum(answer.num_relaxed for answer in record.answers),
        float(sum(answer.num_tokens for answer in record.answers)),
    ),
    "steps per episode": lambda record: (float(record.num_steps), 1.0),
}


def _deviations(pairs: Sequence[Pair]) -> Iterator[PhaseDeviation]:
    by_phase = np.array([_apart(one, other) for one, other in pairs]).reshape(-1, len(ArmPhase), 3)
    names = [phase.value for phase in ArmPhase]
    for name, counted in (
        *zip(names, by_phase.transpose(1, 0, 2), strict=True),
        ("all", by_phase.sum(axis=1)),
    ):
        mm, deg, steps = counted.sum(axis=0)
        if steps:
            yield PhaseDeviation(
                phase=name,
                num_steps=int(steps),
                mm=mm / steps,
                mm_interval=bootstrap_interval(counted, lambda sums: sums[:, 0] / sums[:, 2]),
                deg=deg / steps,
                deg_interval=bootstrap_interval(counted, lambda sums: sums[:, 1] / sums[:, 2]),
            )


def _apart(one: EpisodeRecord, other: EpisodeRecord) -> list[list[float]]:
    """Sums of millimetres and degrees, and the number of steps, by phase."""
    steps = min(one.num_steps, other.num_steps)
    first, second = one.actions[:steps], other.actions[:steps]
    mm, deg = millimetres_apart(first, second), degrees_apart(first, second)
    numbers = np.array([list(ArmPhase).index(phase) for phase in phases_of(one.actions)[:steps]])
    is_in = numbers[None] == np.arange(len(ArmPhase))[:, None]  # [phase, step]
    return [[float(mm[rows].sum()), float(deg[rows].sum()), float(rows.sum())] for rows in is_in]
