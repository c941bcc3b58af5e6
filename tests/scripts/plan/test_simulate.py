"""Forecasts: what a queue with known answers must give, and what the search finds."""

import math
from dataclasses import replace

import numpy as np
import pytest

from deft_server.serving.queue import QueueRules
from scripts.plan.service_times import ServiceTimes, collect
from scripts.plan.simulate import (
    Capacity,
    Fleet,
    FleetGoal,
    Forecast,
    fewest_replicas,
    simulate,
)
from tests.scripts.plan.slow_simulation import SlowSimulation

ONE_AT_A_TIME = QueueRules(max_batch=1, max_waiting=10_000)


def takes(seconds: float) -> ServiceTimes:
    return collect([(1, seconds)])


def fate_sum(forecast: Forecast) -> int:
    refused = forecast.num_superseded + forecast.num_refused + forecast.num_missed
    return forecast.num_answered + refused


def test_a_robot_alone_waits_for_nothing():
    forecast = simulate(Fleet(1, 5.0, seconds=60.0), Capacity(takes(0.05), ONE_AT_A_TIME))
    assert forecast.at(0.99) == pytest.approx(0.05)
    assert forecast.answered_share == 1.0
    assert forecast.replica_load == pytest.approx(0.25, rel=0.01)


def test_what_travelling_and_the_front_take_is_added():
    capacity = Capacity(takes(0.05), ONE_AT_A_TIME, front_s=0.004, added_s=0.003)
    forecast = simulate(Fleet(1, 5.0), capacity)
    assert forecast.at(0.5) == pytest.approx(0.057)
    assert forecast.front_load == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_many_slow_robots_wait_as_long_as_the_theory_of_queues_says(load):
    """Poisson arrivals at one server of constant time: a mean wait of load / (2 (1 - load))."""
    service_s = 0.01
    robots = 2000
    fleet = Fleet(robots, load / service_s / robots, jitter=1.0, seconds=400.0, warm_up_s=50.0)
    forecast = simulate(fleet, Capacity(takes(service_s), ONE_AT_A_TIME))
    waited_s = float(np.mean(forecast.latencies_s)) - service_s
    assert waited_s == pytest.approx(service_s * load / (2 * (1 - load)), rel=0.15)


def test_every_frame_has_one_fate_under_twice_the_load():
    fleet = Fleet(20, 10.0, deadline_s=0.3)
    forecast = simulate(fleet, Capacity(takes(0.05), QueueRules(max_batch=1, num_replicas=5)))
    assert fate_sum(forecast) == forecast.num_sent
    assert 0.45 < forecast.answered_share < 0.56
    assert forecast.replica_load == pytest.approx(1.0, abs=0.02)


def test_frames_are_superseded_not_piled_up():
    forecast = simulate(Fleet(4, 20.0), Capacity(takes(0.1), ONE_AT_A_TIME))
    assert forecast.num_superseded > 0
    assert forecast.at(1.0) < 1.0


def test_no_answer_is_later_than_its_deadline():
    fleet = Fleet(12, 10.0, deadline_s=0.12)
    forecast = simulate(fleet, Capacity(takes(0.05), ONE_AT_A_TIME))
    assert forecast.num_missed > 0
    assert forecast.at(1.0) <= 0.12 + 1e-9


@pytest.mark.parametrize("deadline_s", [math.inf, 0.2])
@pytest.mark.parametrize("rules", [QueueRules(4, num_replicas=2), QueueRules(1, max_waiting=12)])
def test_a_forecast_is_that_of_the_slow_twin(deadline_s, rules):
    fleet = Fleet(30, 5.0, deadline_s, seconds=3.0, warm_up_s=0.0)
    service = collect([(1, 0.02), (1, 0.03), (4, 0.04), (4, 0.06)])
    capacity = Capacity(service, rules, front_s=0.0003, added_s=0.001)
    forecast, slow = simulate(fleet, capacity), SlowSimulation(fleet, capacity)
    slow.run()
    assert forecast.num_superseded == slow.fates["superseded"]
    assert forecast.num_refused == slow.fates["refused"]
    assert forecast.num_missed == slow.fates["missed"]
    assert forecast.latencies_s == pytest.approx(slow.latencies_s)


def test_no_more_frames_are_answered_per_second_than_the_size_that_suits_best_allows():
    service = collect([(1, 0.02), (4, 0.05), (8, 0.2)])
    assert service.most_per_s(1) == pytest.approx(50.0)
    assert service.most_per_s(4) == pytest.approx(80.0)
    assert service.most_per_s(8) == pytest.approx(80.0)


def test_the_search_finds_the_fewest_that_meet_the_goal():
    fleet, capacity, goal = Fleet(20, 5.0), Capacity(takes(0.05), ONE_AT_A_TIME), FleetGoal(0.075)
    found = fewest_replicas(fleet, capacity, goal, most=64).num_replicas
    assert found is not None

    def meets(count: int) -> bool:
        rules = replace(ONE_AT_A_TIME, num_replicas=count)
        return goal.is_met(simulate(fleet, replace(capacity, rules=rules)))

    assert [meets(count) for count in range(1, found + 1)] == [False] * (found - 1) + [True]


def test_a_front_that_is_too_busy_is_not_helped_by_replicas():
    capacity = Capacity(takes(0.05), ONE_AT_A_TIME, front_s=0.02)
    search = fewest_replicas(Fleet(20, 5.0, seconds=10.0), capacity, FleetGoal(10.0), most=32)
    assert search.num_replicas is None
    assert max(search.forecasts) == 32
    assert search.forecasts[32].front_load == pytest.approx(2.0, rel=0.01)


def test_nobody_answered_is_an_infinite_wait():
    nobody = Forecast(10, np.array([]), 0, 10, 0, 0.0, 0.0, 0.0)
    assert math.isinf(nobody.at(0.5))
    assert not FleetGoal(1.0).is_met(nobody)


def test_the_same_seed_forecasts_the_same():
    fleet, capacity = Fleet(10, 5.0), Capacity(collect([(1, 0.02), (1, 0.07)]), ONE_AT_A_TIME)
    assert simulate(fleet, capacity).latencies_s.tolist() == (
        simulate(fleet, capacity).latencies_s.tolist()
    )
