"""Two runs on the same episodes: what differs, how sure that is, and what would make it sure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deft_core.measures.speculation import passes_of
from deft_core.measures.speed import SpeedUp
from deft_core.measures.statistics import (
    Interval,
    bootstrap_interval,
    mcnemar_exact,
    paired_interval,
    pairs_to_decide,
)
from deft_libero.report.speed import speedup_of
from deft_libero.results.records import EpisodeRecord, Outcome
from deft_libero.results.store import RunResults
from deft_libero.simulator.conventions import METRES_PER_UNIT, RADIANS_PER_UNIT

SIGNIFICANCE_LEVEL = 0.05  # p-values below it are called a difference
MARGIN = 0.05  # the loss of success that is to be ruled out, where nobody says another
PHASES = ("approach", "grasp", "transport", "place")  # what the arm is about to do
GRASP_STEPS = 10  # half a second, in which the fingers close
RELEASE_STEPS = 10  # of setting down, before the fingers open
Pair = tuple[EpisodeRecord, EpisodeRecord]
Sums = Callable[[EpisodeRecord], tuple[float, float]]  # what is summed, and over how many


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
class Comparison:
    """Two runs on the episodes that both have, paired by suite, task and trial.

    Success is compared over those that were judged in both. `margin` is the loss of success, in
    shares, that is to be ruled out.
    """

    first: str
    second: str
    pairs: tuple[Pair, ...]  # of episodes that did not err in either
    num_pairs: int  # of these, judged in both
    both: int
    only_first: int
    only_second: int
    neither: int
    num_same_actions: int  # judged pairs whose actions agree to the last bit
    p_value: float
    have_same_assets: bool
    speedup: SpeedUp | None  # of the second over the first
    margin: float

    @property
    def difference(self) -> float:
        """Success of the second minus success of the first, in shares; NaN without pairs."""
        if not self.num_pairs:
            return float("nan")
        return (self.only_second - self.only_first) / self.num_pairs

    @property
    def interval(self) -> Interval:
        """Of the difference, 95%."""
        return paired_interval(self.only_first, self.only_second, self.num_pairs)

    @property
    def has_identical_actions(self) -> bool:
        """Whether no action differs in any bit."""
        return 0 < self.num_pairs == self.num_same_actions

    @property
    def is_not_worse(self) -> bool:
        """Whether a loss of success as large as the margin is ruled out for the second."""
        return self.has_identical_actions or self.interval.low > -self.margin

    @property
    def is_open(self) -> bool:
        """Whether there are too few episodes to tell which of the runs succeeds more often."""
        is_judged = self.num_pairs > 0 and self.have_same_assets
        return is_judged and self.p_value >= SIGNIFICANCE_LEVEL and not self.is_not_worse

    @property
    def verdict(self) -> str:
        """What the numbers allow to say of success, in a few words."""
        if not self.num_pairs:
            return "no trial was judged in both"
        if not self.have_same_assets:
            return "different assets: not comparable"
        if self.has_identical_actions:
            return "identical actions"
        if self.is_open:
            points = f"{100 * self.difference:+.0f} points (95%: {points_text(self.interval, 0)})"
            return f"too few to tell: {points}"
        if self.p_value >= SIGNIFICANCE_LEVEL:
            return "no difference shown"
        better = self.first if self.only_first > self.only_second else self.second
        return f"{better} succeeds more often"

    @property
    def sentences(self) -> str:
        """What was found of success, and of actions: the one says nothing of the other."""
        if self.has_identical_actions:
            return "Actions: identical."
        num_same, num_pairs = self.num_same_actions, self.num_pairs
        return f"Success: {self.verdict}. Actions: equal in {num_same} of {num_pairs} episodes."

    @cached_property
    def measures(self) -> tuple[tuple[str, float, float, Interval], ...]:
        """What the answers of both took and brought: a name, the mean in either run, and the 95%
        interval of the second's minus the first's."""
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


def compare(
    first: RunResults, second: RunResults, names: tuple[str, str], margin: float = MARGIN
) -> Comparison:
    """Pair two runs, and test the difference of success with McNemar's exact test."""
    others = {one.key: one for one in second.records if one.outcome is not Outcome.ERRORED}
    pairs = [
        (one, others[one.key])
        for one in first.records
        if one.outcome is not Outcome.ERRORED and one.key in others
    ]
    judged = [pair for pair in pairs if all(one.outcome.is_judged for one in pair)]
    wins = [tuple(one.outcome is Outcome.SUCCEEDED for one in pair) for pair in judged]
    only_first, only_second = wins.count((True, False)), wins.count((False, True))
    return Comparison(
        *names,
        pairs=tuple(pairs),
        num_pairs=len(judged),
        both=wins.count((True, True)),
        only_first=only_first,
        only_second=only_second,
        neither=wins.count((False, False)),
        num_same_actions=sum(np.array_equal(one.actions, other.actions) for one, other in judged),
        p_value=mcnemar_exact(only_first, only_second),
        have_same_assets=first.header.assets == second.header.assets,
        speedup=speedup_of(second, first),
        margin=margin,
    )


