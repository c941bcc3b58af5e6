"""Intervals and tests for success rates, and percentiles; small enough to check by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, sqrt

import numpy as np
from numpy.typing import NDArray

NORMAL_97_5 = 1.959963984540054  # the normal quantile behind a two-sided 95% interval
LEAST_EPISODES = 5  # the fewest for a speed-up
_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float

    def __format__(self, form: str) -> str:
        """`1.31 to 1.52`, both ends in that form."""
        return f"{self.low:{form}} to {self.high:{form}}"


def wilson_interval(successes: int, num_episodes: int) -> Interval:
    """Wilson's score interval; without an episode nothing is known, so it is [0, 1].

    Unlike the textbook interval it stays inside [0, 1] and has a width at 0% and 100%.
    """
    if not 0 <= successes <= num_episodes:
        raise ValueError(f"successes must be 0 to {num_episodes}, got {successes}")
    if num_episodes == 0:
        return Interval(0.0, 1.0)
    z, share = NORMAL_97_5, successes / num_episodes
    shrink = 1.0 + z * z / num_episodes
    centre = (share + z * z / (2 * num_episodes)) / shrink
    spread = share * (1.0 - share) / num_episodes + z * z / (4 * num_episodes**2)
    half = z * sqrt(spread) / shrink
    # Rounding can put an end of a one-sided result a hair beyond the share itself.
    return Interval(max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided exact McNemar p-value from the numbers of discordant pairs.

    `only_first` trials succeeded in the first run alone, `only_second` in the second alone. If
    the runs were equally good, either kind would be a fair coin; trials that went the same way in
    both runs say nothing about the difference.
    """
    if only_first < 0 or only_second < 0:
        raise ValueError(f"counts must not be negative, got {only_first} and {only_second}")
    discordant = only_first + only_second
    tail = sum(comb(discordant, count) for count in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / (1 << discordant))  # whole numbers: no overflow, however many


def paired_interval(only_first: float, only_second: float, num_pairs: float) -> Interval:
    """95% interval of the second's success minus the first's, in shares (Bonett and Price, 2012).

    Counts may be fractions, as of episodes that are only expected. Without a pair: [-1, 1].
    """
    if not 0 <= only_first + only_second <= num_pairs:
        raise ValueError(f"{only_first} and {only_second} of {num_pairs} pairs differ")
    first, second = ((one + 1) / (num_pairs + 2) for one in (only_first, only_second))
    centre = second - first
    half = NORMAL_97_5 * sqrt((first + second - centre**2) / (num_pairs + 2))
    return Interval(max(-1.0, centre - half), min(1.0, centre + half))


def pairs_to_decide(only_first: int, only_second: int, num_pairs: int, margin: float) -> int:
    """How many pairs tell that the second is worse, or that it is not by `margin` or more.

    If the shares stay as they are; at least as many as there are, which must be one or more.
    """

    def is_decided(wanted: int) -> bool:
        scale = wanted / num_pairs
        found = paired_interval(scale * only_first, scale * only_second, wanted)
        return found.low > -margin or found.high < 0.0

    low, high = num_pairs, num_pairs
    while not is_decided(high):
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_decided(middle) else (middle + 1, high)
    return high


def bootstrap_interval(
    counted: NDArray[np.float64], statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> Interval:
    """95% interval of a statistic of sums over episodes, by drawing the episodes anew.

    `counted` is [episode, column]; `statistic` gets its sums, [draw, column]. Episodes are drawn,
    not answers: those of one episode are alike. Always the same draws.
    """
    num = len(counted)
    weights = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), _RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.nanpercentile(statistic(weights @ counted), (2.5, 97.5))
    return Interval(float(low), float(high))


@dataclass(frozen=True)
class Percentiles:
    """How a set of milliseconds is spread."""

    p50: float
    p95: float
    p99: float
    mean: float
    count: int


def percentiles(values_ms: Sequence[float]) -> Percentiles:
    """Percentiles with linear interpolation; all NaN when there is no value."""
    if not len(values_ms):
        return Percentiles(float("nan"), float("nan"), float("nan"), float("nan"), 0)
    p50, p95, p99 = (float(value) for value in np.percentile(values_ms, (50, 95, 99)))
    return Percentiles(p50, p95, p99, float(np.mean(values_ms)), len(values_ms))
