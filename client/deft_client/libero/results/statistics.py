"""Intervals and tests for success rates, and percentiles; small enough to check by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt

import numpy as np

NORMAL_97_5 = 1.959963984540054  # the normal quantile behind a two-sided 95% interval


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a share, both ends in [0, 1]."""

    low: float
    high: float


def wilson_interval(successes: int, num_episodes: int, z: float = NORMAL_97_5) -> Interval:
    """Wilson's score interval; without an episode nothing is known, so it is [0, 1].

    Unlike the textbook interval it stays inside [0, 1] and has a width at 0% and 100%.
    """
    if not 0 <= successes <= num_episodes:
        raise ValueError(f"successes must be 0 to {num_episodes}, got {successes}")
    if num_episodes == 0:
        return Interval(0.0, 1.0)
    share = successes / num_episodes
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