def points_text(interval: Interval, digits: int = 1) -> str:
    """`-3.1 to +0.4`, in percentage points."""
    return f"{100 * interval.low:+.{digits}f} to {100 * interval.high:+.{digits}f}"


def conclusion(one: Comparison) -> str:
    """What can and cannot be concluded, and how many more episodes would decide."""
    margin = f"{100 * one.margin:g} points"
    if not one.num_pairs:
        return "No episode was judged in both: nothing can be said of success."
    if not one.have_same_assets:
        return "The runs were played on different assets: their success must not be compared."
    if one.has_identical_actions:
        return (
            f"{one.second} acted as {one.first} did, to the last bit, in all {one.num_pairs} "
            "episodes: they differ in time alone."
        )
    seen = f"{100 * one.difference:+.1f} points (95%: {points_text(one.interval)})"
    if one.p_value < SIGNIFICANCE_LEVEL:
        better = one.second if one.difference > 0 else one.first
        return (
            f"{better} succeeds more often: {one.second} minus {one.first} is {seen} over "
            f"{one.num_pairs} episodes, McNemar p = {one.p_value:.3g}."
        )
    seen = f"{one.second} minus {one.first} is {seen}, McNemar p = {one.p_value:.3g}."
    if not one.is_open:
        return (
            f"{one.num_pairs} episodes show no difference of success: {seen} "
            f"That {one.second} loses {margin} or more is ruled out."
        )
    wanted = pairs_to_decide(one.only_first, one.only_second, one.num_pairs, one.margin)
    return (
        f"Too few to tell, with {one.num_pairs} episodes: {seen} That {one.second} loses {margin} "
        f"is not ruled out. Play about {wanted - one.num_pairs} more: they would decide, if the "
        "shares stay as they are."
    )


def _measures(pairs: Sequence[Pair]) -> Iterator[tuple[str, float, float, Interval]]:
    for name, sums in _SUMS.items():
        counted = np.array([[*sums(one), *sums(other)] for one, other in pairs])
        total = counted.sum(axis=0)
        if len(pairs) and total[1] and total[3]:
            interval = bootstrap_interval(
                counted, lambda sums: sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1]
            )
            yield name, total[0] / total[1], total[2] / total[3], interval


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
    by_phase = np.array([_apart(one, other) for one, other in pairs]).reshape(-1, len(PHASES), 3)
    for name, counted in (
        *zip(PHASES, by_phase.transpose(1, 0, 2), strict=True),
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
    is_in = phases_of(one.actions)[None, :steps] == np.arange(len(PHASES))[:, None]  # [phase, step]
    return [[float(mm[rows].sum()), float(deg[rows].sum()), float(rows.sum())] for rows in is_in]


def phases_of(actions: NDArray[np.float64]) -> NDArray[np.intp]:
    """The phase of every step, by its place in `PHASES`, from actions [step, 7] of robosuite's.

    The gripper is first told to close: grasp, for half a second. It is last told to open behind
    that, or the episode ends: place, from half a second before. Between them lies transport. An
    episode that never closes is approach throughout.
    """
    closes = actions[:, -1] > 0
    first = int(np.argmax(closes)) if closes.any() else len(actions)
    carried = first + GRASP_STEPS
    opens = np.flatnonzero(closes[carried:-1] & ~closes[carried + 1 :]) + carried + 1
    released = int(opens[-1]) if len(opens) else len(actions)
    placed = max(carried, released - RELEASE_STEPS)
    return np.searchsorted((first, carried, placed), np.arange(len(actions)), side="right")


def millimetres_apart(
    first: NDArray[np.float64], second: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How far apart the commanded motions end, step by step."""
    apart = np.linalg.norm(first[:, :3] - second[:, :3], axis=1)
    return np.asarray(1000.0 * METRES_PER_UNIT * apart)


def degrees_apart(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far apart the commanded turns are, step by step."""
    apart = np.linalg.norm(first[:, 3:6] - second[:, 3:6], axis=1)
    return np.asarray(np.degrees(RADIANS_PER_UNIT * apart))
