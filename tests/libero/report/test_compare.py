"""Two runs on the same trials, and what may be said of them."""

import gzip
from dataclasses import replace

import numpy as np
import pytest

from deft_core.measures.statistics import bootstrap_interval, paired_interval, pairs_to_decide
from deft_libero.commands import compare as command
from deft_libero.report.difference import (
    PHASES,
    Comparison,
    compare,
    conclusion,
    degrees_apart,
    millimetres_apart,
    phases_of,
)
from deft_libero.results.records import EpisodeRecord, Outcome
from deft_libero.results.store import ResultsStore, RunResults, load_run
from tests.libero.episodes import header, record

NAMES = ("plain", "relaxed")


def run_of(tmp_path, outcomes: str, **changes) -> RunResults:
    """A run whose trials succeeded (s) or failed (f); actions are alike but for `shift`."""
    shift = changes.get("shift", 0.0)
    records = tuple(
        replace(
            record(trial=trial, outcome=Outcome.SUCCEEDED if mark == "s" else Outcome.FAILED),
            actions=np.full((4, 7), 0.1) + shift * (trial + 1),
        )
        for trial, mark in enumerate(outcomes)
    )
    return RunResults(tmp_path, header(), records)


def compared(tmp_path, first: str, second: str, shift: float = 0.01) -> Comparison:
    runs = run_of(tmp_path, first), run_of(tmp_path, second, shift=shift)
    return compare(*runs, NAMES, margin=0.05)


def test_phases_follow_the_gripper_commands():
    actions = np.full((60, 7), -1.0)
    actions[20:50, -1] = 1.0
    phases = phases_of(actions).tolist()
    starts = {phase: phases.index(number) for number, phase in enumerate(PHASES)}
    assert starts == {"approach": 0, "grasp": 20, "transport": 30, "place": 40}
    assert not phases_of(np.full((5, 7), -1.0)).any()
    actions[50:, -1] = 1.0  # it never opens again: the end of the episode takes its place
    assert phases_of(actions).tolist().index(PHASES.index("place")) == 50


def test_one_unit_is_50_mm_or_half_a_radian():
    first, second = np.zeros((2, 7)), np.zeros((2, 7))
    second[0, 1], second[1, 4] = 1.0, 1.0
    assert millimetres_apart(first, second) == pytest.approx([50.0, 0.0])
    assert degrees_apart(first, second) == pytest.approx([0.0, np.degrees(0.5)])


def test_the_paired_interval_is_that_of_the_formula():
    """Bonett and Price, by hand: 3 and 1 of 20 pairs."""
    found = paired_interval(3, 1, 20)
    first, second = 4 / 22, 2 / 22
    half = 1.959964 * np.sqrt((first + second - (second - first) ** 2) / 22)
    assert (found.low, found.high) == pytest.approx((second - first - half, second - first + half))
    wide, narrow = paired_interval(0, 0, 10), paired_interval(0, 0, 1000)
    assert narrow.low > -0.01 > wide.low


def test_the_number_of_episodes_that_decide_is_the_least_that_does():
    wanted = pairs_to_decide(1, 1, 30, margin=0.05)
    low = [
        paired_interval(count / 30, count / 30, count).low > -0.05 for count in (wanted - 1, wanted)
    ]
    assert low == [False, True]
    worse = pairs_to_decide(6, 3, 60, margin=0.05)
    assert paired_interval(worse / 10, worse / 20, worse).high < 0
    assert pairs_to_decide(0, 0, 500, margin=0.05) == 500


def test_bootstrapped_intervals_hold_the_mean_every_time():
    counted = np.stack([np.arange(40.0), np.ones(40)], axis=1)
    found = [bootstrap_interval(counted, lambda sums: sums[:, 0] / sums[:, 1]) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].low < 19.5 < found[0].high
    assert found[0].high - found[0].low == pytest.approx(2 * 1.96 * 11.5 / 40**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("s" * 30, "f" * 10 + "s" * 20, "plain succeeds more"),
        ("sf" * 10, "fs" * 10, "would decide"),
        ("s" * 20, "s" * 20, "is not ruled out"),
        ("s" * 20, "s" * 20, "^Too few to tell, with 20 episodes: "),
        ("s" * 4, "sssf", r"-25.0 points \(95%: .*Play about \d+ more"),
        ("s" * 200, "s" * 200, "^200 episodes show no difference"),
        ("s" * 200, "s" * 200, "or more is ruled out"),
    ],
)
def test_the_sentence_says_what_that_many_episodes_allow(tmp_path, first, second, said):
    import re

    found = compared(tmp_path, first, second)
    assert re.search(said, conclusion(found)), conclusion(found)


def test_runs_that_acted_alike_are_not_worse_however_few_they_are(tmp_path):
    found = compared(tmp_path, "sf", "sf", shift=0.0)
    assert "in all 2 episodes" in conclusion(found)
    assert found.is_not_worse
    assert found.deviations[-1].mm == 0.0


def test_replayed_frames_are_compared_but_never_judged(tmp_path):
    runs = [run_of(tmp_path, "ss", shift=shift) for shift in (0.0, 0.01)]
    replayed = [
        replace(run, records=tuple(replace(one, outcome=Outcome.REPLAYED) for one in run.records))
        for run in runs
    ]
    found = compare(*replayed, NAMES, margin=0.05)
    assert found.num_pairs == 0
    assert "nothing can be said" in conclusion(found)
    whole = found.deviations[-1]
    assert whole.num_steps == 8
    assert whole.mm == pytest.approx(50 * 3**0.5 * 0.015)
    assert whole.mm_interval.low < whole.mm < whole.mm_interval.high


def stored(folder, run: str, records: list[EpisodeRecord]):
    store = ResultsStore(folder, header(run))
    for one in records:
        store.append(one)
    store.close()
    return folder


def test_the_command_prints_tables_and_a_sentence(tmp_path, capsys):
    records = [record(trial=trial) for trial in range(3)]
    first = stored(tmp_path / "a", "r1", records)
    second = stored(
        tmp_path / "b", "r2", [replace(one, actions=one.actions + 1) for one in records]
    )
    assert command.main([str(first), str(second)]) == 0
    said = capsys.readouterr().out
    assert "| passes per action | 2.00 | 2.00 | +0.00 |" in said
    assert "Too few to tell, with 3 episodes" in said
    assert "times as fast as" in said
    assert "in 3 episodes, but that does not allow a conclusion: times of 3 episodes, 5 are" in said
    assert command.main([str(first), str(tmp_path)]) == 2
    assert "holds 2 runs" in capsys.readouterr().err
    assert command.main([str(first), str(tmp_path / "none")]) == 1


def test_gzipped_lines_are_read_and_a_run_that_goes_on_unpacks_them(tmp_path):
    folder = stored(tmp_path / "run", "r1", [record(trial=1)])
    lines = folder / "episodes.jsonl"
    (folder / "episodes.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    lines.unlink()
    assert [one.key.trial for one in load_run(folder).records] == [1]
    stored(folder, "r1", [record(trial=2)])
    assert [one.key.trial for one in load_run(folder).records] == [1, 2]
    assert not (folder / "episodes.jsonl.gz").exists()
