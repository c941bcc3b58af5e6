"""What frames cost, alone and in company."""

import pytest

from deft_server.serving.admission import REMEMBERED_FLOWS, STALE_AFTER_S, Prices


def test_nothing_is_expected_before_anything_was_measured() -> None:
    assert Prices().expect("a", 0.0) == Prices().proven("a", 0.0) == 0.0


def test_company_is_taken_out_of_what_a_flow_costs() -> None:
    prices = Prices()
    for n in range(20):
        company = 1 + n % 4
        prices.observe("a", 0.02 * (1 + 0.25 * (company - 1)), n / 100, company)
    assert prices.share == pytest.approx(0.25)
    assert prices.slowdown(5) == pytest.approx(2.0)
    assert prices.expect("a", 0.2) == pytest.approx(0.02)


def test_neighbours_do_not_make_a_flow_look_slow() -> None:
    prices = Prices()
    for n in range(9):
        prices.observe("a", 0.16, n / 100, company=8.0)
    assert prices.expect("a", 0.1) == pytest.approx(0.02)


def test_one_slow_frame_does_not_change_what_is_expected() -> None:
    prices = Prices()
    for seconds in (0.02, 0.02, 3.0, 0.02, 0.02):
        prices.observe("a", seconds, 0.0)
    assert prices.expect("a", 0.0) == 0.02


def test_a_cut_frame_counts_only_if_it_took_longer_than_known() -> None:
    prices = Prices()
    prices.observe("a", 0.02, 0.0)
    prices.observe("a", 0.01, 0.0, is_whole=False)
    assert prices.expect("a", 0.0) == 0.02
    for _ in range(9):
        prices.observe("a", 0.3, 0.0, is_whole=False)
    assert prices.expect("a", 0.0) == 0.3


def test_a_flow_that_was_only_ever_cut_takes_as_long_as_the_longest_cut() -> None:
    """Once a first cut in much company made it look quick, and it joined others for ever."""
    prices = Prices()
    prices.observe("a", 0.3, 0.0, company=5.0, is_whole=False)
    prices.observe("a", 0.4, 0.5, company=1.0, is_whole=False)
    assert prices.expect("a", 0.5) == prices.expect("a", 9.0) == 0.4
    prices.observe("a", 0.1, 9.0)
    assert prices.expect("a", 9.0) == 0.1


def test_a_new_flow_is_expected_to_cost_the_usual() -> None:
    prices = Prices()
    prices.observe("a", 0.02, 5.0)
    assert prices.expect("b", 5.0) == 0.02
    assert prices.proven("b", 5.0) == 0.0


def test_an_old_measurement_refuses_nobody() -> None:
    prices = Prices()
    prices.observe("a", 5.0, 0.0)
    later_s = 1.1 * STALE_AFTER_S
    assert prices.proven("a", 0.5 * STALE_AFTER_S) == 5.0
    assert prices.proven("a", later_s) == 0.0
    for _ in range(9):
        prices.observe("b", 0.02, later_s)
    assert prices.expect("a", later_s) == prices.proven("a", later_s) == 0.02


def test_the_memory_of_flows_is_bounded() -> None:
    prices = Prices()
    for number in range(REMEMBERED_FLOWS + 500):
        prices.observe(f"s{number}", 0.01, 0.0)
    assert len(prices._flows) == REMEMBERED_FLOWS
