"""What is said of a policy that loads."""

import pytest

from deft_policies import progress
from deft_policies.progress import describe_progress, doing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    doing("")  # whatever was loaded before in this process
    return now


def test_the_time_that_is_left_follows_from_what_is_done(clock: list[float]) -> None:
    doing("reading the weights", 0.0)
    assert describe_progress() == "reading the weights, 0%"
    clock[0] += 30.0
    doing("reading the weights", 0.25)
    assert describe_progress() == "reading the weights, 25%, about 90 s left"
    doing("answering known frames as a test")
    assert describe_progress() == "answering known frames as a test"
    doing("")
    assert describe_progress() == ""


def test_another_step_has_a_clock_of_its_own(clock: list[float]) -> None:
    doing("reading the weights", 0.5)
    clock[0] += 30.0
    doing("reading another model's weights", 0.5)
    clock[0] += 2.0
    assert describe_progress().endswith("about 2 s left")


def test_a_step_that_begins_anew_does_not_count_what_was_before(clock: list[float]) -> None:
    doing("reading the weights", 0.5)  # of a load that failed
    clock[0] += 1000.0
    doing("reading the weights", 0.0)
    clock[0] += 10.0
    doing("reading the weights", 0.5)
    assert describe_progress().endswith("about 10 s left")
