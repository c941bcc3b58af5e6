"""Held-out states are played by a committed plan, each entry once, and a ledger says so."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deft_libero.commands.evaluate import main
from deft_libero.results.store import load_run, load_runs
from tests.standins.tiny_server import INFO, TinyServer, tiny_server

HELD_OUT = {"point_world": "30-39"}
WEIGHTS = "digest of weights"
PLAN = """
[served]
"digest of weights" = "12ab"

[[entry]]
name = "plain"
suite = "point_world"
environment = "point_world"
tasks = [0]
trials = "30-31"
decoding = "autoregressive"

[[entry]]
name = "drafted"
suite = "point_world"
environment = "point_world"
tasks = [0]
trials = "30"
decoding = "deft"
step_limit = 40
seed = 8
"""

Evaluate = Callable[..., int]


@pytest.fixture
def server() -> Iterator[TinyServer]:
    with tiny_server() as running:
        running.info = replace(INFO, held_out=HELD_OUT, details={WEIGHTS: "12ab"})
        yield running


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan that git has."""
    return written(tmp_path / "plans" / "plan.toml", PLAN)


@pytest.fixture
def evaluate(server: TinyServer, plan: Path, tmp_path: Path) -> Evaluate:
    def run(*flags: str, plan: Path = plan, out: str = "out") -> int:
        return main(
            ["--plan", str(plan), "--url", server.url, "--out", str(tmp_path / out), *flags]
        )

    return run


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    git(path.parent, "init", "-q")
    commit(path.parent)
    return path


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    who = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    git(folder, *who, "commit", "-qm", "Plan")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True)


def notes(plan: Path) -> list[dict[str, str]]:
    lines = plan.with_suffix(".played.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_plan_is_played_as_it_is_written(evaluate, server, plan, tmp_path):
    assert evaluate() == 0
    runs = {run.folder.name: run for run in load_runs(tmp_path / "out")}
    assert {name: [one.key.trial for one in run.records] for name, run in runs.items()} == {
        "point_world-autoregressive": [30, 31],
        "point_world-deft-seed8": [30],
    }
    assert {one.options.decoding for one in server.requests} == {"autoregressive", "deft"}
    options = runs["point_world-deft-seed8"].header.options
    assert (options["seed"], options["step_limit"], options["held-out look"]) == ("8", "40", "1")


def test_results_say_which_plan_and_commit_they_are_of(evaluate, plan, tmp_path):
    assert evaluate() == 0
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=plan.parent, text=True).strip()
    played = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert (played["plan"], played["commit"], played["look"]) == ("plan.toml", head, 1)
    assert played["entries"] == {
        "plain": {"runs": {"point_world-autoregressive": 2}, "is_complete": True},
        "drafted": {"runs": {"point_world-deft-seed8": 1}, "is_complete": True},
    }
    assert [(one["entry"], one["commit"], one["results"]) for one in notes(plan)] == [
        ("plain", head, played["results"]),
        ("drafted", head, played["results"]),
    ]
    told = load_run(tmp_path / "out" / "point_world-autoregressive").header.notes
    assert told["plan"] == f"plan.toml sha256 {played['sha256']}"
    assert told["entry"] == "plain"


def test_the_same_command_resumes_a_plan(evaluate, server, plan, tmp_path):
    server.status = 400
    assert evaluate() == 3
    assert [one["entry"] for one in notes(plan)] == ["plain"]
    server.status = 200
    assert evaluate() == 0
    num_requests, ledger = len(server.requests), notes(plan)
    assert evaluate() == 0
    assert len(server.requests) == num_requests
    assert notes(plan) == ledger


def test_an_entry_is_not_played_into_a_second_folder(evaluate, server, plan, capsys):
    assert evaluate() == 0
    num_requests = len(server.requests)
    assert evaluate(out="again") == 2
    told = capsys.readouterr().err
    assert "entry 'plain' was played on" in told
    assert "look = 2" in told
    assert len(server.requests) == num_requests


@pytest.mark.parametrize("change", ["edited", "unknown to git", "no repository"])
def test_a_plan_that_is_not_committed_is_not_played(
    evaluate, server, plan, tmp_path, capsys, change
):
    if change == "edited":
        plan.write_text(PLAN + "\n")
    elif change == "unknown to git":
        plan = plan.rename(plan.with_name("other.toml"))
    else:
        plan = tmp_path / "plan.toml"
        plan.write_text(PLAN)
    assert evaluate(plan=plan) == 2
    assert f"{plan} is not committed as it is" in capsys.readouterr().err
    assert not server.requests
    assert not (tmp_path / "out").exists()


def test_a_plan_that_changed_after_its_first_result_is_not_played(evaluate, server, plan, capsys):
    assert evaluate() == 0
    plan.write_text(PLAN.replace("30-31", "30-32"))
    commit(plan.parent)
    num_requests = len(server.requests)
    for out in ("out", "again"):
        assert evaluate(out=out) == 2
        assert "was changed after its first result" in capsys.readouterr().err
    assert len(server.requests) == num_requests


def test_a_ledger_that_lost_lines_is_noticed(evaluate, plan, capsys):
    assert evaluate() == 0
    commit(plan.parent)
    ledger = plan.with_suffix(".played.jsonl")
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[1:]))
    assert evaluate(out="again") == 2
    assert "lacks lines that git has" in capsys.readouterr().err
    ledger.unlink()
    assert evaluate(out="again") == 2
    assert "lacks lines that git has" in capsys.readouterr().err


