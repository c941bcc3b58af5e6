"""Studies: rows answer frames, lines are kept, and every number of a page comes from them."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from deft_core.measures.answers import AnswerRecord
from deft_core.peers.conventions import to_robosuite
from deft_core.types import ActOptions, StageTimings
from deft_libero.errors import ResultsMismatchError
from deft_libero.results.records import Outcome
from deft_libero.results.store import WEIGHTS, ResultsStore, RunResults, load_run, load_runs
from deft_policies import tiny_libero
from deft_policies.base import PolicyRequest
from deft_policies.benchmark.transformers_loops import QwenLoop
from deft_policies.decoding.methods import find_method
from deft_policies.memory import SessionMemory
from scripts.reproduce.__main__ import main, refuse_changed_sources
from scripts.reproduce.acceptance import chances, measured_chances
from scripts.reproduce.choices import FILE as CHOICES
from scripts.reproduce.choices import record_choices
from scripts.reproduce.measures import RowResults, answers_of, cell_of, find_measure
from scripts.reproduce.page import (
    PAGE,
    ResultsFolder,
    check,
    fill,
    outputs,
    pack,
    quoting_pages,
    unpack,
    write,
)
from scripts.reproduce.played import Played
from scripts.reproduce.record import FrameSet, PolicyWords, Replays
from scripts.reproduce.runs import table_of
from scripts.reproduce.study import (
    FOLDER,
    PLAIN,
    SUFFIX,
    ReproductionError,
    Row,
    Study,
    distinct,
    load_study,
    study_names,
)
from tests import golden_ecot
from tests.demonstrations import write_demonstrations
from tests.libero.episodes import header, record
from tests.repository import ROOT
from tests.standins import stand_ins
from tests.typed import next_command

RELAXED = "within-bins:drafts=previous"
STUDY = f"""
title = "A study"
about = "Two rows."
[[table]]
key = "small"
title = "Small"
measures = ["success", "points", "played-passes", "passes", "committed", "equal", "mm", "deg"]
row = [
  {{ name = "plain", played = true }},
  {{ name = "relaxed", method = "{RELAXED}", played = true, x = 1 }},
  {{ name = "half right", acceptance = 0.5, levels = 2 }},
  {{ name = "impossible", method = "lossless:drafts=small-model" }},
]
plot = ["passes"]
plot_x = "number"
"""
WORDS = PolicyWords("tiny-libero", ("--threads", "1"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Six episodes of ten frames."""
    return write_demonstrations(tmp_path_factory.mktemp("data"), episodes=6, steps=10)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, data) -> Path:
    """The study's rows over six frames of one episode."""
    out = tmp_path_factory.mktemp("reproduced")
    study_in(out)
    replays = Replays(WORDS, out)
    rows = distinct(load_study(out / "studies" / "made-up.toml").rows())
    replays.record(rows, FrameSet(data, 6))
    facts = {"environment": replays.told, "left_out": replays.left_out}
    (out / "environment.json").write_text(json.dumps(facts))
    write(out)
    return out


