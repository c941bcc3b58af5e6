"""A table is of one policy: runs of different weights are refused, and unknown weights named."""

from dataclasses import replace
from pathlib import Path

import pytest

from deft_libero.commands import compare, report
from deft_libero.results.store import WEIGHTS, ResultsStore
from tests.libero.episodes import header, record


def write(folder: Path, weights: str = "", plans: tuple[str, ...] = ("", "", "", "")) -> str:
    """A run of one episode of four answers."""
    server = {WEIGHTS: weights} if weights else {}
    one = record()
    answers = [replace(answer, plan=plan) for answer, plan in zip(one.answers, plans, strict=True)]
    store = ResultsStore(folder, replace(header(), name=folder.name, server=server))
    store.append(replace(one, answers=tuple(answers)))
    store.close()
    return str(folder)


def test_runs_of_different_weights_are_not_compared(tmp_path, capsys):
    runs = [write(tmp_path / "old", "12" * 32), write(tmp_path / "new", "34" * 32)]
    assert compare.main(runs) != 0
    told = capsys.readouterr().err
    assert "12" * 6 in told
    assert "34" * 6 in told
    assert report.main([*runs, "--out", str(tmp_path / "page.html")]) != 0
    assert f"new in {runs[1]} is of weights 343434343434" in capsys.readouterr().err


def test_runs_that_name_no_weights_are_reported_and_say_so(tmp_path, capsys):
    runs = [write(tmp_path / "old"), write(tmp_path / "new", "34" * 32)]
    assert compare.main(runs) == 0
    assert "Weights: 343434343434; not recorded of old." in capsys.readouterr().out
    assert report.main([runs[0], "--out", str(tmp_path / "page.html")]) == 0
    for name in ("page.html", "page.md"):
        assert "weights not recorded" in (tmp_path / name).read_text()


def test_a_report_says_how_often_the_guard_took_each_plan(tmp_path):
    write(tmp_path / "deft", plans=("tree", "plain", "tree", "tree"))
    write(tmp_path / "slow", plans=("plain",) * 4)
    assert report.main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.md").read_text()
    assert "deft: plans tree 75%, plain 25%" in text
    assert "slow: plans" not in text


@pytest.mark.parametrize("weights", ["", "12" * 32])
def test_runs_of_the_same_weights_are_one_table(tmp_path, weights):
    runs = [write(tmp_path / name, weights) for name in ("a", "b")]
    assert compare.main(runs) == 0
