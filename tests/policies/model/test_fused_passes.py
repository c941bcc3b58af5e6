"""Whole passes with fused kernels against their plain twins, and how many launches they take."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="fused kernels need Triton")

from deft_policies.decoding.target import PassRow, Prompt
from deft_policies.decoding.tree import DraftTree
from deft_policies.families.openvla import VlaTarget
from deft_policies.model import cpu_products
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.kernels.launch import NARROW
from deft_policies.model.quantization import quantize_linears
from deft_policies.model.vla import OpenVLAModel, VisionTransformer
from tests.fake_graphs import RecordingCapturer
from tests.launches import LaunchCounter
from tests.tiny_openvla import random_prompts, tiny_config, tiny_model
from tests.triton_twins import Counted

LAYER_LAUNCHES, WIDE_LAYER_LAUNCHES, BLOCK_LAUNCHES = 7, 9, 8


def fixed_shapes(model: OpenVLAModel) -> VlaTarget:
    """Shapes as captured passes have them, but sealed: the interpreter cannot be recorded."""
    runner = StepRunner(RecordingCapturer().capture, Reserve(rows=2, longest=32))
    with runner.warming_up():
        pass
    return VlaTarget(model, runner=runner)


def random_tree(num_nodes: int, seed: int, root: int | None = None) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, 300, (num_nodes,), generator=generator).tolist()
    parents = [-1, *((node - 1) // 2 for node in range(1, num_nodes))]
    tokens[0] = tokens[0] if root is None else root
    return DraftTree(tokens, parents, [""] * num_nodes, is_chain=num_nodes <= 2)


def answers(target: VlaTarget, num_nodes: int) -> list[Tensor]:
    """Scores of prefills with guesses and of two passes behind them, and hidden states."""
    dtype, cache = target.decoder.embedding.weight.dtype, target.new_cache()
    target.set_aside(cache, widest=8, num_tokens=8)
    prompts = [replace(one, embeds=one.embeds.to(dtype)) for one in two_prompts(target.model)]
    rows = [
        PassRow(slot, one.length - 1, random_tree(num_nodes, slot, one.last_token), slot)
        for slot, one in enumerate(prompts)
    ]
    rows = [replace(row, prompt=one) for row, one in zip(rows, prompts, strict=True)]
    first = target.forward(cache, rows)
    found = [first.logits.clone(), first.hidden.clone()]
    for size in (num_nodes, 1):
        rows = [
            PassRow(slot, one.length, random_tree(size, 2 + slot), slot)
            for slot, one in enumerate(prompts)
        ]
        scores = target.forward(cache, rows)
        nodes = [scores.logits[scores.nodes(index, row.tree)] for index, row in enumerate(rows)]
        found.append(torch.cat(nodes))
    return found


def two_prompts(model: OpenVLAModel) -> list[Prompt]:
    return random_prompts(model, [3, 9])


def test_fused_passes_score_what_plain_ones_do() -> None:
    plain = answers(fixed_shapes(tiny_model(num_kv_heads=2)), 6)
    model, launch = tiny_model(num_kv_heads=2), Counted()
    model.fuse(launch.kernels)
    for found, expected in zip(answers(fixed_shapes(model), 6), plain, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))
    assert set(launch.launched) == {*("rms_norm", "gate_times_up", "rotate_append", "attend")}


def test_products_are_fused_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cannot multiply bfloat16; float16 takes the same way."""
    monkeypatch.setattr(cpu_products, "_AMONG", (8,))  # rows that loading asks about
    monkeypatch.setattr(cpu_products, "_ALONE", (0, 5))
    plain, model, launch = tiny_model().half(), tiny_model().half(), Counted()
    model.fuse(launch.kernels)
    expected = answers(fixed_shapes(plain), 6)
    for found, one in zip(answers(fixed_shapes(model), 6), expected, strict=True):
        torch.testing.assert_close(found, one, atol=2e-2, rtol=2e-2)
    assert "product" in launch.launched


def test_fused_towers_see_what_plain_ones_do() -> None:
    pixels = torch.randn(2, 6, 28, 28, generator=torch.Generator().manual_seed(0))
    plain, fused = tiny_model(), tiny_model()
    fused.fuse(Counted().kernels)
    found, expected = fused.see(pixels), plain.see(pixels)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_nodes", [1, 8, NARROW + 1])
@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.FP8, Quantization.INT4])
def test_a_layer_of_a_decode_or_verify_pass_takes_seven_launches(
    num_nodes: int, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted as the difference between models of four and of two layers; two more if it is wide.

    In float16, which the interpreter multiplies as it would bfloat16.
    """
    monkeypatch.setattr(cpu_products, "_AMONG", (8,))  # rows that loading asks about
    monkeypatch.setattr(cpu_products, "_ALONE", (0, 5))
    totals = []
    for num_layers in (2, 4):
        launch = Counted(is_run=False)
        model = tiny_model(num_layers=num_layers).half()
        for layer in model.decoder.layers:
            quantize_linears(layer, quantization, torch.device("cuda"))
        model.fuse(launch.kernels)
        target, (prompt, _) = fixed_shapes(model), two_prompts(model)
        cache = target.new_cache()
        target.set_aside(cache, widest=64, num_tokens=8)
        row = PassRow(0, prompt.length, random_tree(num_nodes, 0), 0)
        launch.launched.clear()
        with LaunchCounter() as counter:
            target.forward(cache, [row])
        totals.append(counter.total + len(launch.launched))
    expected = LAYER_LAUNCHES if num_nodes <= NARROW else WIDE_LAYER_LAUNCHES
    assert (totals[1] - totals[0]) / 2 == expected, counter.counts


def test_a_block_of_a_tower_takes_eight_launches() -> None:
    totals = []
    for depth in (3, 5):
        launch = Counted(is_run=False)
        sizes = replace(tiny_config().towers[0], depth=depth)
        tower = VisionTransformer(sizes).requires_grad_(False)
        tower.kernels = launch.kernels
        with LaunchCounter() as counter:
            tower(torch.zeros(1, 3, 28, 28))
        totals.append(counter.total + len(launch.launched))
    assert (totals[1] - totals[0]) / 2 == BLOCK_LAUNCHES, counter.counts
