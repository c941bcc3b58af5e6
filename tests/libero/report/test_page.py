import csv
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deft_core.measures.speculation import Thinking
from deft_core.types import StageTimings
from deft_libero.commands.report import main
from deft_libero.report.chart import Axis, axis_of
from deft_libero.report.difference import compare
from deft_libero.report.page import short_names, stage_parts
from deft_libero.report.picture import find_races
from deft_libero.report.speed import baseline_first, baseline_of, speedup_of
from deft_libero.report.summary import summarise
from deft_libero.report.tables import terminal_table
from deft_libero.results.records import EpisodeRecord, Outcome
from deft_libero.results.store import ResultsStore, RunHeader, RunResults, load_run
from tests.libero.episodes import header, record


def _write(folder: Path, *records: EpisodeRecord, head: RunHeader | None = None) -> RunResults:
    store = ResultsStore(folder, head or header())
    for one in records:
        store.append(one)
    store.close()
    return load_run(folder)


def _named(name: str, **options: str) -> RunHeader:
    return replace(header(run=name, **options), name=f"libero_object {name}")


@pytest.fixture
def run(tmp_path: Path) -> RunResults:
    return _write(
        tmp_path / "a",
        record(0, 0, num_steps=3, passes=(4, 1)),
        record(0, 1, Outcome.FAILED, num_steps=5, passes=(0, 0, 2, 1)),
        record(1, 0, Outcome.ERRORED, num_steps=9),
        head=_named("a"),
    )


def test_errored_episodes_count_neither_as_success_nor_as_failure(run: RunResults) -> None:
    summary = summarise(run)
    assert (summary.successes.num_succeeded, summary.successes.num_failed) == (1, 1)
    assert summary.successes.num_errored == 1
    assert summary.successes.share == 0.5
    assert summary.num_steps == 8


def test_a_task_of_which_every_episode_errored_has_no_rate(run: RunResults) -> None:
    task = summarise(run).tasks["libero_object", 1]
    assert math.isnan(task.successes.share)
    assert task.successes.num_errored == 1


def test_speculation_is_recounted_from_the_answers(run: RunResults) -> None:
    """Three answers of 5 + 2 tokens, five of 1 + 1 + 3 + 2."""
    speculation = summarise(run).speculation
    assert speculation is not None
    assert speculation.passes_per_action == (3 * 2 + 5 * 4) / 8
    assert speculation.committed_length == 8 * 7 / 26
    assert speculation.relaxed_share == (1 + 2) / (8 * 7)  # every second answer relaxed one token
    means = {token: mean for token, (mean, _) in speculation.committed_by_start.items()}
    assert means == {0: (3 * 5 + 5 * 1) / 8, 5: 2.0, 1: 1.0, 2: 3.0}
    assert speculation.committed_by_pass == ((3 * 5 + 5) / 8, (3 * 2 + 5) / 8, 3.0, 2.0)
    assert speculation.drafted_by_token == (3 / 8, 3 / 8, 1.0, 1.0, 0.0, 1.0, 0.0)
    assert speculation.accepted_counts == {0: 10, 1: 8, 2: 5, 4: 3}


def test_text_and_action_are_told_apart(tmp_path: Path) -> None:
    one = record(0, 0, num_steps=2, passes=(90, 4, 2))
    thinking = [
        replace(answer, reasoning="lift", num_tokens=99, text_passes=2, text_ms=4.0 + index,
                action_ms=1.0)
        for index, answer in enumerate(one.answers)
    ]  # fmt: skip
    played = _write(tmp_path / "a", replace(one, answers=tuple(thinking)))
    speculation = summarise(played).speculation
    assert speculation is not None
    assert speculation.thinking == Thinking(2.0, 1.0, 4.5, 1.0)
    table = terminal_table([summarise(played)])
    assert "| 2.00 |    4.50 |   1.00 |      1.00 |" in table
    assert "text: of these, passes for what it writes before" in table
    assert main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "passes for the text" in (tmp_path / "page.html").read_text()


def test_passes_behind_the_end_of_an_action_count(
    tmp_path: Path,
) -> None:
    """As the published loop plays: no guesses in the prefill, then 5 of 49, then none of 49."""
    one = record(0, 0, num_steps=1, passes=(0, 5, 0))
    answers = tuple(replace(answer, guesses=(0, 49, 49)) for answer in one.answers)
    speculation = summarise(_write(tmp_path, replace(one, answers=answers))).speculation
    assert speculation is not None
    assert speculation.committed_length == (6 + 1) / 2
    assert speculation.accepted_counts == {0: 1, 5: 1}
    assert sum(map(speculation.share_of_length, (0, 5))) == 1.0
    assert speculation.committed_by_start == {1: (6.0, 1)}


