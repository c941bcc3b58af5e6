"""Parts of the questions to a GPU that a CPU would not come by, and what is read of a profile."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="fused kernels need Triton")

from deft_policies.model.graphs import Reserve
from scripts.bench.gpu import formats, pi0fast, vla0
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.passes import read_profile, small_ways
from scripts.bench.gpu.products import Shape, blas, compare_bits, table
from scripts.bench.gpu.setting import SIZES, MeasuredRunner, OutOfTimeError, Setting
from scripts.bit_equality import CHAIN, WIDE, batch_case, make_target, rider_case, tree_case
from tests.tiny_openvla import CPU
from tests.triton_twins import Counted

Event = dict[str, object]  # of a chrome trace


def in_halves(folder: Path) -> Setting:
    """With fused kernels under the interpreter, which multiplies no bfloat16."""
    setting = Setting(SIZES["tiny"], CPU, folder)
    setting.dtype = torch.float16
    setting.network.fuse(Counted().kernels)
    return setting


def test_products_are_compared_with_ours(tmp_path: Path) -> None:
    """By a matrix with which every sum has one number that is not 0, in whatever order."""
    shape = Shape("unit matrix", [torch.eye(32).half()])
    rows = list(table(in_halves(tmp_path), shape, (1, 17)))
    assert [(row["product"], row["rows"]) for row in rows] == [
        ("unit matrix 32x32", 1),
        ("unit matrix 32x32", 17),
    ]
    assert {row["PyTorch as ours"] for row in rows} == {"yes"}
    assert {row["as 1 row"] for row in rows} == {True}
    assert all(float(row["ours us"] or 0) > 0 for row in rows)
    assert compare_bits(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])) == "50.00% differ"


def test_the_library_that_multiplies_is_chosen_for_a_block_alone() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    with blas("cublas", may_split=False) as told:
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert told == ""
        assert not matmul.allow_bf16_reduced_precision_reduction_split_k
    assert matmul.allow_bf16_reduced_precision_reduction is before is True
    assert matmul.allow_bf16_reduced_precision_reduction_split_k


def kernel(
    name: str, start: float, took: float, grid: list[int] | None = None
) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": took, "args": {"grid": grid}}


def test_a_profile_adds_up_kernels_and_the_gaps_before_them() -> None:
    events: list[Event] = [
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0.0, "dur": 90.0},
        {"ph": "M", "name": "process_name"},
        kernel("void product<float>(int)", 10.0, 5.0, [1, 384, 1]),
        kernel("product", 30.0, 10.0, [1, 384, 1]),
        kernel("product", 42.0, 1.0, [1, 128, 1]),
        kernel("beside another", 31.0, 4.0),
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 50.0, "dur": 2.0},
    ]
    found = read_profile({"traceEvents": events}, is_cuda=True)
    assert found.counts["product 1x384x1"] == 2
    assert found.busy_us["product 1x384x1"] == 15.0
    assert found.gaps_us["product 1x384x1"] == 15.0
    assert found.gaps_us["beside another"] == 0.0
    assert found.gaps_us["product 1x128x1"] == 2.0  # behind the longer of the two before it
    assert found.counts["Memcpy DtoD"] == 1
    assert found.span_us == 42.0
    *_, total = found.rows("a pass")
    assert total["count"] == 5
    assert total["us"] == 22.0


def test_small_decoders_are_asked_in_both_layouts_of_their_passes() -> None:
    """Also one of a single layer."""
    target = make_target(replace(WIDE, width=64, mlp_width=96, num_heads=4, num_kv_heads=2))
    cases = (
        tree_case(target, "woven", 84),
        rider_case(target, CHAIN[:8], 59, keeps_hidden=False),
        batch_case(target, [59, 84, 130], CHAIN[:8]),
    )
    packed, fixed = small_ways(target).values()
    for case in cases:
        pairs = zip(fixed.run(case).logits, packed.run(case).logits, strict=True)
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, atol=0.04, rtol=0.0)


def test_capturing_ends_when_its_time_is_over(tmp_path: Path) -> None:
    setting = Setting(SIZES["tiny"], CPU, tmp_path)
    runner = MeasuredRunner(setting, Reserve(), seconds=60.0)
    (found,) = runner.run("a step", lambda one: (one + 1,), (torch.zeros(3),))
    assert found.tolist() == [1.0, 1.0, 1.0]
    assert [one.key for one in runner.captures] == ["a step"]
    hurried = MeasuredRunner(setting, Reserve(), seconds=-1.0)
    with pytest.raises(OutOfTimeError):
        hurried.run("a step", lambda one: (one + 1,), (torch.zeros(3),))


def test_the_weight_comes_first_for_a_question_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are only counted: passes and frames of what they leave would be of no use."""
    setting, launch = Setting(SIZES["tiny"], CPU, tmp_path), Counted(is_run=False)
    setting.dtype = torch.float16
    setting.network.fuse(launch.kernels)
    asked: list[tuple[str, bool]] = []

    def passes(setting: Setting, way: str) -> Iterator[Row]:
        kernels = setting.network.decoder.kernels
        assert kernels is not None
        asked.append((way, kernels.tiles[0].weight_first))
        yield {"what": "passes"}

    monkeypatch.setattr(formats, "_passes", passes)
    rows = list(formats.weight_first(setting))
    assert len({row["way"] for row in rows if row["what"] != "passes"}) == 4  # of cutting them
    assert setting.network.decoder.kernels == launch.kernels
    network = setting.network
    list(formats.fp8(setting))
    in_bits = [("as it is served", False), ("weight first", True)]
    assert asked == [("weight first", True), *in_bits, ("weight first, wide copies kept", True)]
    assert setting.network is not network  # what asks next has none in few bits


@pytest.mark.parametrize(
    ("ask", "ways"),
    [
        (pi0fast.pi0fast, {"as it is served", "with fused kernels"}),
        (vla0.vla0, {"without fused kernels", "as it is served"}),
    ],
)
def test_small_networks_are_asked_with_our_kernels_and_without(
    ask: Callable[[Setting], Iterator[Row]], ways: set[str], tmp_path: Path
) -> None:
    """Programs are only counted."""
    setting, launch = Setting(SIZES["tiny"], CPU, tmp_path), Counted(is_run=False)
    setting.network.fuse(launch.kernels)
    assert {row["way"] for row in ask(setting)} == ways
    assert {"attend", "gate_times_up"} <= set(launch.launched)


def test_towers_are_asked_about_by_every_way_of_looking(tmp_path: Path) -> None:
    setting = in_halves(tmp_path)
    kernels = setting.network.decoder.kernels
    ways = {row["way"]: row for row in formats.towers(setting)}
    assert sum("our products" in str(way) for way in ways) == 3
    assert ways["as it is served"]["as it is served"] == "yes"
    assert all(float(row["ms"] or 0) > 0 for row in ways.values())
    assert setting.network.decoder.kernels == kernels  # as they were


def test_a_gpu_resizes_frames_itself_as_it_does_for_a_server(tmp_path: Path) -> None:
    frame = Setting(SIZES["tiny"], CPU, tmp_path).frames(1)[0].observation.image
    for device, shape in (("cuda", frame.shape), ("cpu", (28, 28, 3))):
        setting = Setting(SIZES["tiny"], torch.device(device), tmp_path)
        assert setting.images.fit(frame).shape == shape
