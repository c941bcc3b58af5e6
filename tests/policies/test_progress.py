"""What is said of a policy that loads."""

from threading import Event

import pytest

from deft_policies import progress
from deft_policies.progress import counted, describe_progress, doing, shown


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


def test_a_command_counts_and_says_how_long_the_rest_takes(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in counted(range(4), 8, "lossless", "frame", done=4):
        clock[0] += 6.0
    # A line after 12 s, when two more are done, and another after 24 s.
    assert capsys.readouterr().err.splitlines() == [
        "lossless: 6 of 8 frames, about 12 s left",
        "lossless: 8 of 8 frames, about 0 s left",
    ]


def test_a_command_shows_what_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    written, ended = Event(), Event()
    with shown(every_s=0.001, written=written):
        doing("reading the weights")
        assert written.wait(60)
        for _ in range(50):  # looked at often, written once
            ended.wait(0.001)
        written.clear()
        doing("answering known frames as a test")
        assert written.wait(60)
    assert capsys.readouterr().err == "reading the weights\nanswering known frames as a test\n"
    assert describe_progress() == ""
