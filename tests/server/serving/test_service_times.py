"""What frames cost, alone and among others."""

import pytest

from deft_server.serving.admission import REMEMBERED_FLOWS, STALE_AFTER_S, ServiceTimes


def test_nothing_is_expected_before_anything_was_measured() -> None:
    assert ServiceTimes().expected_s("a", 0.0) == ServiceTimes().proven_s("a", 0.0) == 0.0


def test_concurrency_is_taken_out_of_what_a_flow_costs() -> None:
    times = ServiceTimes()
    for n in range(20):
        concurrency = 1 + n % 4
        times.observe("a", 0.02 * (1 + 0.25 * (concurrency - 1)), n / 100, concurrency)
    assert times.batch_cost == pytest.approx(0.25)
    assert times.slowdown(5) == pytest.approx(2.0)
    assert times.expected_s("a", 0.2) == pytest.approx(0.02)


def test_neighbours_do_not_make_a_flow_look_slow() -> None:
    times = ServiceTimes()
    for n in range(9):
        times.observe("a", 0.16, n / 100, concurrency=8.0)
    assert times.expected_s("a", 0.1) == pytest.approx(0.02)


def test_one_slow_frame_does_not_change_what_is_expected() -> None:
    times = ServiceTimes()
    for seconds in (0.02, 0.02, 3.0, 0.02, 0.02):
        times.observe("a", seconds, 0.0)
    assert times.expected_s("a", 0.0) == 0.02


def test_a_cut_frame_counts_only_if_it_took_longer_than_known() -> None:
    times = ServiceTimes()
    times.observe("a", 0.02, 0.0)
    times.observe("a", 0.01, 0.0, is_whole=False)
    assert times.expected_s("a", 0.0) == 0.02
    for _ in range(9):
        times.observe("a", 0.3, 0.0, is_whole=False)
    assert times.expected_s("a", 0.0) == 0.3


def test_a_flow_that_was_only_ever_cut_takes_as_long_as_the_longest_cut() -> None:
    """Once a first cut among many others made it look quick, and it joined others for ever."""
    times = ServiceTimes()
    times.observe("a", 0.3, 0.0, concurrency=5.0, is_whole=False)
    times.observe("a", 0.4, 0.5, concurrency=1.0, is_whole=False)
    assert times.expected_s("a", 0.5) == times.expected_s("a", 9.0) == 0.4
    times.observe("a", 0.1, 9.0)
    assert times.expected_s("a", 9.0) == 0.1


def test_a_new_flow_is_expected_to_cost_the_usual() -> None:
    times = ServiceTimes()
    times.observe("a", 0.02, 5.0)
    assert times.expected_s("b", 5.0) == 0.02
    assert times.proven_s("b", 5.0) == 0.0


def test_an_old_measurement_refuses_nobody() -> None:
    times = ServiceTimes()
    times.observe("a", 5.0, 0.0)
    later_s = 1.1 * STALE_AFTER_S
    assert times.proven_s("a", 0.5 * STALE_AFTER_S) == 5.0
    assert times.proven_s("a", later_s) == 0.0
    for _ in range(9):
        times.observe("b", 0.02, later_s)
    assert times.expected_s("a", later_s) == times.proven_s("a", later_s) == 0.02


def test_the_memory_of_flows_is_bounded() -> None:
    times = ServiceTimes()
    for number in range(REMEMBERED_FLOWS + 500):
        times.observe(f"s{number}", 0.01, 0.0)
    assert len(times._flows) == REMEMBERED_FLOWS
