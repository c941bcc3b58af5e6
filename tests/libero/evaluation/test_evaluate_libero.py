"""The evaluation with LIBERO itself, on the stand-ins."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from deft_libero.commands.evaluate import main, read_options
from deft_libero.errors import SelectionError
from deft_libero.evaluation.runs import plan_runs, warnings_of
from deft_libero.results.store import load_run
from deft_libero.simulator.suites import find_task
from tests.standins import stand_ins
from tests.standins.tiny_server import INFO

pytestmark = pytest.mark.libero
ON_STAND_INS = ("--assets", str(stand_ins()))
SOUP, MILK = (find_task("libero_object", number).instruction for number in (0, 7))


def test_runs_are_the_same_with_one_and_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trials of a task: one worker meets them one after the other, two share them."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    runs = []
    for workers in ("1", "2"):
        code = main(
            ["libero_object", "--local-policy", "tests.libero.looking:look", "--tasks", "5",
             "--trials", "40,41", "--step-limit", "4", "--workers", workers, *ON_STAND_INS,
             "--out", str(tmp_path / workers)]
        )  # fmt: skip
        assert code == 0
        runs.append(load_run(tmp_path / workers / "libero_object-look"))
    one, two = ({record.key: record for record in run.records} for run in runs)
    assert len(one) == 2
    for key, record in one.items():
        assert record.actions.tobytes() == two[key].actions.tobytes(), key
    assert len({record.actions.tobytes() for record in one.values()}) == 2
    assert {record.assets for record in one.values()} == {runs[0].header.assets}


def test_tasks_the_policy_was_not_trained_on_are_named() -> None:
    info = replace(INFO, instructions=(MILK, SOUP, "fold the towel"))
    (run,) = plan_runs(read_options(["libero_object", "--tasks", "0-2", *ON_STAND_INS]), info)
    (warning,) = warnings_of(run, info)
    assert "tasks 1, 2 of libero_object; `--tasks trained`" in warning
    (run,) = plan_runs(read_options(["libero_object", "--tasks", "trained", *ON_STAND_INS]), info)
    assert (list(warnings_of(run, info)), {key.task for key in run.keys}) == ([], {0, 7})


def test_a_policy_that_does_not_say_what_it_knows_plays_all() -> None:
    (run,) = plan_runs(read_options(["libero_object", "--tasks", "trained", *ON_STAND_INS]), INFO)
    assert (list(warnings_of(run, INFO)), len(run.keys)) == ([], 500)


def test_assets_the_policy_was_not_trained_on_are_named() -> None:
    info = replace(INFO, assets="real 4a83e826")
    (run,) = plan_runs(read_options(["libero_object", *ON_STAND_INS]), info)
    (warning,) = warnings_of(run, info)
    assert re.match(r".*real 4a83e826.* stand-in \w{8}", warning)


def test_trained_tasks_of_an_unknown_suite_are_refused() -> None:
    info = replace(INFO, instructions=(MILK,))
    with pytest.raises(SelectionError, match="no task of libero_goal"):
        plan_runs(read_options(["libero_goal", "--tasks", "trained", *ON_STAND_INS]), info)
