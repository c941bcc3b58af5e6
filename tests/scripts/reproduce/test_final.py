"""The last evaluation: by a committed plan, of the named weights, and every look is counted."""

import json
import subprocess
from pathlib import Path

import pytest

from deft_client.libero.results.store import load_runs
from deft_policies import tiny_libero
from deft_policies.checkpoint.tensor_file import digest_weights
from scripts.reproduce.__main__ import main
from scripts.reproduce.final import PLAN, Plan, load_plan, note_looks
from scripts.reproduce.runs import table_of
from tests.repository import ROOT

CELLS = """
[[cell]]
name = "plain"
serve = "--policy constant"
eval = "point_world --environment point_world --episodes 1 --step-limit 2 --stream"
[[cell]]
name = "other"
serve = "--policy constant"
eval = "point_world --environment point_world --episodes 1 --step-limit 2"
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A committed plan that asks nothing of the weights."""
    return written(tmp_path / "plans", f"[served]\n{CELLS}")


def written(folder: Path, text: str) -> Path:
    folder.mkdir()
    path = folder / "plan.toml"
    path.write_text(text)
    git(folder, "init", "-q")
    commit(path)
    return path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True)


def commit(path: Path) -> None:
    git(path.parent, "add", "-A")
    who = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    git(path.parent, *who, "commit", "-qm", "Plan")


def play(plan: Path, out: Path, cell: str = "plain") -> int:
    """The command, given again once the ledger is committed."""
    command = ["final", "--plan", str(plan), "--out", str(out), "--cells", cell]
    assert main(command) == 1
    commit(plan)
    return main(command)


def looks(plan: Plan, *folders: Path) -> list[int]:
    return [note_looks(plan, plan.cell[:1], folder)["plain"] for folder in folders]


def test_a_run_that_goes_on_is_the_same_look_and_another_the_next(plan, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    assert looks(load_plan(plan), here, here, there, here, there) == [1, 1, 2, 1, 2]


def test_cells_are_looked_at_one_by_one(plan, tmp_path):
    both = load_plan(plan)
    assert looks(both, tmp_path / "a", tmp_path / "b") == [1, 2]
    assert note_looks(both, both.cell, tmp_path / "b") == {"plain": 2, "other": 1}


def test_results_of_a_second_look_say_so(plan, tmp_path):
    assert play(plan, tmp_path / "first") == 0
    assert play(plan, tmp_path / "second") == 0
    for folder, text, look in (("first", "| point_world c", 1), ("second", "look 2", 2)):
        (run,) = load_runs(tmp_path / folder)
        assert run.header.options["held-out look"] == str(look)
        assert text in table_of(tmp_path / folder, "runs")
    ledger = plan.with_suffix(".looks.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in ledger] == [1, 2]


@pytest.mark.parametrize("change", ["plan", "ledger", "unknown to git"])
def test_nothing_is_played_by_what_is_not_committed(plan, tmp_path, capsys, change):
    if change == "plan":
        plan.write_text(plan.read_text() + "\n")
    elif change == "unknown to git":
        plan = plan.rename(plan.with_name("other.toml"))
    assert main(["final", "--plan", str(plan), "--out", str(tmp_path / "out")]) == 1
    assert "not committed" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*/*"))


def test_other_weights_than_the_plans_are_not_played(tmp_path, capsys):
    served = '[served]\n"digest of weights" = "0123"\n'
    plan = written(tmp_path / "plans", served + CELLS)
    assert play(plan, tmp_path / "out") == 1
    assert "digest of weights 0123" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*/*"))


def test_the_committed_plan_is_of_the_policy_that_ships():
    served = load_plan(ROOT / PLAN).served
    assert served["digest of weights"] == digest_weights([tiny_libero.CHECKPOINT])
    for head in tiny_libero.HEADS:
        assert served[f"digest of head {head.name}"] == digest_weights([head])


def test_the_committed_plan_plays_what_the_policy_holds_out():
    plan = load_plan(ROOT / PLAN)
    assert [cell.name for cell in plan.cell] == ["plain", "deft", "thinking", "moved", "bfloat16"]
    for cell in plan.cell:
        assert cell.eval.startswith("libero_object --trials 30-39 ")
        assert "--no-guard" not in cell.serve