def test_latency_is_of_the_episodes_that_were_judged(run: RunResults) -> None:
    stages = summarise(run).stages
    assert list(stages) == ["prefill_ms", "total_ms", "round_trip_ms"]
    assert stages["prefill_ms"].count == 8
    assert stages["prefill_ms"].p50 == 11.5  # 10 11 12 and 10 11 12 13 14


def test_the_stages_of_the_mean_round_trip_add_up_to_it(run: RunResults) -> None:
    summary = summarise(run)
    parts = stage_parts(summary)
    assert sum(parts.values()) == pytest.approx(summary.round_trip.mean)
    assert parts["rest of the server"] == pytest.approx(2.5)
    assert parts["network and client"] == pytest.approx(1.625)


def test_the_control_rate_is_that_of_the_answers_or_of_the_fresh_actions(tmp_path: Path) -> None:
    patient = _write(tmp_path / "p", record(0, 0, num_steps=4))
    spent_ms = 4 * 14.125 + (1 + 2 + 3)
    assert summarise(patient).control_rate == pytest.approx(1000 * 4 / spent_ms)
    hasty = _write(tmp_path / "h", record(0, 0, num_steps=4), head=header(pacing="real-time"))
    assert summarise(hasty).control_rate == 20 * 3 / 4  # one of four steps was held


def test_runs_are_compared_on_the_trials_both_of_them_finished(tmp_path: Path) -> None:
    won, lost, broke = Outcome.SUCCEEDED, Outcome.FAILED, Outcome.ERRORED
    first = _write(
        tmp_path / "a",
        *(record(0, trial, outcome) for trial, outcome in enumerate([won, won, won, lost, broke])),
        head=_named("a"),
    )
    second = _write(
        tmp_path / "b",
        *(record(0, trial, outcome) for trial, outcome in enumerate([won, lost, lost, won, won])),
        record(9, 9),
        head=_named("b"),
    )
    compared = compare(first, second, ("a", "b"))
    assert (compared.num_pairs, compared.both, compared.neither) == (4, 1, 0)
    assert (compared.only_first, compared.only_second) == (2, 1)
    assert compared.difference == -0.25
    assert compared.p_value == 1.0
    assert compared.num_same_actions == 4
    assert compared.verdict == "identical actions"
    assert compared.sentences == "Actions: identical."


def test_a_difference_that_luck_would_hardly_make_is_called_one(tmp_path: Path) -> None:
    first = _write(tmp_path / "a", *(record(0, trial, num_steps=3) for trial in range(8)))
    second = _write(
        tmp_path / "b", *(record(0, trial, Outcome.FAILED, num_steps=5) for trial in range(8))
    )
    compared = compare(first, second, ("a", "b"))
    assert compared.p_value == 2 / 2**8
    assert compared.verdict == "a succeeds more often"
    found = "Success: a succeeds more often. Actions: equal in 0 of 8 episodes."
    assert compared.sentences == found


def test_equal_success_is_not_equal_actions(tmp_path: Path) -> None:
    """It read "Actions: no difference shown" where none of the actions was equal."""
    first = _write(tmp_path / "a", *(record(0, trial, num_steps=3) for trial in range(4)))
    second = _write(tmp_path / "b", *(record(0, trial, num_steps=5) for trial in range(4)))
    compared = compare(first, second, ("a", "b"))
    found = (
        "Success: too few to tell: +0 points (95%: -46 to +46). Actions: equal in 0 of 4 episodes."
    )
    assert compared.sentences == found


def test_a_few_episodes_are_said_to_be_too_few_and_not_in_bold(tmp_path: Path) -> None:
    """It read "no difference shown" beside 100% and 75%."""
    outcomes = [Outcome.SUCCEEDED] * 3 + [Outcome.FAILED]
    folders = []
    for name, last in (("autoregressive", Outcome.SUCCEEDED), ("deft", Outcome.FAILED)):
        records = [
            record(0, trial, outcome, num_steps=3 + (name == "deft"))
            for trial, outcome in enumerate([*outcomes[:3], last])
        ]
        run = _write(tmp_path / name, *records, head=_named(name, decoding=name))
        folders.append(str(run.folder))
    text = _report(tmp_path, *folders)
    assert (
        '<p class="verdict open">Compared with autoregressive: Success: too few to tell: -25 points'
        in text
    )


