"""Matrices in fp8, a scale for every row: the numbers, the product, and whole passes."""

import pytest
import torch
from torch import Tensor, nn

from deft_policies.errors import DeviceError
from deft_policies.model.formats import Quantization
from deft_policies.model.quantization import (
    FP8,
    LARGEST,
    Fp8Linear,
    check_quantization,
    quantize_linears,
)
from deft_policies.model.vla import OpenVLAModel
from tests.policies.model.test_fused_passes import answers, fixed_shapes
from tests.tiny_openvla import CPU, tiny_model
from tests.triton_twins import Counted


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def wide(matrix: Fp8Linear) -> Tensor:
    assert matrix.matrix.scales is not None
    return matrix.matrix.weight.float() * matrix.matrix.scales[:, None]


def linear_of(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], len(weight), bias=False, dtype=weight.dtype)
    linear.weight.data = weight
    return linear


def in_fp8(model: OpenVLAModel) -> OpenVLAModel:
    for layer in model.decoder.layers:
        assert quantize_linears(layer, Quantization.FP8, CPU) == []
    return model


def test_every_row_uses_the_upper_half_of_the_formats_range() -> None:
    given = random(6, 40) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 0.0])[:, None]
    matrix = Fp8Linear(linear_of(given))
    assert matrix.matrix.weight.dtype is FP8
    largest = matrix.matrix.weight[:5].float().abs().amax(dim=1)
    assert bool(((largest >= LARGEST / 2) & (largest <= LARGEST)).all())
    # Three bits of mantissa: half a step is a sixteenth of the value, or of the smallest normal.
    assert matrix.matrix.scales is not None
    smallest = matrix.matrix.scales[:, None] / 2**6
    assert bool(((wide(matrix) - given).abs() <= given.abs() / 16 + smallest / 16).all())
    assert wide(matrix)[5].tolist() == [0.0] * 40


def test_bfloat16_holds_every_weight_exactly() -> None:
    matrix = Fp8Linear(linear_of(random(20, 64) * 0.03))
    assert torch.equal(wide(matrix).bfloat16().float(), wide(matrix))


def test_a_product_is_that_of_the_rounded_weights() -> None:
    linear = nn.Linear(48, 32, bias=False)
    inputs, matrix = random(5, 48, seed=1), Fp8Linear(linear)
    torch.testing.assert_close(matrix(inputs), inputs @ wide(matrix).T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(matrix(inputs), linear(inputs), atol=0.1, rtol=0.1)


def test_linears_of_any_size_become_fp8() -> None:
    module = nn.ModuleDict({"odd": nn.Linear(43, 9, bias=False), "norm": nn.LayerNorm(8)})
    assert quantize_linears(module, Quantization.FP8, CPU) == []
    assert isinstance(module["odd"], Fp8Linear)
    assert isinstance(module["norm"], nn.LayerNorm)


def test_a_cpu_multiplies_fp8_too() -> None:
    check_quantization(Quantization.FP8, CPU, torch.float32)
    with pytest.raises(DeviceError, match="not on meta"):
        check_quantization(Quantization.FP8, torch.device("meta"), torch.bfloat16)


def test_fused_passes_in_fp8_score_what_plain_ones_do() -> None:
    pytest.importorskip("triton", reason="fused kernels need Triton")
    plain = answers(fixed_shapes(in_fp8(tiny_model())), 6)
    exact = answers(fixed_shapes(tiny_model()), 6)
    model = in_fp8(tiny_model())
    model.fuse(Counted().kernels)
    fused = answers(fixed_shapes(model), 6)
    for found, expected, right in zip(fused, plain, exact, strict=True):
        assert float((expected - right).norm() / right.norm()) > 0.01
        assert float((found - expected).norm() / right.norm()) < 0.001
