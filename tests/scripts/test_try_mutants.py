"""Mutants are what their operators say, the same in every run, and tried in a copy."""

import ast
import subprocess

import pytest

from scripts import try_mutants
from scripts.try_mutants import (
    OPERATORS,
    ROOMS,
    draw,
    main,
    mirrored_tests,
    modules_of,
    mutants_of,
    mutate,
)

SOURCE = '''
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1 if 2 < 3 else 4


def clip(value: "int | None" = None, low: int = 0) -> None:
    """At least low."""
    if not value or value < low:
        raise ValueError(low - 1)
    shown.append(max(value, low))
    print(value, low)
'''
CHANGES = {
    "flip a comparison": [("value < low", "value >= low")],
    "move a boundary": [("value < low", "value <= low")],
    "plus or minus": [("low - 1", "low + 1")],
    "and or or": [("not value or value < low", "not value and value < low")],
    "drop a not": [("not value", "value")],
    "one more": [("low: int=0", "low: int=1"), ("low - 1", "low - 2")],
    "swap arguments": [("print(value, low)", "print(low, value)")],
    "drop a statement": [
        ("raise ValueError(low - 1)", "pass"),
        ("shown.append(max(value, low))", "pass"),
        ("print(value, low)", "pass"),
    ],
    "return early": [("    shown.append(max(value, low))\n    print(value, low)", "    return")],
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with one module and one test of it."""

    def make(source, test=""):
        for name, text in (
            ("client/deft_client/__init__.py", ""),
            ("client/deft_client/wire/clip.py", source),
            ("tests/client/wire/test_clip.py", test),
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        monkeypatch.setattr(try_mutants, "ROOT", tmp_path)
        monkeypatch.setattr(try_mutants, "ROOMS", {"codecs": ("client/deft_client/wire/*",)})
        return tmp_path

    return make


@pytest.mark.parametrize("operator", CHANGES)
def test_an_operator_changes_one_place_at_a_time_and_no_annotation(operator, project):
    project(SOURCE)
    expected = ast.unparse(ast.parse(SOURCE))
    mutants = [
        one
        for one in mutants_of("codecs", "client/deft_client/wire/clip.py")
        if one.operator == operator
    ]
    assert [mutate(SOURCE, one) for one in mutants] == [
        ast.unparse(ast.parse(expected.replace(before, after)))
        for before, after in CHANGES[operator]
    ]


def test_draws_are_the_same_in_every_run_and_longer_ones_begin_with_shorter_ones():
    drawn = draw("limits", 12, seed=0)
    assert draw("limits", 5, seed=0) == drawn[:5]
    assert draw("limits", 12, seed=1) != drawn
    assert len({one.operator for one in drawn}) == len(OPERATORS)


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_of_a_room_has_tests(room):
    modules = modules_of(room)
    assert all(mirrored_tests(module) for module in modules)


def test_a_room_without_files_is_an_error(monkeypatch):
    monkeypatch.setattr(try_mutants, "ROOMS", {"gone": ("client/gone/*",)})
    with pytest.raises(SystemExit, match="client/gone"):
        modules_of("gone")


def test_mutants_are_tried_in_a_copy_once_and_survivors_are_listed(project, capsys):
    root = project(
        "def add(one, other):\n    return one + other\n\n\nUNUSED = 7\n",
        "from deft_client.wire.clip import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n",
    )
    out = root / "found" / "mutants.jsonl"
    assert main(["--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "codecs            1      2  50.0%" in shown
    assert "- 7\n  + 8" in shown
    assert "UNUSED = 7" in (root / "client/deft_client/wire/clip.py").read_text()
    out.write_text(out.read_text().splitlines()[1] + '\n{"cut": ')
    assert main(["--out", str(out)]) == 0
    assert "1/1 " in capsys.readouterr().out