def test_enough_episodes_without_a_difference_are_said_to_show_none(tmp_path: Path) -> None:
    first = _write(tmp_path / "a", *(record(0, trial, num_steps=3) for trial in range(100)))
    second = _write(tmp_path / "b", *(record(0, trial, num_steps=5) for trial in range(100)))
    compared = compare(first, second, ("a", "b"))
    assert compared.verdict == "no difference shown"
    assert not compared.is_open


def test_runs_on_different_assets_are_not_compared(tmp_path: Path) -> None:
    first = _write(tmp_path / "a", record())
    second = _write(tmp_path / "b", record(), head=replace(header(), assets="real 77"))
    assert compare(first, second, ("a", "b")).verdict == "different assets: not comparable"


class _Page(HTMLParser):
    """Notes what a browser would load, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass  # <line/>: opened and closed

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _report(tmp_path: Path, *arguments: str) -> str:
    out = tmp_path / "out" / "report.html"
    assert main([*arguments, "--out", str(out)]) == 0
    return out.read_text("utf-8")


def test_the_page_is_whole_and_loads_nothing(run: RunResults, tmp_path: Path) -> None:
    text = _report(tmp_path, str(run.folder))
    page = _Page(text)
    assert page.open == []
    assert page.loaded == []
    assert "http" not in re.sub(r"http://127\.0\.0\.1:\d+", "", text)
    shown = " ".join(page.texts)
    for expected in ("50.0%", "1 of 2 episodes succeeded", "Success by task", "Latency",
                     "Speculation", "Actions of one episode", "stand-in 1234"):  # fmt: skip
        assert expected in shown


def test_a_page_compares_each_run_with_the_baseline(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    for name, decoding in (("a", "deft:radius=3"), ("b", "lossless"), ("c", "autoregressive")):
        _write(runs / name, record(0, 0), head=_named(name, decoding=decoding))
    text = _report(tmp_path, str(runs))
    shown = " ".join(" ".join(_Page(text).texts).split())
    assert re.findall(r"(\w) against (\w): identical actions", shown) == [("a", "c"), ("b", "c")]
    assert re.findall(r"<h3>([\w ]+)</h3><ul class=\"values\">", text) == ["decoding"]
    names = re.findall(r"<article[^>]*><h2>(\w+)</h2>", text)
    assert names == ["c", "a", "b"]


def _answered_after(one: EpisodeRecord, milliseconds: float) -> EpisodeRecord:
    answers = (
        replace(answer, timings=StageTimings(total_ms=1.0, round_trip_ms=milliseconds))
        for answer in one.answers
    )
    return replace(one, answers=tuple(answers))


def _timed(folder: Path, name: str, mean_ms: list[float], shift_s: float = 0.5) -> RunResults:
    """Trials whose answers took these milliseconds, played in turn with those of another shift."""
    records = [
        replace(
            _answered_after(record(0, trial, num_steps=2 + trial), milliseconds),
            finished_s=10.0 * trial + shift_s,
        )
        for trial, milliseconds in enumerate(mean_ms)
    ]
    return _write(folder / name, *records, head=_named(name, decoding=name))


def test_a_speed_up_is_a_ratio_of_sums_with_an_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five episodes of 2 to 6 answers; the sixth was never played by the faster run."""
    plain = _timed(tmp_path, "autoregressive", [30.0, 30.0, 30.0, 30.0, 36.0, 500.0], shift_s=0.0)
    fast = _timed(tmp_path, "lossless", [10.0, 10.0, 10.0, 30.0, 30.0])
    runs = [fast, plain]
    assert baseline_first(runs) == [plain, fast]
    assert (baseline_of(fast, runs), baseline_of(plain, runs)) == (plain, None)
    found = speedup_of(fast, plain)
    assert found is not None
    assert found.times == pytest.approx((30 * 14 + 36 * 6) / (10 * 9 + 30 * 11))
    assert found.of_medians == 1.0
    assert found.interval.low < found.times < found.interval.high
    assert (found.num_episodes, found.doubts) == (5, ())
    assert '<div class="big">1.51×</div>' in _report(tmp_path, str(fast.folder), str(plain.folder))
    assert "lossless answers 1.51 times as fast as autoregressive" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plain_ms", "fast_ms", "shift_s", "doubt"),
    [
        ([30.0] * 4, [10.0] * 4, 0.5, "times of 4 episodes, 5 are needed"),
        ([30.0] * 6, [10.0] * 6, 500.0, "the runs were not played in turn"),
        ([30.0] * 5 + [700.0], [10.0] * 6, 0.5, "23.3 times as long as in its median"),
    ],
)
def test_a_speed_up_that_cannot_be_relied_on_is_no_headline(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    plain_ms: list[float],
    fast_ms: list[float],
    shift_s: float,
    doubt: str,
) -> None:
    plain = _timed(tmp_path, "autoregressive", plain_ms, shift_s=0.0)
    fast = _timed(tmp_path, "lossless", fast_ms, shift_s=shift_s)
    text = _report(tmp_path, str(plain.folder), str(fast.folder))
    assert "×</div>" not in text
    shown = " ".join(_Page(text).texts)
    assert "No speed-up can be concluded: " in shown
    assert doubt in shown
    assert doubt in capsys.readouterr().out
    assert "does not allow a conclusion: " in (tmp_path / "out" / "report.md").read_text()


