"""`make test` on a machine that cannot render: the rest is run, and the apt line is said."""

import subprocess
import sys

import pytest

from deft_client.libero.simulator.graphics import APT_LINE
from scripts import run_tests
from tests.repository import ROOT

# Renders nothing: pretends that no OpenGL library can be loaded, then collects two kinds of test.
WITHOUT_GRAPHICS = """
import sys
from deft_client.libero.simulator import graphics
from scripts import run_tests

def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")

run_tests.find_renderer = lambda wanted: graphics.find_renderer(wanted, no_library)
sys.exit(run_tests.main(sys.argv[1:]))
"""
THREE_TESTS = """
import pytest

@pytest.mark.libero
def test_that_renders():
    pass

@pytest.mark.long(seconds=60)
def test_that_is_long():
    pass

def test_that_is_neither():
    pass
"""

SIX_TESTS = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("number", range(6))
def test_that_fails_beside_others(number):
    tried = Path(__file__).with_name(f"tried_{number}")
    was_tried = tried.exists()
    tried.touch()
    assert was_tried or number >= NUM_FAILING

def test_that_fails_always():
    assert not ALWAYS
"""


# A plugin that takes seconds to load. pyproject.toml leaves it out, but not for files elsewhere.
NO_SCHEMATHESIS = ["-p", "no:schemathesis"]


@pytest.mark.parametrize(("flags", "counted"), [([], "1 passed, 2"), (["--all"], "2 passed, 1")])
def test_the_simulators_tests_are_left_out_and_the_fix_is_named(tmp_path, flags, counted):
    written = tmp_path / "test_three.py"
    written.write_text(THREE_TESTS)
    quiet = ["-q", "-p", "no:cacheprovider", *NO_SCHEMATHESIS]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_GRAPHICS, *flags, *quiet, str(written)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{counted} deselected" in run.stdout
    assert run.stdout.count(APT_LINE) == 2  # before the tests and, not to be missed, after them
    assert "Traceback" not in run.stdout + run.stderr


@pytest.mark.long(seconds=20)
@pytest.mark.parametrize(
    ("num_failing", "always", "code"), [(5, False, 0), (6, False, 1), (1, True, 1)]
)
def test_up_to_five_tests_that_failed_may_pass_alone(tmp_path, num_failing, always, code):
    written = tmp_path / "test_six.py"
    written.write_text(f"NUM_FAILING, ALWAYS = {num_failing}, {always}\n{SIX_TESTS}")
    flags = ["--once-more", "-n", "1", *NO_SCHEMATHESIS, str(written)]
    run = subprocess.run(
        [sys.executable, "-m", "scripts.run_tests", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    told = [line for line in run.stdout.splitlines() if line.startswith("failed beside others")]
    assert [one.count("test_six.py::") for one in told] == ([] if code else [5])


def test_tests_for_gpus_and_checkpoints_are_left_out_everywhere():
    assert run_tests.DEFAULT_MARKS in (ROOT / "pyproject.toml").read_text()
