"""The short run on a GPU, on a CPU at the smallest sizes: every question gives its answers."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch

from deft_policies.benchmark.transformers_loops import build_llama
from deft_policies.decoding import sequence
from deft_policies.families.openvla import OpenVLAFamily
from deft_policies.families.options import ModelOptions
from deft_policies.families.vla0.network import Vla0Network
from deft_policies.model.graphs import Reserve
from deft_policies.model.random_weights import openvla_7b
from scripts import scripted_drafts
from scripts.bench.gpu import frames, passes, products, server, vla0
from scripts.bench.gpu.asking import LINES, Row
from scripts.bench.gpu.setting import SIZES, Setting, reserve_of
from scripts.bench.gpu_run import QUESTIONS, main
from scripts.bit_equality import find_difference
from tests.draws import IS_NIGHT
from tests.fake_graphs import RecordingCapturer
from tests.repository import ROOT
from tests.scripts.bench.planned_memory import META, PlannedSetting, most_bytes, random_head

CPU = ("--device", "cpu", "--size", "tiny")
MOST_BYTES = 70e9  # of an H100's 80, which nobody has to himself
LAYERS = 32


def lines_of(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / LINES).read_text().splitlines()]


def test_every_question_is_answered_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), *CPU], RecordingCapturer().capture) == 0
    lines = lines_of(tmp_path)
    assert [one["name"] for one in lines] == [name for name, _, _ in QUESTIONS]
    assert not [one["error"] for one in lines if one["error"]]
    assert all(one["rows"] for one in lines)
    assert list(tmp_path.glob("pass_of_64.json"))
    printed = capsys.readouterr().out
    for name, _, _ in QUESTIONS:
        assert len(re.findall(f"^{name}: answered", printed, re.M)) == 2


def test_some_questions_are_picked_and_the_rest_is_asked_when_it_goes_on(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path), *CPU]
    assert main([*out, "--only", "passes,ceilings"]) == 0
    assert [one["name"] for one in lines_of(tmp_path)] == ["ceilings", "passes"]
    assert main([*out, "--only", "passes,products", "--resume"]) == 0
    assert [one["name"] for one in lines_of(tmp_path)] == ["ceilings", "passes", "products"]


def test_a_name_that_is_no_question_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--only", "passes,speed"])
    assert "unknown: speed; known: ceilings, weights" in capsys.readouterr().err


def test_nothing_is_imported_that_a_bare_machine_lacks() -> None:
    """One with PyTorch, and no packages for tests, servers or quantised weights."""
    lacking = {"pytest", "torchao", "deft_server", "pydantic", "fastapi", "transformers"}
    program = f"import sys, scripts.bench.gpu_run; print(sorted({lacking} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


def test_budgets_leave_time_for_all_but_the_last_question() -> None:
    *most, _ = QUESTIONS
    assert sum(seconds for _, seconds, _ in most) <= 480


@pytest.mark.skipif(not IS_NIGHT, reason="plans minutes of a GPU in half a minute: every night")
def test_questions_about_the_7b_fit_a_card_of_80_gb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned on tensors that hold nothing, with few layers: each further one takes as much."""
    monkeypatch.setattr(sequence, "_NUMBERS", repeat(0))  # whatever is read of the device is 0
    monkeypatch.setattr(scripted_drafts, "random_head", random_head)

    def most_of(ask: Callable[[Setting], Iterator[object]], num_layers: int) -> int:
        config = replace(openvla_7b(), llm=replace(openvla_7b().llm, num_layers=num_layers))
        few = {"repeats": 1, "frames": 1, "chains": (8,)}
        size = replace(SIZES["7b"], config=lambda: config, **few)
        return most_bytes(PlannedSetting(size, tmp_path), ask)

    def llama(setting: Setting) -> Iterator[object]:
        yield build_llama(setting.network)

    def largest_bits(setting: Setting) -> Iterator[object]:
        eager, captured = passes.both_ways(setting)
        *_, batch_of_prompts = passes.cases_of(eager.target, setting.size)
        yield find_difference(batch_of_prompts, captured, eager)

    found = {}
    # Where bits differ, what every operation of every layer computes is kept for a while.
    for name, ask in {"passes": passes.passes, "bits": largest_bits, "transformers": llama}.items():
        one, two = (most_of(ask, num_layers) for num_layers in (1, 2))
        found[name] = one + (LAYERS - 1) * (two - one)
    llm, weights = openvla_7b().llm, 2 * (4 * 4096**2 + 3 * 4096 * 11008)
    # Two engines have one of a layer: keys and values in two bytes, of eight answers and a prefill.
    cache = 2 * 9 * 512 * 2 * 2 * llm.width
    for name, ask in {
        "products": products.products,
        "frames": frames.frames,
        "batches": frames.batches,
    }.items():
        found[name] = most_of(ask, 1) + (LAYERS - 1) * (weights + cache)
    with META:
        qwen = Vla0Network(vla0.qwen("7b"))
    found["vla0"] = found["passes"] + 2 * sum(one.numel() for one in qwen.parameters())
    assert found["passes"] > 15e9  # the weights alone
    assert {name: most for name, most in found.items() if most > MOST_BYTES} == {}


def test_a_servers_start_is_counted_without_computing() -> None:
    config, dtype = openvla_7b(), torch.bfloat16
    family = OpenVLAFamily(None, ModelOptions(random_weights="openvla-7b"))
    assert reserve_of(config) == family.reserve
    plan = server.plan_start(config, dtype, reserve_of(config))
    assert plan.num_bytes == family.planned_bytes(dtype)
    assert 2e9 < plan.total_bytes < 4e9
    # Batches of 1, 2, 4 and 8 of four widths; five lengths with three numbers of riders, and with
    # all hidden states.
    assert plan.graphs == {"passes": 4 * 4, "prefills": 5 * (3 + 1), "towers": 4}
    few = server.plan_start(config, dtype, Reserve(1, 288, 288))
    assert few.graphs == {"passes": 4, "prefills": 3 + 1, "towers": 1}
    assert few.total_bytes < plan.total_bytes


def test_a_servers_start_captures_what_was_counted(tmp_path: Path) -> None:
    unhurried = replace(SIZES["tiny"], captures_s=60.0)
    rows = list(server.server(Setting(unhurried, torch.device("cpu"), tmp_path)))
    graphs = {str(row["what"]): row["graphs"] for row in rows if row.get("graphs")}
    for kind in ("passes", "prefills", "towers", "all"):
        assert graphs[f"done: {kind}"] == graphs[f"planned: {kind}"]