def test_answers_that_were_not_given_a_core_are_no_headline(tmp_path: Path) -> None:
    plain = _timed(tmp_path, "autoregressive", [30.0] * 6, shift_s=0.0)
    fast = _timed(tmp_path, "lossless", [10.0] * 6)
    starved = replace(
        fast, records=tuple(replace(one, worked_s=0.006 * one.num_steps) for one in fast.records)
    )
    found = speedup_of(starved, plain)
    assert found is not None
    assert found.doubts == ("the machine was busy (answers had 60% of a core)",)


def test_a_run_of_other_starts_says_so(tmp_path: Path) -> None:
    first = _write(tmp_path / "a", *(record(0, trial) for trial in range(4)), head=_named("a"))
    second = _write(tmp_path / "b", record(0, 1), head=_named("b"))
    text = _report(tmp_path, str(first.folder), str(second.folder))
    said = "a: 4 starts, of which all runs of libero_object have 1"
    assert said in " ".join(_Page(text).texts)
    assert said in (tmp_path / "out" / "report.md").read_text()


def test_waiting_and_moving_robots_are_not_compared(
    tmp_path: Path,
) -> None:
    plain = _write(tmp_path / "a", record(), head=_named("a", decoding="autoregressive"))
    hasty = _write(tmp_path / "b", record(), head=_named("b", pacing="real-time"))
    assert baseline_of(hasty, [plain, hasty]) is plain
    assert speedup_of(hasty, plain) is None


def test_of_several_baselines_the_one_with_the_same_settings_counts(tmp_path: Path) -> None:
    def run(name: str, **options: str) -> RunResults:
        return _write(tmp_path / name, head=_named(name, **options))

    far = run("far", decoding="autoregressive", network_delay_ms="100")
    near = run("near", decoding="autoregressive", network_delay_ms="0")
    fast = run("fast", network_delay_ms="0")
    assert baseline_of(fast, [far, near, fast]) is near


def test_filmed_trials_are_shown_side_by_side_at_the_speed_they_had(tmp_path: Path) -> None:
    runs = []
    for name, milliseconds in (("plain", 100.0), ("fast", 25.0)):
        one = _answered_after(record(0, 0), milliseconds)
        run = _write(tmp_path / name, one, record(0, 1), head=_named(name, decoding=name))
        (run.folder / "videos").mkdir()
        (run.folder / one.video).write_bytes(b"")
        runs.append(run)
    races = find_races(runs)
    racers = races[runs[0].records[0].key]
    assert [racer.pace_ms for racer in racers] == [100.0, 25.0]
    assert [racer.seconds for racer in racers] == [0.4, 0.1]
    text = _report(tmp_path, *(str(run.folder) for run in runs))
    assert re.findall(r'data-rate="([\d.]+)"', text)[:2] == ["0.33333", "1.33333"]
    assert "Play at true speed" in text


def test_the_page_opens_on_the_trial_that_went_differently(tmp_path: Path) -> None:
    runs = []
    for name, second in (("plain", Outcome.SUCCEEDED), ("fast", Outcome.FAILED)):
        outcomes = (Outcome.SUCCEEDED, Outcome.FAILED, second, Outcome.SUCCEEDED)
        records = [
            replace(record(0, trial, one), video=f"videos/{trial}.mp4")
            for trial, one in enumerate(outcomes)
        ]
        run = _write(tmp_path / name, *records, head=_named(name, decoding=name))
        (run.folder / "videos").mkdir()
        for one in records:
            (run.folder / one.video).write_bytes(b"")
        runs.append(run)
    assert [key.trial for key in find_races(runs)] == [2, 0, 3, 1]
    text = _report(tmp_path, *(str(run.folder) for run in runs))
    assert text.index("trial 2 (succeeded, failed)") < text.index("trial 0 (succeeded, succeeded)")


