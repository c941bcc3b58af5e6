import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deft_core.measures.statistics import Interval, mcnemar_exact, percentiles, wilson_interval


@pytest.mark.parametrize(
    ("successes", "num_episodes", "low", "high"),
    [
        # Newcombe (1998), Statistics in Medicine 17, Table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_equal_the_published_ones(
    successes: int, num_episodes: int, low: float, high: float
) -> None:
    interval = wilson_interval(successes, num_episodes)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def test_without_an_episode_any_success_rate_is_possible() -> None:
    assert wilson_interval(0, 0) == Interval(0.0, 1.0)


@given(st.integers(0, 500), st.integers(1, 500))
def test_an_interval_holds_its_own_share_and_mirrors(successes: int, num_episodes: int) -> None:
    successes = min(successes, num_episodes)
    interval = wilson_interval(successes, num_episodes)
    mirrored = wilson_interval(num_episodes - successes, num_episodes)
    assert 0 <= interval.low <= successes / num_episodes <= interval.high <= 1
    assert math.isclose(interval.low, 1 - mirrored.high, abs_tol=1e-12)


def test_more_successes_than_episodes_are_refused() -> None:
    with pytest.raises(ValueError, match="got 4"):
        wilson_interval(4, 3)


@pytest.mark.parametrize(
    ("only_first", "only_second", "p_value"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (0, 1, 1.0),
        (0, 6, 0.03125),  # 2 / 2**6
        (1, 9, 0.021484375),  # 2 * (1 + 10) / 2**10
        (2, 8, 0.109375),  # 2 * (1 + 10 + 45) / 2**10
    ],
)
def test_mcnemar_is_a_coin_toss_over_the_discordant_trials(
    only_first: int, only_second: int, p_value: float
) -> None:
    assert mcnemar_exact(only_first, only_second) == p_value
    assert mcnemar_exact(only_second, only_first) == p_value


def test_mcnemar_stays_finite_for_thousands_of_trials() -> None:
    assert 0 < mcnemar_exact(1900, 2100) < 0.002


def test_percentiles_of_a_hundred_values() -> None:
    spread = percentiles([float(value) for value in range(101)])
    assert (spread.p50, spread.p95, spread.p99, spread.mean) == (50.0, 95.0, 99.0, 50.0)


def test_no_values_have_no_percentiles() -> None:
    assert math.isnan(percentiles([]).p50)
    assert percentiles([]).count == 0
