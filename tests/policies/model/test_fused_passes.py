"""Whole passes with fused kernels against their plain twins, and how many launches they take."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="fused kernels need Triton")

from deft_policies.decoding.tree import DraftTree
from deft_policies.families.openvla import VlaTarget
from deft_policies.model import cpu_products
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.quantization import quantize_linears
from deft_policies.model.vla import OpenVLAModel, VisionTransformer
from tests.launches import LaunchCounter
from tests.recorder import RecordingCapturer
from tests.tiny_openvla import CPU, random_prompts, tiny_config, tiny_model
from tests.triton_twins import Counted

LAYER_LAUNCHES, FP8_LAYER_LAUNCHES, BLOCK_LAUNCHES = 10, 11, 8


def fixed_shapes(model: OpenVLAModel) -> VlaTarget:
    """Shapes as captured passes have them, but sealed: the interpreter cannot be recorded."""
    runner = StepRunner(RecordingCapturer().capture, Reserve(rows=2, longest=32))
    with runner.warming_up():
        pass
    return VlaTarget(model, runner=runner)


def random_tree(num_rows: int, num_nodes: int) -> DraftTree:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 300, (num_rows, num_nodes), generator=generator)
    parents = torch.tensor([-1, *((node - 1) // 2 for node in range(1, num_nodes))])
    return replace(DraftTree.chain(tokens), parents=parents.expand_as(tokens), is_chain=False)


def answers(target: VlaTarget, num_nodes: int) -> list[Tensor]:
    """Scores of a prefill with guesses and of two passes behind it."""
    prompts = random_prompts(target.model, [3, 9])
    prompts = replace(prompts, embeds=prompts.embeds.to(target.decoder.embedding.weight.dtype))
    tree = random_tree(2, num_nodes)
    rows = target.new_cache()
    rows.reserve(2, 64)
    first, hidden = target.prefill(rows, 0, prompts, tree)
    found = [first.logits.clone(), hidden.clone()]
    for nodes in (num_nodes, 1):
        rows.keep(torch.zeros(2, 1, dtype=torch.int64), 1, in_place=True)
        found.append(target.score(rows, random_tree(2, nodes)).logits.clone())
    return found


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_fused_passes_score_what_plain_ones_do(num_kv_heads: int) -> None:
    plain = answers(fixed_shapes(tiny_model(num_kv_heads=num_kv_heads)), 6)
    model, launch = tiny_model(num_kv_heads=num_kv_heads), Counted()
    model.fuse(launch.kernels)
    for found, expected in zip(answers(fixed_shapes(model), 6), plain, strict=True):
        torch.testing.assert_close(found[:, :1], expected[:, :1], atol=2e-4, rtol=2e-4)
        assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))
    assert set(launch.launched) == {
        *("rms_norm", "silu_times", "rotate_append", "attend_split", "join_splits")
    }


def test_products_are_fused_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cannot multiply bfloat16; float16 takes the same way."""
    monkeypatch.setattr(cpu_products, "_AMONG", (8,))  # rows that loading asks about
    monkeypatch.setattr(cpu_products, "_ALONE", (0, 5))
    plain, model, launch = tiny_model().half(), tiny_model().half(), Counted()
    model.fuse(launch.kernels)
    expected = answers(fixed_shapes(plain), 6)
    for found, one in zip(answers(fixed_shapes(model), 6), expected, strict=True):
        torch.testing.assert_close(found[:, :1], one[:, :1], atol=2e-2, rtol=2e-2)
    assert "product" in launch.launched


def test_fused_towers_see_what_plain_ones_do() -> None:
    pixels = torch.randn(2, 6, 28, 28, generator=torch.Generator().manual_seed(0))
    plain, fused = tiny_model(), tiny_model()
    fused.fuse(Counted().kernels)
    found, expected = fused.see(pixels), plain.see(pixels)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_nodes", [1, 8])
@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.FP8])
def test_a_layer_of_a_decode_or_verify_pass_takes_ten_launches(
    num_nodes: int, quantization: Quantization
) -> None:
    """Counted as the difference between models of four and of two layers; more of them in fp8."""
    totals = []
    for num_layers in (2, 4):
        launch = Counted()
        model = tiny_model(num_layers=num_layers)
        for layer in model.decoder.layers:
            quantize_linears(layer, quantization, CPU)
        model.fuse(launch.kernels)
        target = fixed_shapes(model)
        prompts = random_prompts(model, [3])
        rows = target.new_cache()
        rows.reserve(1, 64)
        target.prefill(rows, 0, prompts, DraftTree.root_only(prompts.last_tokens))
        tree = random_tree(1, num_nodes)
        launch.launched.clear()
        inputs = (tree.tokens, tree.ancestor_mask(), torch.tensor([6]))
        with LaunchCounter() as counter:
            target._score_step(rows, 64, *inputs)
        totals.append(counter.total + len(launch.launched))
    is_fp8 = quantization is Quantization.FP8
    expected = FP8_LAYER_LAUNCHES if is_fp8 else LAYER_LAUNCHES
    assert (totals[1] - totals[0]) / 2 == expected, counter.counts


def test_a_block_of_a_tower_takes_eight_launches() -> None:
    totals = []
    for depth in (3, 5):
        launch = Counted()
        sizes = replace(tiny_config().towers[0], depth=depth)
        tower = VisionTransformer(sizes).requires_grad_(False)
        tower.kernels = launch.kernels
        with LaunchCounter() as counter:
            tower(torch.zeros(1, 3, 28, 28))
        totals.append(counter.total + len(launch.launched))
    assert (totals[1] - totals[0]) / 2 == BLOCK_LAUNCHES, counter.counts