@pytest.fixture
def folder(recorded, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


def study_in(out: Path) -> Study:
    (out / "studies").mkdir()
    (out / "studies" / "made-up.toml").write_text(STUDY)
    return load_study(out / "studies" / "made-up.toml")


def rows_of(folder: Path):
    results = ResultsFolder(folder)
    return {one.row.name: one for one in results.rows_of(results.table("made-up", "small"))}


@pytest.mark.parametrize("name", study_names())
def test_every_study_that_ships_asks_for_what_there_is(name):
    study = load_study(FOLDER / f"{name}.toml")
    for row in study.rows():
        find_method(row.method)
    for table in study.table:
        assert table.rows, table.key
        for measure in (*table.measures, *table.plot):
            assert find_measure(measure)[0].meaning


def test_equal_rows_are_played_once_beside_plain_decoding(
    tmp_path,
):
    study = study_in(tmp_path)
    names = [(row.method, row.played) for row in distinct(study.rows())]
    assert names[:2] == [(PLAIN, True), (RELAXED, True)]
    assert [row.played for row in distinct(study.rows(names=["half right"]))] == [False, False]
    assert [row.name for row in study.rows("small", ["relaxed"])] == [PLAIN, "relaxed"]
    assert study.rows("large") == []


def test_a_field_that_a_study_does_not_have_is_refused_by_name(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(STUDY.replace("levels = 2", "leaves = 2"))
    with pytest.raises(ReproductionError, match="leaves"):
        load_study(path)


def test_cells_say_what_asking_the_policy_frame_by_frame_says(recorded, data):
    """The slow twin: no lines, no summary, no pairs."""
    rows, policy = rows_of(recorded), WORDS.load()
    _, seen = next(FrameSet(data, 6).episodes())
    actions, passes, checked = {}, {}, []
    for method in (PLAIN, RELAXED):
        memory, actions[method], passes[method] = SessionMemory(), [], []
        for frame in seen:
            (answer,) = policy.act([PolicyRequest(frame, memory, ActOptions(decoding=method))])
            memory, trace = answer.memory, answer.chunk.trace
            actions[method].append(to_robosuite(answer.chunk.actions[0]))
            passes[method].append(trace.num_passes)
            checked += [one.committed_length for one in trace.checked_passes]
    plain, relaxed = np.array(actions[PLAIN]), np.array(actions[RELAXED])
    far = np.linalg.norm(plain[:, :3] - relaxed[:, :3], axis=1).mean() * 50
    turned = np.degrees(np.linalg.norm(plain[:, 3:6] - relaxed[:, 3:6], axis=1).mean() * 0.5)
    same = [np.array_equal(one, other) for one, other in zip(plain, relaxed, strict=True)]
    found = {name: cell_of(name, rows["relaxed"])[1] for name in ("passes", "committed", "mm")}
    assert found == pytest.approx(
        {"passes": np.mean(passes[RELAXED]), "committed": np.mean(checked), "mm": far}
    )
    assert cell_of("passes", rows["plain"])[1] == np.mean(passes[PLAIN]) == 7
    assert cell_of("equal", rows["relaxed"])[1] == pytest.approx(100 * np.mean(same))
    assert cell_of("deg", rows["relaxed"])[1] == pytest.approx(turned)


def test_a_policy_that_thinks_when_asked_acts_at_once_in_a_study(tmp_path, data):
    checkpoint = golden_ecot.write(tmp_path / "policy")
    note = {"instructions": ["lift it"], "assets": "", "prompts": ["openvla", "ecot"]}
    (checkpoint / "training.json").write_text(json.dumps(note))
    flags = ("--checkpoint", str(checkpoint), "--statistics-key", "bridge_orig", "--threads", "1")
    Replays(PolicyWords("model", flags), tmp_path).record([Row("plain")], FrameSet(data, 1))
    (answer,) = answers_of(load_run(tmp_path / "frames" / PLAIN))
    assert (len(answer.accepted), answer.reasoning) == (7, "")


def test_how_sure_the_target_is_comes_from_its_own_distributions(recorded, data, tmp_path):
    policy, frames = WORDS.load(), FrameSet(data, 6)
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    record_choices(policy, frames, tmp_path)
    content = (tmp_path / CHOICES).read_bytes()
    record_choices(policy, frames, tmp_path)  # they are there
    assert (tmp_path / CHOICES).read_bytes() == content
    header, line = map(json.loads, gzip.decompress(content).splitlines())
    assert header["frames"] == frames.label

    first = policy.model.target.action_tokens.first
    _, seen = next(frames.episodes())
    for at, one in enumerate(seen):
        asked = ActOptions(decoding=PLAIN, want_trace=True)
        (answer,) = policy.act([PolicyRequest(one, SessionMemory(), asked)])
        assert [first + each for each in line["first"][at]] == [*answer.chunk.trace.tokens]
    apart = np.abs(np.array(line["first"]) - np.array(line["second"]))[:, :-1]
    assert apart.min() > 0
    assert 0 < np.min(line["probability"]) <= np.max(line["probability"]) <= 1
    write(tmp_path)
    (row,) = (one for one in (tmp_path / PAGE).read_text().splitlines() if "all but" in one)
    assert f"| {100 * np.mean(apart <= 9):.1f}% |" in row
    assert check(tmp_path) == []
    with pytest.raises(ReproductionError, match="other frames"):
        record_choices(policy, FrameSet(data, 5), tmp_path)


def test_scripted_drafts_leave_answers_as_they_are(recorded):
    rows = rows_of(recorded)
    assert cell_of("equal", rows["half right"])[1] == 100
    assert 2 < cell_of("passes", rows["half right"])[1] < 7


def test_a_row_the_policy_cannot_answer_is_left_out(recorded):
    assert "impossible" not in rows_of(recorded)
    page = (recorded / "page.md").read_text()
    assert "Left out: `lossless-drafts=small-model`" in page
    assert "--draft-head" in page


def test_a_killed_replay_goes_on_and_ends_with_the_same_numbers(folder, data):
    before, frames = outputs(ResultsFolder(folder)), FrameSet(data, 6)
    lines = folder / "frames" / "autoregressive" / "episodes.jsonl"
    lines.write_bytes(lines.read_bytes()[:-20])  # as a kill leaves it: a torn line
    study = load_study(folder / "studies" / "made-up.toml")
    other = folder / "frames" / "within-bins-drafts=previous" / "episodes.jsonl"
    kept = other.read_bytes()
    Replays(WORDS, folder).record(distinct(study.rows()), frames)
    assert other.read_bytes() == kept
    after = outputs(ResultsFolder(folder))
    assert after == before
    assert not load_run(lines.parent).has_torn_line


def test_lines_of_other_frames_are_never_mixed(folder, data):
    with pytest.raises(Exception, match="made differently"):
        Replays(WORDS, folder).record(
            distinct(load_study(folder / "studies" / "made-up.toml").rows()), FrameSet(data, 5)
        )


def test_a_page_as_its_lines_say_passes_and_one_changed_digit_is_found(folder, capsys):
    assert check(folder) == []
    assert main(["--check", str(folder)]) == 0
    page = folder / "page.md"
    page.write_text(page.read_text().replace("7.00", "7.10", 1))
    assert any("7.10" in line for line in check(folder))
    assert main(["--check", str(folder)]) == 1
    assert "7.10" in capsys.readouterr().out
    write(folder)
    assert check(folder) == []


def test_a_changed_line_is_found_too(folder):
    lines = folder / "frames" / "within-bins-drafts=previous" / "episodes.jsonl"
    found = json.loads(lines.read_text())
    found["answers"]["accepted"] = [[0] * len(one) for one in found["answers"]["accepted"]]
    lines.write_text(json.dumps(found) + "\n")
    assert any(line.startswith("+") for line in check(folder))
    (folder / "page.md").unlink()
    assert any("page.md is missing" in line for line in check(folder))


def test_a_page_quotes_tables_and_has_no_measured_number_of_its_own(folder, tmp_path):
    page = tmp_path / "results.md"
    page.write_text(
        "# Results\n\nTable 2 took `7.5 ms`.\n\n<!-- from copy#made-up/small -->\n<!-- end -->\n"
    )
    assert any("+| relaxed |" in line for line in check(page))
    write(page)
    assert check(page) == []
    assert "| relaxed |" in page.read_text()
    page.write_text(page.read_text() + "It won 30 of 30, in 12 ms and 5.5 more, by 3 %.\n")
    loose = [line.rpartition("line ")[2].split("'")[1] for line in check(page)]
    assert loose == ["30 of 30", "12 ms", "5.5", "3 %"]
    with pytest.raises(ReproductionError, match="must end with"):
        fill("<!-- from copy#made-up/small -->\nx\n", tmp_path)
    with pytest.raises(ReproductionError, match="it has made-up/small"):
        fill("<!-- from copy#made-up/large -->\nx\n<!-- end -->", tmp_path)


def test_a_page_says_once_what_a_column_means(folder, tmp_path):
    play(tmp_path, PLAIN, "sf", passes=7)
    play(tmp_path, RELAXED, "ss", passes=2)
    page = tmp_path / "page.md"
    blocks = ("copy#legend", "played#runs", "played#runs", "copy#made-up/small")
    page.write_text("".join(f"<!-- from {one} -->\n<!-- end -->\n" for one in blocks))
    write(page)
    legend, first, second, _ = page.read_text().split("<!-- end -->\n")[:4]
    assert "- 95%: Wilson's interval" in first
    assert "- 95%" not in second
    assert second.splitlines()[1:3] == first.splitlines()[1:3]
    assert "initial states" in second
    assert "- **equal actions**" in legend
    assert "- **passes**" not in legend  # the runs say it
    assert "- **success minus plain's" not in legend  # no table of the page has it
    assert check(page) == []


def test_all_results_and_the_pages_that_quote_them_are_written_and_checked_at_once(
    folder, tmp_path
):
    results = tmp_path / "repository" / "docs" / "results"
    shutil.copytree(folder, results / "copy")
    (results / "copy" / PAGE).unlink()
    pages = [results / "detail.md", results.parent / "results.md", results.parents[1] / "README.md"]
    for page, where in zip(pages, ("", "results/", "docs/results/"), strict=True):
        page.write_text(f"<!-- from {where}copy#made-up/small -->\n<!-- end -->\n")
    assert sorted(quoting_pages(results)) == sorted(pages)
    write(results)
    assert all("| relaxed |" in page.read_text() for page in (*pages, results / "copy" / PAGE))
    assert check(results) == []


def test_a_row_that_has_not_answered_every_frame_is_not_compared(folder):
    (folder / "frames" / "within-bins-drafts=previous" / "episodes.jsonl").write_bytes(b"")
    assert set(rows_of(folder)) == {"plain", "half right"}


def test_times_are_taken_apart_from_what_rows_answer_and_tables_say_how(folder, data):
    """Of one episode; the batch of copies is for its times alone."""
    study = folder / "studies" / "made-up.toml"
    text = study.read_text().replace('"passes", "committed"', '"passes", "speedup", "p50"', 1)
    text = text.replace('  { name = "half', '  { name = "four", batch = 4 },\n  { name = "half')
    study.write_text(text.replace('"p50"', '"p50", "judge-ms"'))
    assert "| ms |" not in "".join(outputs(ResultsFolder(folder)).values())

    replays = Replays(WORDS, folder)
    rows = distinct(load_study(study).rows())
    replays.record(rows, FrameSet(data, 6))
    assert not (folder / "frames" / "autoregressive-batch4").exists()
    replays.time(rows, FrameSet(data, 3))

    found = rows_of(folder)
    assert {name for name, one in found.items() if one.timed} == {*found}
    assert {"four", "plain", "relaxed", "half right"} == {*found}
    assert cell_of("p50", found["plain"])[1] > 0
    assert cell_of("judge-ms", found["relaxed"])[1] > 0
    assert cell_of("frames", found["plain"])[1] == 6
    assert len(answers_of(found["plain"].timed)) == 3
    assert found["plain"].timed.records[0].worked_s > 0
    page = outputs(ResultsFolder(folder))[PAGE]
    assert "Times are of 3 recorded frames of 1 episodes" in page
    assert "No speed-up is reported for relaxed" in page
    assert "times of 1 episode, 5 are needed" in page
    assert cell_of("speedup", found["relaxed"]) == ("–", None)


def test_timed_frames_are_stretches_of_five_episodes(data):
    frames = FrameSet(data, 60)
    whole = dict(frames.episodes())
    parts = list(frames.for_times(25).episodes())
    assert [len(seen) for _, seen in parts] == [5] * 5
    starts = [
        next(at for at, one in enumerate(whole[key]) if np.array_equal(one.image, seen[0].image))
        for key, seen in parts
    ]
    assert starts == [0, 1, 2, 4, 5]


def timed_as(run: RunResults, *mean_ms: float) -> RunResults:
    """A run of episodes in turn whose answers took these milliseconds."""
    (one,) = run.records
    records = []
    for trial, spent in enumerate(mean_ms):
        times = [replace(answer.timings, round_trip_ms=spent) for answer in one.answers]
        pairs = zip(one.answers, times, strict=True)
        answers = tuple(replace(answer, timings=time) for answer, time in pairs)
        key = replace(one.key, trial=trial)
        records.append(replace(one, key=key, answers=answers, finished_s=trial))
    return replace(run, records=tuple(records))


def test_a_speed_up_is_told_of_five_episodes_in_turn_with_its_interval(recorded):
    rows = rows_of(recorded)
    plain = RowResults(rows["plain"].row, timed=timed_as(rows["plain"].replayed, *[60.0] * 5))
    own = timed_as(rows["relaxed"].replayed, 20.0, 20.0, 30.0, 40.0, 40.0)
    text, value = cell_of("speedup", RowResults(rows["relaxed"].row, timed=own, plain=plain))
    assert value == 2.0
    assert text == "2.00x (1.58 to 2.73; medians 2.00x)"


def test_packed_lines_say_the_same_and_go_on_once_they_are_unpacked(folder):
    before = outputs(ResultsFolder(folder))
    names = sorted(run.folder.name for run in load_runs(folder / "frames"))
    pack(folder)
    assert not (folder / "frames").exists()
    assert outputs(ResultsFolder(folder)) == before
    unpack(folder)
    assert not (folder / "frames.jsonl.gz").exists()
    assert sorted(run.folder.name for run in load_runs(folder / "frames")) == names


def test_what_rows_share_of_a_frame_changes_no_line(folder, data, tmp_path):
    """The slow twin: every row by itself, nothing remembered."""
    study = load_study(folder / "studies" / "made-up.toml")
    rows = distinct(row for row in study.rows() if row.acceptance is None)
    replays = Replays(WORDS, tmp_path / "apart")
    for row in rows:
        replays.time([row], FrameSet(data, 6))
    for row in (one for one in rows if one.slug not in replays.left_out):
        apart = load_run(tmp_path / "apart" / "timed" / row.slug).records
        together = load_run(folder / "frames" / row.slug).records
        assert [one.accepted for one in apart[0].answers] == [
            one.accepted for one in together[0].answers
        ]
        assert np.array_equal(apart[0].actions, together[0].actions)


def test_plots_are_svg_with_named_axes_and_a_line_per_measure(recorded):
    (plot,) = (recorded / "plots").glob("*.svg")
    tree = ElementTree.fromstring(plot.read_text())
    texts = [one.text for one in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Small", "number", "passes"} <= {*texts}
    assert len(tree.findall("{*}polyline")) == 1
    assert len(tree.findall("{*}path[@class='mark']")) == 2  # of the point, and in the legend
    assert f"![Small](plots/{plot.name})" in (recorded / "page.md").read_text()


def test_a_row_holds_columns_of_one_experiment():
    page = (ROOT / "docs/results/tiny-libero/page.md").read_text().splitlines()
    tables = [row for row, below in pairwise(page) if below.startswith("| ---")]
    headings = [{one.strip() for one in row.split("|")} for row in tables]
    times = {"ms", "times as fast here", "passes, as served", "acceptance, ms a pass"}
    frames = {"passes", "committed length", "equal actions", "mm from plain"}
    for experiment in (times, frames):
        assert any(one & experiment for one in headings)
    assert not [one for one in headings if one & times and one & frames]


def test_a_page_says_what_every_column_means(recorded):
    page = (recorded / "page.md").read_text()
    assert "- **committed length**: tokens that a pass with drafts commits" in page


def play(folder: Path, method: str, outcomes: str, passes: int) -> None:
    """A played run whose trials succeeded (s) or failed (f)."""
    told = replace(header(run=method), options={"decoding": method})
    store = ResultsStore(folder / "played" / method.partition(":")[0], told)
    for trial, mark in enumerate(outcomes):
        outcome = Outcome.SUCCEEDED if mark == "s" else Outcome.FAILED
        one = record(trial=trial, outcome=outcome, passes=(0,) * passes)
        store.append(replace(one, actions=one.actions + passes))
    store.close()


def test_played_rows_are_paired_and_the_cheapest_good_one_is_named(folder):
    play(folder, PLAIN, "s" * 300, passes=7)
    play(folder, RELAXED, "s" * 299 + "f", passes=2)
    (page,) = (text for name, text in outputs(ResultsFolder(folder)).items() if name == "page.md")
    assert "| relaxed | 99.7% (299/300) |" in page
    assert "relaxed minus plain is -0.3 points" in page
    assert "is ruled out." in page
    assert "relaxed has the fewest passes: 2.00." in page


def test_a_row_of_fewer_starts_says_so_and_is_not_compared(folder):
    play(folder, PLAIN, "s" * 20 + "f" * 4, passes=7)
    play(folder, RELAXED, "s" * 12, passes=2)
    (page,) = (text for name, text in outputs(ResultsFolder(folder)).items() if name == "page.md")
    assert "| plain | 100.0% (12/12) |" in page  # on the starts of both
    study = folder / "studies" / "made-up.toml"
    more = '{ name = "other", method = "lossless:drafts=previous", played = true },'
    study.write_text(study.read_text().replace("row = [", "row = [" + more))
    play(folder, "lossless:drafts=previous", "s" * 20, passes=3)
    rows = rows_of(folder)
    assert cell_of("success", rows["plain"])[0] == "100.0% (20/20)"
    assert cell_of("success", rows["relaxed"])[0] == "100.0% (12/12), on 12 of 20 starts"
    assert cell_of("points", rows["relaxed"]) == ("–", None)
    assert rows["other"].played_apart.num_pairs == 20


def test_a_page_quotes_an_evaluation_that_belongs_to_no_study(folder, tmp_path):
    play(tmp_path, PLAIN, "s" * 9 + "f", passes=7)
    play(tmp_path, RELAXED, "s" * 8 + "ff", passes=2)
    pack(tmp_path / "played")
    assert (tmp_path / "played.jsonl.gz").is_file()
    page = tmp_path / "card.md"
    page.write_text(
        "<!-- from played.jsonl.gz#runs -->\n<!-- end -->\n"
        "<!-- from played#tasks -->\n<!-- end -->\n"
        "<!-- from played#times -->\n<!-- end -->\n"
    )
    assert check(page)
    write(page)
    assert check(page) == []
    text = page.read_text()
    assert "90.0% (9/10)" in text
    assert "(10 starts) | 2.00 |" in text
    assert "| 80.0% (8/10) |" in text
    assert "| 15.6 | 14.0 | 1.00 (1.00 to 1.00; 1.00 by medians) |" in text
    page.write_text(text.replace("9/10", "10/10"))
    assert check(page)
    with pytest.raises(ReproductionError, match="it has runs, tasks"):
        fill("<!-- from played#speeds -->\n<!-- end -->", tmp_path)


def weigh(folder: Path, digest: str) -> None:
    """Say that a run is of these weights."""
    path = folder / "run.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "server": {WEIGHTS: digest}}))


def test_lines_of_different_weights_make_no_table(folder, tmp_path):
    play(tmp_path, PLAIN, "s", passes=7)
    play(tmp_path, RELAXED, "s", passes=2)
    weigh(tmp_path / "played" / PLAIN, "12" * 32)
    weigh(tmp_path / "played" / "within-bins", "34" * 32)
    for key in ("runs", "tasks", "times"):
        with pytest.raises(ResultsMismatchError, match="121212121212.*343434343434"):
            table_of(tmp_path / "played", key)
    weigh(folder / "frames" / PLAIN, "56" * 32)
    with pytest.raises(ResultsMismatchError, match="565656565656"):
        outputs(ResultsFolder(folder))


def test_lines_that_name_no_weights_say_so(tmp_path):
    play(tmp_path, PLAIN, "s", passes=7)
    for key in ("runs", "tasks", "times"):
        assert "weights not recorded" in table_of(tmp_path / "played", key)


def test_the_command_runs_a_study_over_a_policy_given_by_flags(tmp_path, data, capsys):
    out = tmp_path / "out"
    flags = ["--random-weights", "small", "--threads", "1"]
    arguments = [
        "draft-length/length-and-acceptance",
        "--row",
        "scripted, a = 1, K = 5",
        "--no-episodes",
    ]
    arguments += ["--recording", str(data), "--frames", "2", "--time", "1", "--out", str(out)]
    assert main([*arguments, *flags]) == 0
    assert main(next_command(capsys.readouterr().out)[3:]) == 0
    assert "| scripted, a = 1, K = 5 | " in (out / "page.md").read_text()
    assert "Times are of 1 recorded frames of 1 episodes" in (out / "page.md").read_text()
    assert load_run(out / "frames" / PLAIN).header.server["weights"] == "random:small"
    assert check(out) == []
    assert main(["nothing", "--out", str(out)]) == 1
    assert "'nothing'; known: block-head" in capsys.readouterr().err


ABOUT_STUDIES = (ROOT / "docs" / "reproducing.md").read_text("utf-8")
(OWN_STUDY,) = re.findall(r"^```toml\n(.*?)^```", ABOUT_STUDIES, re.M | re.S)


def test_a_study_of_ones_own_is_given_by_its_path(tmp_path, data, capsys):
    path, out = tmp_path / "mine.toml", tmp_path / "out"
    path.write_text(OWN_STUDY)
    flags = ["--random-weights", "small", "--threads", "1", "--no-episodes", "--out", str(out)]
    flags += ["--recording", str(data), "--frames", "4"]
    assert main([f"{path}/small", *flags]) == 0
    printed = capsys.readouterr().out
    assert "## Within four bins" in printed
    assert "| mine | " in printed
    assert (out / "studies" / "mine.toml").read_text() == OWN_STUDY
    assert main([str(path), *flags]) == 0  # whole, and resumed
    assert check(out) == []
    assert main([str(tmp_path / "other.toml"), *flags]) == 1
    assert "other.toml is no study" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--decoding", "deft"], ["--radius", "3"]])
def test_a_method_that_no_row_would_answer_with_is_refused(flag, tmp_path, capsys):
    asked = ["spec-vla/table-2", "--no-episodes", "--out", str(tmp_path / "out"), *flag]
    assert main(asked) == 1
    assert " ".join(flag) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_table_is_printed_for_a_checkpoint_of_ones_own(tmp_path, data, capsys):
    checkpoint = shutil.copytree(tiny_libero.CHECKPOINT, tmp_path / "mine")
    arguments = ["spec-vla/table-2", "--no-episodes", "--recording", str(data), "--frames", "3"]
    flags = ["--checkpoint", str(checkpoint), "--draft-head", str(tiny_libero.HEADS[0])]
    flags += ["--row", "strict, our loop"]
    assert main([*arguments, *flags, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "## Table 2: share of passes by accepted length" in told
    assert "| strict, our loop | " in told
    assert "| Goal, strict | 50.24% | " in told
    assert not (tmp_path / "out" / CHOICES).exists()


def test_every_table_is_listed_with_what_it_shows(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["table", "frames", "episodes", "what", "it", "shows"]
    listed = [line for line in lines[1:] if "/" in line.split(" ")[0]]
    tables = [
        f"{name}/{table.key}"
        for name in study_names()
        for table in load_study(FOLDER / f"{name}{SUFFIX}").table
    ]
    assert [line.split()[0] for line in listed] == tables
    assert "Spec-VLA: Table 2: share of passes by accepted length" in "".join(listed)


def played_in(out: Path) -> RunResults:
    (run,) = load_runs(out / "played")
    return run


def test_episodes_may_be_played_from_other_machines(tmp_path):
    flags = ("--environment", "point_world", "--step-limit", "2")
    episodes = Played(WORDS, tmp_path, "point_world", flags, host="127.0.0.2")
    episodes.play([Row("plain", played=True)], 1)
    run = played_in(tmp_path)
    assert run.records
    assert "://127.0.0.2:" in run.header.notes["url"]


def test_episodes_in_which_frames_were_recorded_count_among_those_played(tmp_path):
    flags = ("--environment", "point_world", "--step-limit", "2")
    episodes = Played(WORDS, tmp_path, "point_world", flags)
    recorded = FrameSet(episodes.record_frames(1), 10)
    (first,) = played_in(tmp_path).records
    assert recorded.label.startswith("2 recorded frames")
    assert len(first.answers) == 2
    episodes.play([Row("plain", played=True)], 2)
    assert first.finished_s in [one.finished_s for one in played_in(tmp_path).records]
    assert len(played_in(tmp_path).records) == 2


def test_workers_are_sought_on_the_ray_that_is_named(tmp_path, capfd, monkeypatch):
    (tmp_path / "ray.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    flags = [
        "--quick",
        "--assets",
        str(stand_ins()),
        "--ray",
        "10.0.0.5:6379",
        "--out",
        str(tmp_path),
    ]
    assert main(["fly", "--threads", "1", *flags]) == 1
    assert "--ray needs Ray" in capfd.readouterr().err


RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize(
    "page",
    [*sorted(path.parent for path in RESULTS.glob("*/environment.json")), *quoting_pages(RESULTS)],
    ids=lambda path: path.name,
)
def test_every_number_of_a_committed_page_comes_from_its_lines(page, monkeypatch):
    for name in ("scripts.reproduce.page.load_runs", "scripts.reproduce.runs.load_runs"):
        monkeypatch.setattr(name, lambda path: committed_runs(path.resolve()))
    assert check(page) == []


@cache
def committed_runs(path: Path) -> list[RunResults]:
    """Those of a file that several pages quote, read once."""
    return load_runs(path)


def test_lengths_have_the_interval_of_drawing_five_episodes_anew():
    def passes(num_episodes: int) -> tuple[str, float | None]:
        records = [record(trial=one, passes=(0,) * (3 + one % 2)) for one in range(num_episodes)]
        return cell_of("passes", RowResults(Row(""), RunResults(Path(), header(), tuple(records))))

    assert passes(4) == ("3.50", 3.5)
    assert passes(5) == ("3.40 (3.00 to 3.80)", 3.4)


def test_where_an_answer_has_no_action_the_robot_holds(tmp_path, data):
    cut_short = PolicyWords(
        "tiny-libero", ("--threads", "1", "--family", "ecot", "--max-tokens", "9")
    )
    Replays(cut_short, tmp_path).record([Row("plain")], FrameSet(data, 2))
    run = load_run(tmp_path / "frames" / PLAIN)
    assert not run.records[0].actions.any()
    assert cell_of("no-action", RowResults(Row("plain"), run)) == ("100.0%", 100.0)


def test_chances_are_counted_token_by_token():
    answers = [
        AnswerRecord(0, 0, StageTimings(), accepted=(2, 0, 1), guesses=(6, 3, 2)),
        AnswerRecord(1, 1, StageTimings(), accepted=(0, 5), guesses=(6, 5)),
    ]
    # Tokens 1, 2 stood and 3 fell; 4 fell; 5 stood and 6 fell. Then 1 fell, and 2 to 6 stood.
    assert chances(answers, 7, 7) == (1 / 2, 1.0, 1 / 2, 1 / 2, 1.0, 1 / 2, 0.0)


def test_pages_are_recorded_from_a_commit_alone(tmp_path):
    def git(*words):
        who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    source, out = tmp_path / "rule.py", tmp_path / "docs" / "results"
    out.mkdir(parents=True)
    source.write_text("radius = 9\n")
    (out / "lines.jsonl").write_text("{}\n")
    git("init")
    git("add", ".")
    git("commit", "--message", "a commit")
    (out / "lines.jsonl").write_text("{}\n{}\n")  # a run that goes on has lines already
    refuse_changed_sources(out, tmp_path)
    source.write_text("radius = 5\n")
    refuse_changed_sources(tmp_path / "results", tmp_path)
    with pytest.raises(ReproductionError, match=r"rule\.py was changed since; commit it"):
        refuse_changed_sources(out, tmp_path)


def test_drafts_stand_as_often_as_those_of_the_committed_lines():
    """Of tokens 1 to 7; the last is always the target's own."""
    found = measured_chances("lossless:drafts=previous")
    assert found[6] == 0.0
    assert all(0.0 < one < 1.0 for one in found[:6])
    assert min(measured_chances("spec-vla-published")[1:7]) > 0.0


def test_a_study_of_times_alone_plays_nothing_to_get_frames(tmp_path, capsys):
    arguments = ["full-size", "--no-episodes", "--time", "5", "--random-weights", "small"]
    assert main([*arguments, "--out", str(tmp_path)]) == 1
    assert "give the frames: --recording DATA" in capsys.readouterr().err


def test_a_study_of_times_alone_measures_scripted_drafts_at_any_size(tmp_path, data, capsys):
    out = tmp_path / "out"
    flags = ["--random-weights", "small", "--threads", "1"]
    arguments = ["full-size", "--no-episodes", "--recording", str(data), "--time", "5"]
    assert main([*arguments, "--out", str(out), *flags]) == 0
    assert not (out / "frames").exists()
    results = ResultsFolder(out)
    found = {one.row.name: one for one in results.rows_of(results.table("full-size", "answers"))}
    passes = {name: cell_of("served-passes", one)[1] for name, one in found.items()}
    assert passes["plain"] == 7.0
    assert all(1.0 <= number < 7.0 for name, number in passes.items() if name != "plain")
    assert {cell_of("served-equal", one)[0] for one in found.values()} == {"100.0%"}
    assert check(out) == []


def test_a_loop_of_transformers_answers_as_plain_decoding(tmp_path, data):
    rows = [Row("plain"), Row("theirs", loop="transformers-lookup")]
    Replays(WORDS, tmp_path).record(rows, FrameSet(data, 2))
    ours, theirs = (load_run(tmp_path / "frames" / row.slug).records[0] for row in rows)
    assert np.array_equal(ours.actions, theirs.actions)


def test_the_study_of_vla_0_has_every_loop_of_transformers():
    rows = load_study(FOLDER / "vla0.toml").rows()
    assert [one.loop for one in rows if one.loop] == [one.value for one in QwenLoop]


def test_runs_stand_beside_the_one_that_is_named(tmp_path):
    play(tmp_path, PLAIN, "s" * 10, passes=7)
    play(tmp_path, RELAXED, "s" * 8 + "f" * 2, passes=2)
    first, second = table_of(tmp_path / "played", "beside/within-bins").splitlines()[2:4]
    assert "| 80.0% (8/10) |" in first
    assert first.count("–") == 3  # the interval's dash, and no difference to itself
    assert "| 100.0% (10/10) |" in second
    with pytest.raises(ReproductionError, match="it has autoregressive, within-bins"):
        table_of(tmp_path / "played", "beside/nobody")