def test_results_of_two_plans_do_not_mix(evaluate, plan, capsys):
    assert evaluate() == 0
    other = written(plan.with_name("other.toml"), PLAN + "\n")
    assert evaluate(plan=other) == 2
    assert "has results of the plan plan.toml" in capsys.readouterr().err


def test_other_weights_than_the_plans_are_not_played(evaluate, server, tmp_path, capsys):
    server.info = replace(server.info, details={WEIGHTS: "34cd"})
    assert evaluate() == 2
    assert "digest of weights must be 12ab, and the server has 34cd" in capsys.readouterr().err
    assert not server.requests
    assert not (tmp_path / "out").exists()


def test_entries_of_another_server_are_left_for_it(evaluate, server, plan, capsys):
    served = ('served = { dtype = "float32" }\n', 'served = { dtype = "bfloat16" }\n')
    text = PLAN.replace('decoding = "auto', f'{served[0]}decoding = "auto') + served[1]
    two = written(plan.with_name("two.toml"), text)
    server.info = replace(server.info, details={WEIGHTS: "12ab", "dtype": "float32"})
    assert evaluate(plan=two) == 3
    told = capsys.readouterr().err
    assert "entry 'drafted' is not of this server: dtype must be bfloat16, and the server" in told
    assert [one["entry"] for one in notes(two)] == ["plain"]
    server.info = replace(server.info, details={WEIGHTS: "12ab", "dtype": "bfloat16"})
    assert evaluate(plan=two) == 0
    assert [one["entry"] for one in notes(two)] == ["plain", "drafted"]


def test_an_entry_does_not_go_on_with_another_server(evaluate, server, capsys):
    assert evaluate() == 0
    num_requests = len(server.requests)
    server.info = replace(server.info, details={WEIGHTS: "12ab", "dtype": "bfloat16"})
    assert evaluate() == 2
    assert "entry 'plain': it was begun as" in capsys.readouterr().err
    assert len(server.requests) == num_requests


def test_a_second_look_says_so_in_its_runs(evaluate, plan, tmp_path):
    assert evaluate() == 0
    second = written(plan.with_name("second.toml"), "look = 2\n" + PLAN)
    assert evaluate(plan=second, out="second") == 0
    (run,) = [run for run in load_runs(tmp_path / "second") if "autoreg" in run.header.name]
    assert run.header.name == "point_world look 2 autoregressive"


def test_a_plan_may_be_json(evaluate, plan, tmp_path):
    entry = {"name": "a", "suite": ["point_world"], "environment": "point_world", "tasks": "0"}
    entry |= {"trials": "30", "decoding": ["lossless", "deft"]}
    plan = written(plan.with_name("plan.json"), json.dumps({"entry": [entry]}))
    assert evaluate(plan=plan) == 0
    names = [run.header.name for run in load_runs(tmp_path / "out")]
    assert sorted(names) == ["point_world deft", "point_world lossless"]


def test_without_a_plan_held_out_states_are_refused(server, tmp_path, capsys):
    flags = ["--environment", "point_world", "--url", server.url, "--trials", "30"]
    assert main(["point_world", "--out", str(tmp_path), *flags]) == 2
    assert "by a committed plan (--plan)" in capsys.readouterr().err


def test_what_the_plan_says_is_not_said_beside_it(evaluate, server, capsys):
    for flags, told in ((["--trials", "40"], "--trials"), (["libero_goal"], "SUITE")):
        assert evaluate(*flags) == 2
        assert f"{told} cannot be given beside --plan" in capsys.readouterr().err
    assert not server.requests


ENTRY = '[[entry]]\nname = "a"\nsuite = "point_world"\nenvironment = "point_world"\n'
OTHER = ENTRY.replace('"a"', '"b"')


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected a list of [[entry]] tables"),
        ("entry = [", "is no plan: "),
        (f"looks = 2\n{ENTRY}", "unknown key 'looks'; did you mean look?"),
        (f"look = 0\n{ENTRY}", "look must be a number from 1, got 0"),
        (f"{ENTRY}{ENTRY}", "entries with different names, got ['a', 'a']"),
        (f"{ENTRY}trial = 3\n", "entry 'a': unknown key 'trial'; did you mean trials?"),
        (f'{ENTRY}url = "x"\n', "entry 'a': unknown key 'url'"),
        (f"{ENTRY}seed = 1979-05-27\n", "entry 'a': seed must be a text, a number"),
        (f'{ENTRY}seed = "x"\n', "entry 'a': argument --seed: invalid int value: 'x'"),
        (f"{ENTRY}step_limit = 0\n", "entry 'a': --step-limit must be at least 1, got 0"),
        (f'{ENTRY}decoding = "best"\n', "entry 'a': the server has no decoding 'best'"),
        (f"{ENTRY}served = 3\n", "entry 'a': served must be a table of texts, got 3"),
        ('[[entry]]\nname = "a"\n', "entry 'a': suite must be a name or a list of names"),
        ('[[entry]]\nsuite = "a"\n', "entry 0: name must be a text, got None"),
        (f"{ENTRY}{OTHER}", "entries 'a' and 'b' are both the run"),
    ],
)
def test_a_wrong_plan_is_refused_by_the_key_that_is_wrong(
    evaluate, server, plan, capsys, text, told
):
    assert evaluate(plan=written(plan.with_name("wrong.toml"), text)) == 2
    assert told in capsys.readouterr().err
    assert not server.requests


def test_a_plan_that_does_not_exist_is_named(evaluate, plan, capsys):
    assert evaluate(plan=plan.with_name("none.toml")) == 2
    assert "none.toml: No such file" in capsys.readouterr().err
