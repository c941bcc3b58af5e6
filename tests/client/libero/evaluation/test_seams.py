"""Chunks that overlap keep what waiting for them loses: the numbers that the documents quote."""

import json
from dataclasses import asdict

import pytest

from deft_client.chunks import Seam
from deft_client.libero.simulator import conventions
from scripts.check_seams.__main__ import CHUNKS, Line, compare, main
from scripts.check_seams.recorded import load_chunks, replay
from tests.repository import ROOT

RESULTS = ROOT / "docs/results/chunk_seams.jsonl"


def test_at_200_ms_a_hundred_pairs_come_out_as_documented_and_hold() -> None:
    documented = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    lines = {line.seam: line for line in compare(100, 0.2)}
    assert [asdict(line) for line in lines.values()] == [
        {name: pytest.approx(value) for name, value in line.items()} for line in documented
    ]
    overlapped, waiting = lines[Seam.FREEZE.value], lines[Seam.WAIT.value]
    assert overlapped.pairs == 100
    assert overlapped.losses - overlapped.wins <= 10
    assert overlapped.largest_step <= 1.5 * overlapped.largest_step_inside
    assert not waiting.holds  # or the world asks too little to tell them apart


def test_recorded_chunks_meet_without_a_larger_step_than_they_have_inside() -> None:
    chunks = load_chunks(CHUNKS)
    for delay in (1, 4):
        sizes = replay(chunks, conventions.ACTION_RULES, Seam.FREEZE, delay)
        assert 0 < sizes.commanded <= 1.5 * sizes.inside


def test_a_line_holds_up_to_a_tenth_of_the_pairs_and_one_and_a_half_steps() -> None:
    good = Line("freeze", 200.0, 100, 90, 10, 0, 1.0, 30.0, 0, 1.5, 1.0)
    assert good.holds
    assert not Line(**{**asdict(good), "losses": 11}).holds
    assert not Line(**{**asdict(good), "largest_step": 1.51}).holds


def test_the_command_prints_every_kind_of_seam(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--pairs", "6"]) == 0
    shown = capsys.readouterr().out
    assert all(shown.count(f"\n{seam.value} ") == 2 for seam in Seam)
