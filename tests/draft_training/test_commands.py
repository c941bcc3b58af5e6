"""`deft train` says what is wrong before it loads anything, and keeps what is done."""

import json
from pathlib import Path

import pytest

from deft_draft_training.__main__ import main as train
from deft_draft_training.heads.record import RecordConfig, record
from deft_draft_training.heads.samples import EpisodeSource
from deft_server.__main__ import main as deft
from tests import golden
from tests.demonstrations import write_demonstrations
from tests.draft_training.golden_target import tiny_target

NOWHERE = ["--checkpoint", "/is/never/looked/at"]
TARGET = [
    *("--checkpoint", str(golden.TINY_OPENVLA), "--statistics-key", "libero_spatial"),
    *("--device", "cpu", "--dtype", "float32"),
]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["record", "nowhere", "--out", "x"], "nowhere: no such file or folder"),
        (["fit", "--out", "x", "--live", "nowhere"], "nowhere: no such file or folder"),
        (["fit", "--out", "x", "--features", "nowhere"], "index.json is missing"),
        (["fit", "--out", "x", "--live", "DATA", "--config", "no.toml"], "no.toml: no such file"),
        (["evaluate", "DATA", "--head", "nowhere"], "--head nowhere: no such directory"),
        (["evaluate", "DATA", "--json", "no/file"], "--json no/file: its folder does not exist"),
        (["export", "nowhere", "--out", "x"], "nowhere: no such directory"),
        (["export", "DATA", "--out", "DATA"], "an export never overwrites"),
    ],
)
def test_what_is_missing_is_said_before_weights_are_looked_at(
    command: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(write_demonstrations(tmp_path))
    words = [data if word == "DATA" else word for word in command]
    assert train([*words, *NOWHERE]) == 1
    said = capsys.readouterr().err
    assert told in said
    assert "never" not in said.replace("an export never", "")


def test_a_fit_needs_two_episodes_and_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_demonstrations(tmp_path / "one", episodes=1)
    record(tiny_target(), RecordConfig(EpisodeSource((data,))), tmp_path / "features")
    for source in (["--live", str(data)], ["--features", str(tmp_path / "features")]):
        assert train(["fit", "--out", str(tmp_path / "run"), *source, *NOWHERE]) == 1
        assert "at least 2 episodes, one of them to be held out; got 1" in capsys.readouterr().err


@pytest.mark.parametrize("numbers", ["0,x", "5-", "-3", ""])
def test_numbers_that_are_none_are_refused(
    numbers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train(["evaluate", "nowhere", f"--radii={numbers}", *NOWHERE])
    assert "expected numbers such as 0,5,9 or 0-15" in capsys.readouterr().err


def test_evaluate_keeps_each_row_and_goes_on_with_those_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, kept = write_demonstrations(tmp_path / "data", episodes=2), tmp_path / "rows.jsonl"
    command = ["train", "evaluate", str(data), "--radii", "0,9", "--json", str(kept), *TARGET]
    assert deft(command) == 0
    table = capsys.readouterr().out
    whole = kept.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [(row["source"], row["radius"]) for row in rows] == [
        *(("previous", 0), ("extrapolation", 0), ("previous", 9), ("extrapolation", 9)),
    ]
    # As after a kill: the last two rows are missing, and one that is there is not decoded again.
    first = json.loads(whole.splitlines()[0])
    first["passes"] = 99.0
    kept.write_text("".join(f"{line}\n" for line in (json.dumps(first), whole.splitlines()[1])))
    assert deft(command) == 0
    again = capsys.readouterr().out
    assert "99.00" in again
    assert again.splitlines()[2:] == table.splitlines()[2:]
    assert kept.read_text().splitlines()[2:] == whole.splitlines()[2:]
    assert deft([*command, "--frames", "2"]) == 1
    assert "of other frames, heads or weights" in capsys.readouterr().err


def test_evaluate_judges_heads_by_the_tree_that_is_asked_for(tmp_path: Path) -> None:
    data, kept = write_demonstrations(tmp_path / "data", episodes=1), tmp_path / "rows.jsonl"
    head = golden.write_draft_head(tmp_path / "head")
    flags = ["--head", str(head), "--draft-tree", "chain:1", "--radii", "99"]
    assert train(["evaluate", str(data), *flags, "--json", str(kept), *TARGET]) == 0
    of_head = json.loads(kept.read_text().splitlines()[0])
    assert of_head["source"] == str(head)
    assert 1 < of_head["committed_length"] <= 2  # a pass checks one draft
