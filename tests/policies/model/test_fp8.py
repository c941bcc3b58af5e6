"""Matrices in fp8, by rows: the product, its fused producers, and whole passes."""

import pytest
import torch
from torch import Tensor, nn

from deft_policies.errors import DeviceError
from deft_policies.model.formats import Quantization
from deft_policies.model.quantization import (
    FP8,
    LARGEST,
    Fp8Linear,
    Fp8Rows,
    check_quantization,
    quantize_linears,
)
from deft_policies.model.vla import OpenVLAModel
from tests.policies.model.test_fused_passes import answers, fixed_shapes
from tests.tiny_openvla import CPU, tiny_model
from tests.triton_twins import Counted

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def wide(rows: Fp8Rows) -> Tensor:
    return rows.values.float() * rows.scales


def in_fp8(model: OpenVLAModel) -> OpenVLAModel:
    for layer in model.decoder.layers:
        assert quantize_linears(layer, Quantization.FP8, CPU) == []
    return model


def test_every_row_uses_the_whole_range_of_the_format() -> None:
    given = random(6, 40) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 0.0])[:, None]
    rows = Fp8Rows.of(given)
    assert rows.values.dtype is FP8
    assert rows.values[:5].float().abs().amax(dim=1).tolist() == [LARGEST] * 5
    # Three bits of mantissa: half a step is a sixteenth of the value, or of the smallest normal.
    smallest = rows.scales / 2**6
    assert bool(((wide(rows) - given).abs() <= given.abs() / 16 + smallest / 16).all())
    assert wide(rows)[5].tolist() == [0.0] * 40


def test_a_product_is_that_of_the_rounded_values() -> None:
    linear = nn.Linear(48, 32, bias=False)
    inputs, matrix = random(5, 48, seed=1), Fp8Linear(linear)
    expected = wide(Fp8Rows.of(inputs)) @ wide(Fp8Rows.of(linear.weight.detach())).T
    torch.testing.assert_close(matrix(inputs), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(matrix(inputs), linear(inputs), atol=0.1, rtol=0.1)


def test_nothing_but_linears_whose_sizes_fit_becomes_fp8() -> None:
    module = nn.ModuleDict({"fits": nn.Linear(64, 16, bias=False), "odd": nn.Linear(43, 8)})
    assert quantize_linears(module, Quantization.FP8, CPU) == ["odd"]
    assert isinstance(module["fits"], Fp8Linear)
    assert isinstance(module["odd"], nn.Linear)


def test_a_cpu_multiplies_fp8_too() -> None:
    check_quantization(Quantization.FP8, CPU, torch.float32)
    with pytest.raises(DeviceError, match="not on meta"):
        check_quantization(Quantization.FP8, torch.device("meta"), torch.bfloat16)


# The fused producers, under Triton's interpreter.


def assert_quantised(found: Fp8Rows, given: Tensor) -> None:
    """Equal, but for what the interpreter does in its own way: it rounds a tie up, not to even, and
    loses the carry where a value is rounded up to a power of two.
    """
    expected = Fp8Rows.of(given)
    torch.testing.assert_close(found.scales, expected.scales)
    one, other = found.values.float(), expected.values.float()
    is_power = torch.frexp(other).mantissa.abs() == 0.5
    assert bool(((one - other).abs()[~is_power] <= other.abs()[~is_power] / 8).all())
    assert float((one == other)[~is_power].float().mean()) > 0.97


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_producers_quantise_what_they_would_have_written(dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="fused kernels need Triton")
    kernels, weight = Counted().kernels, random(40, dtype=dtype, seed=1)
    hidden, gate_up = random(5, 40, dtype=dtype), random(3, 96, dtype=dtype)
    normed = kernels.rms_norm(hidden, weight, 1e-6)
    assert_quantised(kernels.rms_norm_fp8(hidden, None, weight, 1e-6), normed)
    branch = random(5, 40, dtype=dtype, seed=2)
    total = hidden + branch
    found = kernels.rms_norm_fp8(hidden, branch, weight, 1e-6)
    assert_quantised(found, kernels.rms_norm(hidden, weight, 1e-6))
    torch.testing.assert_close(hidden, total, atol=0.0, rtol=1e-2 if dtype.itemsize == 2 else 0.0)
    assert_quantised(kernels.silu_times_fp8(gate_up), kernels.silu_times(gate_up))
    assert_quantised(kernels.quantise_rows(hidden), hidden)


def test_fused_passes_in_fp8_score_what_plain_ones_do() -> None:
    """With casts that are not the interpreter's."""
    launch = pytest.importorskip("deft_policies.model.kernels.launch")

    class PlainCasts(launch.FusedKernels):  # type: ignore[name-defined,misc]
        def rms_norm_fp8(
            self, hidden: Tensor, branch: Tensor | None, weight: Tensor, eps: float
        ) -> Fp8Rows:
            if branch is not None:
                hidden.add_(branch)
            return Fp8Rows.of(self.rms_norm(hidden, weight, eps))

        def silu_times_fp8(self, gate_up: Tensor) -> Fp8Rows:
            return Fp8Rows.of(self.silu_times(gate_up))

        def quantise_rows(self, wide: Tensor) -> Fp8Rows:
            return Fp8Rows.of(wide)

    plain = answers(fixed_shapes(in_fp8(tiny_model())), 6)
    exact = answers(fixed_shapes(tiny_model()), 6)
    model = in_fp8(tiny_model())
    model.fuse(PlainCasts(Counted()))
    fused = answers(fixed_shapes(model), 6)
    for found, expected, right in zip(fused, plain, exact, strict=True):
        assert float((expected - right).norm() / right.norm()) > 0.01
        assert float((found - expected).norm() / right.norm()) < 0.01
