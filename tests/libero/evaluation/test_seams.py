"""Chunks by each kind of seam against lock-step: the numbers that the documents quote."""

import json
from dataclasses import asdict

import pytest

from deft_core.types import ChunkBlending
from scripts.check_seams import (
    CHUNKS,
    DELAYS_MS,
    SeamRow,
    compare,
    load_chunks,
    main,
    replay,
)
from tests.repository import ROOT

RESULTS = ROOT / "docs/results/chunk_seams.jsonl"


def test_at_200_ms_a_hundred_pairs_come_out_as_documented_and_hold() -> None:
    documented = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    lines = [line for delay_ms in DELAYS_MS for line in compare(100, delay_ms / 1000)]
    for line, known in zip(lines, documented, strict=True):
        own = asdict(line)
        assert own.pop("seam") == known.pop("seam")
        assert own == pytest.approx(known, rel=1e-6)
    default = [line for line in lines if line.seam == ChunkBlending.WAIT.value]
    assert [line.pairs for line in default] == [100, 100]
    assert all(line.losses - line.wins <= 10 for line in default)
    assert all(line.largest_step <= 1.5 * line.largest_step_inside for line in default)
    # Or the world asks too little to tell them apart.
    assert not all(line.holds for line in lines if line.seam == ChunkBlending.SWITCH.value)


def test_recorded_chunks_meet_without_a_larger_step() -> None:
    chunks = load_chunks(CHUNKS)
    for delay in (1, 4):
        sizes = replay(chunks, ChunkBlending.WAIT, delay)
        assert 0 < sizes.commanded <= 1.5 * sizes.inside


def test_a_line_through_pairs_bears_some_outliers() -> None:
    good = SeamRow("wait", 200.0, 100, 90, 10, 0, 1.0, 30.0, 0, 1.5, 1.0)
    assert good.holds
    assert not SeamRow(**{**asdict(good), "losses": 11}).holds
    assert not SeamRow(**{**asdict(good), "largest_step": 1.51}).holds


def test_the_command_prints_every_kind_of_seam(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--pairs", "6"]) == 0
    shown = capsys.readouterr().out
    assert all(shown.count(f"\n| {seam.value} ") == 2 * len(DELAYS_MS) for seam in ChunkBlending)
