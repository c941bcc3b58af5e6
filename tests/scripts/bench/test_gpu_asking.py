"""How a short run on a GPU asks its questions: within its time, and losing nothing."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.bench.gpu.asking import LINES, Question, Row, Run, State, describe_tree

ABOUT: Row = {"card": "a card", "size": "7b", "torch": "2", "triton": "3", "commit": "c"}


class SmallDevice:
    """Counts how often memory is given back, and may be lost."""

    def __init__(self, lost_after: int = 99) -> None:
        self.cleared, self._lost_after = 0, lost_after

    def state(self) -> Row:
        return {"clocks.sm": "1980 MHz"}

    def clear(self) -> None:
        self.cleared += 1
        if self.cleared == self._lost_after:
            raise RuntimeError("an illegal memory access was encountered")


def rows(*values: int) -> Callable[[], Iterator[Row]]:
    return lambda: ({"value": value} for value in values)


def one_then(do: Callable[[], object]) -> Callable[[], Iterator[Row]]:
    def ask() -> Iterator[Row]:
        yield {"value": 1}
        do()
        yield {"value": 2}

    return ask


def run_in(folder: Path, seconds: float = 60.0, **about: str) -> Run:
    return Run(folder, seconds, ABOUT | about)


def lines_of(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / LINES).read_text().splitlines()]


def states_of(run: Run) -> dict[str, State]:
    return {one.name: one.state for one in run.answers}


def refuse() -> None:
    raise ValueError("a broken question")


def endless() -> None:
    while True:
        time.sleep(0.01)


def test_each_answer_is_a_line_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, device = run_in(tmp_path), SmallDevice()
    assert run.ask([Question("first", 1, rows(3, 4)), Question("second", 1, rows())], device) == 0
    first, second = lines_of(tmp_path)
    assert first["name"] == "first"
    assert first["rows"] == [{"value": 3}, {"value": 4}]
    assert first["state"] == second["state"] == "answered"
    assert first["card"] == "a card"
    assert first["device"] == {"clocks.sm": "1980 MHz"}
    assert device.cleared == 2
    printed = capsys.readouterr().out
    assert printed.count("first: answered") == 2  # when it was, and at the end
    assert "card: a card" in printed


def test_an_exception_ends_its_own_question_and_what_it_had_found_is_kept(tmp_path: Path) -> None:
    run, device = run_in(tmp_path), SmallDevice()
    questions = [Question("broken", 1, one_then(refuse)), Question("next", 1, rows(5))]
    assert run.ask(questions, device) == 1
    broken, after = lines_of(tmp_path)
    assert broken["state"] == "failed"
    assert broken["rows"] == [{"value": 1}]
    assert "ValueError: a broken question" in str(broken["error"])
    assert after["rows"] == [{"value": 5}]
    assert device.cleared == 2


def test_what_needs_more_time_than_is_left_is_skipped_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path, seconds=50)
    questions = [Question("long", 60, rows(1)), Question("short", 1, rows(2))]
    assert run.ask(questions, SmallDevice()) == 1
    assert states_of(run) == {"long": State.SKIPPED, "short": State.ANSWERED}
    assert "s are left, it needs 60 s" in capsys.readouterr().out


def test_a_question_that_takes_much_longer_than_its_budget_is_stopped(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    questions = [Question("endless", 0.02, one_then(endless)), Question("next", 1, rows(5))]
    assert run.ask(questions, SmallDevice()) == 1
    assert states_of(run) == {"endless": State.FAILED, "next": State.ANSWERED}
    assert lines_of(tmp_path)[0]["rows"] == [{"value": 1}]
    assert "TimeUp" in run.answers[0].error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_its_tables(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    run = run_in(tmp_path)
    questions = [
        Question("answered", 1, rows(7)),
        Question("cut off", 30, one_then(lambda: os.kill(os.getpid(), number))),
        Question("never asked", 1, rows(8)),
    ]
    assert run.ask(questions, SmallDevice()) == 128 + number
    answered, cut_off = lines_of(tmp_path)
    assert answered["state"] == "answered"
    assert cut_off["state"] == "failed"
    assert cut_off["rows"] == [{"value": 1}]
    printed = capsys.readouterr().out
    assert f"stopped by {number.name}" in printed
    assert printed.count("answered: answered") == 2
    assert signal.getsignal(number) is before


def test_a_lost_device_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path)
    questions = [Question("first", 1, one_then(refuse)), Question("second", 1, rows(1))]
    assert run.ask(questions, SmallDevice(lost_after=1)) == 1
    assert states_of(run) == {"first": State.FAILED}
    assert "run again with --resume" in capsys.readouterr().out


def test_a_resumed_run_asks_what_was_not_answered_and_shows_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_in(tmp_path)
    first.ask([Question("good", 1, rows(1)), Question("bad", 1, one_then(refuse))], SmallDevice())
    with (tmp_path / LINES).open("a") as file:
        file.write('{"name": "cut o')  # as a machine that went away leaves it
    again = run_in(tmp_path)
    again.resume()
    questions = [Question("good", 1, refuse_to_be_asked), Question("bad", 1, rows(2))]
    assert again.ask(questions, SmallDevice()) == 0
    assert {one.name: one.rows for one in again.answers} == {
        "good": [{"value": 1}],
        "bad": [{"value": 2}],
    }
    assert "good: answered" in capsys.readouterr().out
    third = run_in(tmp_path)
    third.resume()
    assert states_of(third) == {"good": State.ANSWERED, "bad": State.ANSWERED}


def refuse_to_be_asked() -> Iterator[Row]:
    raise AssertionError("asked again")


@pytest.mark.parametrize("changed", ["card", "size", "torch", "triton", "commit"])
def test_answers_about_something_else_are_asked_again(tmp_path: Path, changed: str) -> None:
    run_in(tmp_path).ask([Question("one", 1, rows(1))], SmallDevice())
    other = run_in(tmp_path, **{changed: "another"})
    other.resume()
    assert not other.answers


def test_files_without_a_repository_are_known_by_a_digest(tmp_path: Path) -> None:
    source = tmp_path / "scripts" / "one.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    first = describe_tree(tmp_path)
    assert first["commit"] is None
    assert first["dirty"] is None
    assert describe_tree(tmp_path) == first
    source.write_text("x = 2\n")
    assert describe_tree(tmp_path)["sources"] != first["sources"]
