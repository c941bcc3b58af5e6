"""The token bucket behind the rate of a caller."""

import pytest
from hypothesis import given, strategies

from deft_server.serving.access import TokenBucket


@given(
    gaps_s=strategies.lists(strategies.floats(0, 0.5), min_size=1, max_size=200),
    rate_per_s=strategies.floats(0.5, 100),
    burst=strategies.floats(1, 50),
)
def test_no_caller_gets_more_than_rate_times_time_plus_burst(
    gaps_s: list[float], rate_per_s: float, burst: float
):
    bucket, now_s, taken = TokenBucket(rate_per_s, burst), 0.0, 0
    for gap_s in gaps_s:
        now_s += gap_s
        taken += bucket.take(now_s) == 0.0
    assert taken <= rate_per_s * now_s + burst + 1e-6


def test_the_wait_that_is_named_is_enough():
    bucket = TokenBucket(10.0, 1.0)
    assert bucket.take(0.0) == 0.0
    wait_s = bucket.take(0.02)
    assert wait_s > 0
    assert bucket.take(0.02 + wait_s + 1e-9) == 0.0


def test_a_token_taken_ahead_of_time_delays_those_after_it():
    bucket = TokenBucket(10.0, 1.0)
    waits_s = [bucket.take(0.0, most_wait_s=0.25) for _ in range(4)]
    assert waits_s == pytest.approx([0.0, 0.1, 0.2, 0.3])  # the last is too long: not taken
    assert bucket.take(0.2) == pytest.approx(0.1)
