"""Folders that earlier versions wrote are read and can be gone on with."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from deft_libero.commands.evaluate import read_options
from deft_libero.commands.report import main as report
from deft_libero.errors import ResultsMismatchError
from deft_libero.evaluation.runs import plan_runs
from deft_libero.results.records import Outcome
from deft_libero.results.store import ResultsStore, RunHeader, load_run
from tests.golden import GOLDEN

OLD = GOLDEN / "evaluation_folder"
EXPERT = "tiny_libero_recipe.expert_policy:expert"
# Neither LIBERO's meshes nor its MuJoCo need to be installed to read what was written.
COMMAND = ["libero_object", "--local-policy", EXPERT, "--any-mujoco", "--fast"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "libero_object-expert"))


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> RunHeader:
    """The header of the same command today, where the same packages and assets are installed."""
    found = load_run(OLD).header
    monkeypatch.setattr("deft_libero.evaluation.runs.describe_assets", lambda *_: "")
    (run,) = plan_runs(read_options(COMMAND), None)
    return replace(run.header(), assets=found.assets, versions=found.versions)


def test_a_run_of_the_expert_goes_on_where_an_earlier_version_stopped(
    folder: Path, wanted: RunHeader
) -> None:
    store = ResultsStore(folder, wanted)
    assert [(one.key.task, one.key.trial) for one in store.resumed] == [(3, 40)]
    store.append(replace(store.resumed[0], key=replace(store.resumed[0].key, trial=41)))
    store.close()
    assert [one.outcome for one in load_run(folder).records] == [Outcome.SUCCEEDED] * 2


def test_other_options_than_the_earlier_versions_are_still_refused(
    folder: Path, wanted: RunHeader
) -> None:
    other = replace(wanted, options={**wanted.options, "policy_factory": "solve"})
    with pytest.raises(ResultsMismatchError, match="now 'solve'"):
        ResultsStore(folder, other)


def test_a_run_that_says_nothing_of_its_physics_is_not_mixed_with_robosuites_own(
    folder: Path, wanted: RunHeader
) -> None:
    other = replace(wanted, options={**wanted.options, "physics": "robosuite"})
    with pytest.raises(ResultsMismatchError, match="physics: there 'not noted', now 'robosuite'"):
        ResultsStore(folder, other)


def test_a_report_shows_an_earlier_run(folder: Path, tmp_path: Path) -> None:
    assert report([str(folder), "--out", str(tmp_path / "report.html")]) == 0
    assert "pick up the bbq sauce" in (tmp_path / "report.html").read_text("utf-8")
