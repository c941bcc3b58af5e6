"""Fleets with deadlines at the queue: as many answers as the policy can give, to everybody alike.

Times are invented: see `fleet`. A robot alone is answered in about 28 ms.
"""

import pytest

from tests.server.serving.fleet import Fleet, Price, Robot

CPU = Price(0.004, 0.001, 0.012)  # eight together take 4 times as long as one
ONE_BY_ONE = Price(0.0005, 0.003, 0.018)  # eight together take nearly 8 times as long
GPU = Price(0.009, 0.0001, 0.001)
SECONDS = 10.0


def fleet(num_robots: int, deadline_s: float) -> list[Robot]:
    return [Robot(f"robot {n}", deadline_s=deadline_s) for n in range(num_robots)]


def noisy(price: Price, noise: float) -> Price:
    return Price(price.round_s, price.frame_s, price.join_s, noise)


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("price", [CPU, ONE_BY_ONE, GPU], ids=["cpu", "one by one", "gpu"])
def test_twenty_robots_with_deadlines_get_as_much_as_one_at_a_time(
    price: Price, noise: float
) -> None:
    """Once a batch grew until all in it were late, and the same robots were refused every time."""
    for seed in range(2):
        robots, costs = fleet(20, 0.25), noisy(price, noise)
        answered = Fleet(robots, costs, seed=seed).play(SECONDS)
        one_at_a_time = Fleet(robots, costs, max_batch=1, seed=seed).play(SECONDS)
        assert sum(answered) >= 0.95 * sum(one_at_a_time)
        assert min(answered) >= 0.5 * sum(answered) / len(answered)


def test_where_company_costs_little_deadlines_do_not_keep_frames_apart() -> None:
    assert sum(Fleet(fleet(20, 0.25), CPU).play(SECONDS)) > 50 * SECONDS
    assert sum(Fleet(fleet(40, 0.25), GPU).play(SECONDS)) > 190 * SECONDS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_five_robots_on_a_busy_machine_are_all_answered(noise: float, seed: int) -> None:
    """150 ms alone, 400 ms for each: once all went together, were late, and that for ever."""
    answered = Fleet(fleet(5, 0.4), Price(0.02, 0.006, 0.07, noise), seed=seed).play(SECONDS)
    assert min(answered) >= 0.5 * sum(answered) / 5
    assert sum(answered) >= 4 * SECONDS


def test_fourteen_times_the_load_still_gets_most_answers() -> None:
    """Seven a second can be answered; once all joined again whenever estimates had grown old."""
    for seed in range(3):
        answered = Fleet(fleet(20, 0.25), Price(0.02, 0.006, 0.06), seed=seed).play(SECONDS)
        assert sum(answered) >= 4 * SECONDS


@pytest.mark.parametrize("price", [CPU, ONE_BY_ONE, GPU], ids=["cpu", "one by one", "gpu"])
def test_nobody_is_locked_out_where_few_can_be_in_time(price: Price) -> None:
    for seed in range(2):
        for robots in (fleet(8, 0.06), fleet(40, 0.25)):
            assert min(Fleet(robots, price, seed=seed).play(SECONDS)) > 0


def test_texts_leave_half_of_the_places_to_robots_with_deadlines() -> None:
    texts = [Robot(f"text {n}", num_rounds=200, is_text=True) for n in range(12)]
    alone = Fleet(texts, CPU)
    alone.play(SECONDS)
    assert alone.most_texts == 8
    both = Fleet([*fleet(4, 0.25), *texts], CPU)
    answered = both.play(SECONDS)
    assert both.most_texts <= 5  # one may be there before the first robot comes
    assert min(answered[:4]) >= 0.8 * 5 * SECONDS
    assert sum(answered[4:]) > 0


def test_a_robot_of_an_owner_with_many_gets_its_turn_of_that_owners() -> None:
    robots = [Robot(f"{owner} {n}", deadline_s=0.25, owner=owner)
              for owner, count in (("lab", 18), ("cell", 2)) for n in range(count)]  # fmt: skip
    answered = Fleet(robots, ONE_BY_ONE).play(SECONDS)
    assert min(answered[18:]) >= 0.85 * 5 * SECONDS
    assert min(answered[:18]) >= 0.5 * sum(answered[:18]) / 18