def test_what_no_browser_can_play_that_slowly_is_hurried_and_says_so(tmp_path: Path) -> None:
    one = _answered_after(record(0, 0), 60_000.0)
    run = _write(tmp_path / "a", one)
    (run.folder / "videos").mkdir()
    (run.folder / one.video).write_bytes(b"")
    assert "Play at 112× true speed" in _report(tmp_path, str(run.folder))


def test_what_comes_from_outside_cannot_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    _write(
        tmp_path / "a",
        replace(record(0, 0, Outcome.ERRORED), instruction=evil, error=evil + '"'),
        head=replace(header(), name=evil, assets=evil, options={"decoding": evil}),
    )
    text = _report(tmp_path, str(tmp_path / "a"))
    assert evil not in text
    assert _Page(text).open == []


def test_videos_that_are_there_are_linked_relative_to_the_page(
    run: RunResults, tmp_path: Path
) -> None:
    video = run.folder / run.records[0].video
    video.parent.mkdir()
    video.write_bytes(b"")
    text = _report(tmp_path, str(run.folder))
    links = {link for link in _Page(text).loaded if link}
    assert links == {"../a/videos/task00-trial00-succeeded.mp4"}


@pytest.mark.parametrize("video", ["/etc/passwd", "../elsewhere.mp4"])
def test_a_video_outside_of_the_runs_folder_is_not_linked(tmp_path: Path, video: str) -> None:
    (tmp_path / "elsewhere.mp4").write_bytes(b"")
    run = _write(tmp_path / "a", replace(record(), video=video))
    assert not {link for link in _Page(_report(tmp_path, str(run.folder))).loaded if link}


def test_a_run_without_any_episode_says_so(tmp_path: Path) -> None:
    _write(tmp_path / "a")
    text = _report(tmp_path, str(tmp_path / "a"))
    assert _Page(text).open == []
    assert "No episode has ended yet" in text


def test_names_lose_what_all_runs_share(tmp_path: Path) -> None:
    heads = (replace(header(), name=f"libero_object {one} stream") for one in ("deft", "lossless"))
    runs = [_write(tmp_path / str(number), head=head) for number, head in enumerate(heads)]
    assert short_names(runs) == ["deft", "lossless"]
    assert short_names(runs[:1]) == ["deft stream"]


def test_the_csv_has_a_row_per_episode_and_the_markdown_a_table(
    run: RunResults, tmp_path: Path
) -> None:
    _report(tmp_path, str(run.folder))
    text = (tmp_path / "out" / "report.csv").read_text("utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["outcome"] for row in rows] == ["succeeded", "failed", "errored"]
    assert rows[1]["mean_round_trip_ms"] == "16.125"
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "| libero_object a | 50.0% (1/2) | 9.5–90.5 | 1 |" in markdown


def test_one_chosen_episode_is_drawn(run: RunResults, tmp_path: Path) -> None:
    text = _report(tmp_path, str(run.folder), "--episode", "libero_object:0:1")
    assert "(libero_object task 0 trial 1)" in text


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--episode", "libero_object:7:7"], 2, "no run"),
        (["--episode", "7"], 2, "SUITE:TASK:TRIAL"),
        (["nowhere"], 1, "no results"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    run: RunResults, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, told: str
) -> None:
    assert main([str(run.folder), *arguments]) == code
    message = capsys.readouterr().err
    assert told in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("suffix", [".md", ".csv"])
def test_a_page_named_like_what_is_written_beside_it_is_refused(
    run: RunResults, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(run.folder), "--out", str(tmp_path / f"report{suffix}")])
    assert caught.value.code == 2
    assert "--out is the page" in capsys.readouterr().err
    assert not list(tmp_path.glob("report*"))


def test_a_page_that_cannot_be_written_is_one_line(
    run: RunResults, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run.folder), "--out", "/proc/nowhere/report.html"]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 47, [0, 20, 40]), (-1.05, 1.05, [-1, 0, 1])],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert Axis("", low, high).ticks == expected


def test_an_axis_of_one_value_has_a_width() -> None:
    axis = axis_of("ms", [3.0])
    assert axis.low < 3.0 < axis.high
