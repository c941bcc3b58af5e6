"""The small pure pieces around the line: service time, rhythm, batch limit, token bucket."""

import pytest
from hypothesis import given, strategies

from deft_server.serving.access import TokenBucket
from deft_server.serving.estimates import (
    GOOD_BATCHES_BEFORE_GROWTH,
    MAX_FLOWS,
    BatchLimit,
    OwnerShares,
    Rhythm,
    ServiceTime,
)


def test_nothing_is_expected_before_anything_was_measured():
    assert ServiceTime().expect(3) == 0.0


def test_one_slow_batch_does_not_change_what_is_expected():
    times = ServiceTime()
    for seconds in (0.02, 0.02, 3.0, 0.02, 0.02):
        times.observe(4, seconds)
    assert times.expect(4) == 0.02


def test_a_size_never_seen_takes_as_long_as_the_nearest_larger_one():
    times = ServiceTime()
    times.observe(2, 0.01)
    times.observe(8, 0.04)
    assert (times.expect(1), times.expect(5), times.expect(9)) == (0.01, 0.04, 0.04)


@given(known=strategies.sets(strategies.integers(1, 16)), size=strategies.integers(1, 17))
def test_the_nearest_size_is_found_as_by_looking_at_all(known: set[int], size: int):
    times = ServiceTime()
    for one in known:
        times.observe(one, one / 100)
    larger, smaller = ({one for one in known if one >= size}, {one for one in known if one < size})
    nearest = min(larger) if larger else max(smaller, default=0)
    assert times.expect(size) == nearest / 100


def test_a_session_is_expected_one_usual_pause_after_its_answer():
    rhythm = Rhythm()
    for turn in range(3):
        rhythm.answered("arm", turn * 1.0)
        rhythm.asked("arm", turn * 1.0 + 0.05)
    rhythm.answered("arm", 3.0)
    assert rhythm.next_due_s(3.04) <= 3.06
    assert rhythm.next_due_s(3.06) > 3.07
    rhythm.asked("arm", 3.02)
    assert rhythm.next_due_s(3.04) > 3.06


def test_a_forgotten_session_is_not_expected():
    rhythm = Rhythm()
    rhythm.answered("arm", 0.0)
    rhythm.asked("arm", 0.05)
    rhythm.answered("arm", 1.0)
    rhythm.forget("arm")
    assert rhythm.next_due_s(0.0) > 2.0


def test_the_memory_of_sessions_is_bounded():
    rhythm = Rhythm()
    for number in range(3 * MAX_FLOWS):
        rhythm.answered(f"s{number}", number / 1000)
    rhythm.asked(f"s{3 * MAX_FLOWS - 1}", 1.0)
    assert len(rhythm._beats) <= MAX_FLOWS


def test_batches_halve_when_memory_runs_out_and_grow_back_slowly():
    limit = BatchLimit(8)
    limit.gave_up(8)
    assert limit.size == 4
    limit.gave_up(3)
    assert limit.size == 1
    for _ in range(GOOD_BATCHES_BEFORE_GROWTH):
        limit.succeeded()
    assert limit.size == 2


def test_a_batch_of_one_is_always_allowed():
    limit = BatchLimit(1)
    limit.gave_up(1)
    assert limit.size == 1


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


def test_an_owner_that_was_away_has_saved_nothing_up_and_one_that_was_alone_owes_nothing():
    shares = OwnerShares()
    shares.join("alone")
    for _ in range(1000):
        shares.use(["alone"], 1.0, ())
    shares.join("comes")
    assert shares.ahead({"alone", "comes"}, slack_s=2.0) == frozenset()
