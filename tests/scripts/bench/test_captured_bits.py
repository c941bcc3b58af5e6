"""Captured passes compute what the same passes compute as they come, bit by bit, in any format.

A recorder stands for CUDA graphs; on a device the short run asks the same (`--only bits`).
"""

from pathlib import Path

import pytest
import torch

from scripts.bench.gpu.passes import both_ways, cases_of
from scripts.bench.gpu.setting import SIZES, Setting
from scripts.bit_equality import Computed
from tests.fake_graphs import RecordingCapturer
from tests.tiny_openvla import CPU


def is_same(one: Computed, other: Computed) -> bool:
    pairs = zip(one.logits + one.hidden, other.logits + other.hidden, strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_captured_passes_have_the_bits_of_eager_ones(tmp_path: Path, dtype: torch.dtype) -> None:
    capturer = RecordingCapturer()
    setting = Setting(SIZES["tiny"], CPU, tmp_path, capturer.capture)
    setting.dtype = dtype
    eager, captured = both_ways(setting)
    cases = list(cases_of(eager.target, setting.size))
    with torch.inference_mode():
        # Each twice, in turn with others, so that a captured pass runs on what others left behind.
        for case in [*cases, *cases]:
            found, wanted = captured.run(case), eager.run(case)
            assert is_same(found, wanted), case.name
            assert all(one.isfinite().all() for one in wanted.logits)
    assert capturer.num_captured > 0
