import io
import re
from dataclasses import replace

from deft_libero.evaluation.progress import ProgressLine
from deft_libero.results.records import Outcome
from tests.libero.episodes import record


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Watch:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _progress(stream: io.StringIO, num_episodes: int = 10) -> ProgressLine:
    return ProgressLine("libero_object deft", num_episodes, stream, _Watch())


def _last_line(progress: ProgressLine, stream: io.StringIO) -> str:
    progress.finish()
    return stream.getvalue().splitlines()[-1]


def test_the_line_shows_how_far_how_good_how_fast_and_how_long_still() -> None:
    stream = io.StringIO()
    progress = _progress(stream)
    for trial, outcome in enumerate([Outcome.SUCCEEDED, Outcome.SUCCEEDED, Outcome.FAILED]):
        progress.count(record(0, trial, outcome))
    progress.count(record(0, 3, Outcome.ERRORED))
    told, _, rest = _last_line(progress, stream).partition(" ETA ")
    assert told == "libero_object deft 4/10 [####......]"
    remaining, _, figures = rest.partition(", ")
    assert re.fullmatch(r"\d\d:\d\d", remaining)
    assert figures == "67% success (95%: 21-94), 1 errored, 15.6 ms/action"


def test_earlier_episodes_do_not_count_for_the_time_left() -> None:
    stream = io.StringIO()
    progress = _progress(stream)
    progress.resume([record(0, trial) for trial in range(8)])
    line = _last_line(progress, stream)
    assert "8/10 [########..] ETA ?, 100% success" in line


def test_a_terminal_gets_one_line_that_is_redrawn_and_messages_above_it() -> None:
    stream = _Terminal()
    progress = _progress(stream)
    progress.draw()
    progress.draw()
    assert stream.getvalue().count("\r") == 1  # the others were too soon
    progress.say("the server is away")
    assert "the server is away\n" in stream.getvalue()
    progress.finish()
    assert stream.getvalue().endswith("\n")


def test_a_line_that_is_not_on_a_terminal_is_written_now_and_then() -> None:
    stream, watch = io.StringIO(), _Watch()
    progress = ProgressLine("libero_object deft", 100, stream, watch)
    for trial in range(50):
        watch.seconds += 3.0
        progress.count(record(0, trial))
    assert "\r" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 5


def test_an_episode_without_a_step_does_not_spoil_the_speed() -> None:
    stream = io.StringIO()
    progress = _progress(stream)
    progress.count(replace(record(), actions=record().actions[:0], answers=()))
    assert "ms/action" not in _last_line(progress, stream)


def test_a_scene_that_is_opened_stands_in_the_line_until_its_episode_runs() -> None:
    stream = io.StringIO()
    progress = _progress(stream)
    progress.opens("libero_object task 2")
    assert _last_line(progress, stream).endswith("ETA ?, opening libero_object task 2")
    progress = _progress(stream)
    progress.opens("libero_object task 2")
    progress.heard(15.0)
    assert _last_line(progress, stream).endswith("ETA ?, 15.0 ms/action")


def test_a_scene_that_takes_long_to_open_is_said_to_once_where_there_is_no_terminal() -> None:
    stream, watch = io.StringIO(), _Watch()
    progress = ProgressLine("libero_object deft", 100, stream, watch)
    progress.draw()
    for scene, seconds in (("task 1", 1.0), ("task 2", 20.0)):
        progress.opens(scene)
        for _ in range(4):
            watch.seconds += seconds / 4
            progress.draw()
        progress.count(record())
    said = stream.getvalue()
    assert "task 1" not in said
    assert said.count("opening task 2") == 1
