"""The fused kernels are compiled as passes start them, for GPUs that are not there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels are compiled by Triton")

from scripts.compile_kernels import ARCHITECTURES, EXCEPTIONS, WIDENING, Compiled
from tests.draws import IS_NIGHT
from tests.repository import ROOT


def test_what_takes_more_than_its_bound_is_named_with_the_bound() -> None:
    small = Compiled(64, 0, 73728, 0)
    assert small.excess("product 16x32x256", 90) == ""
    excess = Compiled(200, 24, 110_000, 0).excess("product 16x32x256", 90)
    assert excess == (
        "200 registers, at most 192; 24 local bytes, at most 16; 110000 shared bytes, "
        "at most 101376"
    )


def test_an_exception_is_for_its_program_and_architecture_alone() -> None:
    for architectures, *_ in EXCEPTIONS.values():
        assert set(architectures) <= set(ARCHITECTURES)
    attention = Compiled(255, 8, 45056, 0)
    assert attention.excess("attend 128, nodes' 4 splits 1 words", 89) == ""
    assert attention.excess("attend 128, nodes' 4 splits 1 words", 90)
    larger = Compiled(255, 400, 75776, 0)
    assert larger.excess("attend 256, nodes' 4 splits 1 words", 89) == ""
    assert larger.excess("attend 128, nodes' 4 splits 1 words", 89)
    assert attention.excess("product 64x32x128", 89)


@pytest.mark.parametrize("architecture", ARCHITECTURES if IS_NIGHT else (90,))
def test_all_programs_of_a_frame_compile_within_their_bounds(
    tmp_path: Path, architecture: int
) -> None:
    """In a process of its own: under the interpreter, as in tests, nothing is compiled."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "scripts.compile_kernels", str(architecture)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = re.findall(r"^\| (\w+).*?\| +(\d+) \|$", run.stdout, re.M)
    expected = {"rms_norm", "add_layer_norm", "gate_times_up", "rotate_append", "attend"}
    if architecture in WIDENING:
        expected.add("widen")
    assert expected <= {name for name, _ in lines}
    # With a width that is known to be a multiple of 16, whole rows are loaded 16 bytes at a time.
    assert {narrow for name, narrow in lines if name == "rms_norm"} == {"0"}
