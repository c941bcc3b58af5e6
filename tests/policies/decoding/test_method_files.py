"""A method is a file: the core names none, and a file that is gone or broken takes away itself."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from deft_policies.decoding.methods import AUTOREGRESSIVE, presets
from deft_policies.decoding.plugins import FILES, from_files, method_files
from tests.repository import ROOT

PACKAGE = ROOT / "policies" / "deft_policies"
# What is left of the methods, of their plans and sources; and what a request for one is told.
ASK = """
import json, sys
from deft_policies.decoding.kinds import source_kinds
from deft_policies.decoding.methods import find_method, presets
from deft_policies.decoding.plugins import broken_plugins, from_files
from deft_policies.errors import RequestError
methods = {name: repr(find_method(name)) for name in presets()}
told = ""
try:
    find_method(sys.argv[1])
except RequestError as error:
    told = str(error)
rules = [name for name in from_files("RULES")]
print(json.dumps([methods, rules, source_kinds(), told, broken_plugins()]))
"""
SERVE = """
import numpy as np
from deft_core.types import Observation
from deft_policies.base import PolicyRequest
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
policy = load_policy(ModelOptions(random_weights="small", decoding="autoregressive"))
policy.warm_up()
image = np.zeros((28, 28, 3), dtype=np.uint8)
chunk = policy.act([PolicyRequest(Observation(image, "lift it"))])[0].chunk
print(policy.info.decoding_methods, len(chunk.actions))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package at another place, from which a subprocess imports it."""
    ignored = ignore_patterns("__pycache__", "*.safetensors", "*.html")
    copytree(PACKAGE, tmp_path / "deft_policies", ignore=ignored)
    return tmp_path


def run(folder: Path, code: str, *arguments: str) -> str:
    paths = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT / 'client')!r}]\n"
    # What finds packages that are installed as links would find the files that are not there.
    paths += "sys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in str(one)]\n"
    command = [sys.executable, "-c", paths + code, *arguments]
    environment = os.environ | {"PYTHONHASHSEED": "0"}  # sets are written in one order
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=folder, env=environment
    )
    return done.stdout.strip().splitlines()[-1]


def test_the_core_serves_with_the_folder_deleted(copy: Path) -> None:
    for file in sorted((copy / "deft_policies" / "methods").glob("*.py")):
        file.unlink()
    (copy / "deft_policies" / "methods").rmdir()
    assert run(copy, SERVE) == "('autoregressive',) 1"


def test_the_core_imports_no_method() -> None:
    for file in (*PACKAGE.glob("*.py"), *PACKAGE.rglob("*/*.py")):
        if file.parent.name != "methods":
            assert f"from {FILES}" not in file.read_text(encoding="utf-8"), file


def delete(file: Path) -> None:
    file.unlink()


def spoil(file: Path) -> None:
    file.write_text("1 / 0\n")


@pytest.mark.parametrize("harm", [delete, spoil], ids=["deleted", "broken"])
@pytest.mark.parametrize("name", ["spec_vla", "within_bins", "pld", "small_model"])
def test_a_file_takes_away_what_it_holds_and_nothing_else(
    copy: Path, name: str, harm: Callable[[Path], None]
) -> None:
    before = json.loads(run(copy, ASK, "lossless"))
    harm(copy / "deft_policies" / "methods" / f"{name}.py")
    module = method_files()[name]
    asked = next(iter(module.METHODS))  # type: ignore[union-attr]
    methods, rules, sources, told, broken = json.loads(run(copy, ASK, asked))
    gone = [getattr(module, table, {}) for table in ("METHODS", "RULES", "SOURCES")]
    assert methods == {key: value for key, value in before[0].items() if key not in gone[0]}
    assert rules == [one for one in before[1] if one not in gone[1]]
    assert sources == [one for one in before[2] if one not in gone[2]]
    assert told
    if harm is spoil:
        assert broken == [f"methods/{name}.py: ZeroDivisionError: division by zero"]
        if asked.replace("-", "_") == name:
            assert f"methods/{name}.py cannot be loaded: division by zero" in told


def test_no_two_files_hold_the_same_name() -> None:
    for table in ("METHODS", "RULES", "PLANS", "SOURCES", "MEANINGS"):
        found = [key for one in method_files().values() for key in getattr(one, table, {})]
        assert len(found) == len(set(found)) == len(from_files(table))
    assert AUTOREGRESSIVE in presets()


@pytest.mark.parametrize("name", sorted(method_files()))
def test_a_file_says_what_was_left_out_and_where_the_numbers_are(name: str) -> None:
    _, *words = (method_files()[name].__doc__ or "").split("\n\n")
    for label in ("Left out", "Numbers: "):
        found = [one for one in words if one.startswith(label)]
        assert len(found) == 1, f"{name} has {len(found)} paragraphs that begin with {label!r}"
    for page in re.findall(r"docs/[\w/-]+\.md", words[-1]):
        assert (ROOT / page).is_file(), page
