"""Matrices in fp8 and in int4: the numbers, the product, and whole passes."""

import pytest
import torch
from torch import Tensor, nn

from deft_policies.errors import DeviceError
from deft_policies.model import quantization as formats
from deft_policies.model.formats import Quantization
from deft_policies.model.quantization import (
    FP8,
    GROUP,
    LARGEST,
    Fp8Linear,
    Int4Linear,
    NarrowLinear,
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


def linear_of(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], len(weight), bias=False, dtype=weight.dtype)
    linear.weight.data = weight
    return linear


def in_few_bits(model: OpenVLAModel, quantization: Quantization) -> OpenVLAModel:
    """In the format of a GPU."""
    for layer in model.decoder.layers:
        assert quantize_linears(layer, quantization, torch.device("cuda")) == []
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
    assert bool(((matrix.weight - given).abs() <= given.abs() / 16 + smallest / 16).all())
    assert matrix.weight[5].tolist() == [0.0] * 40


@pytest.mark.parametrize("num_in", [GROUP, 2 * GROUP, 300])
def test_every_group_uses_the_whole_range_of_four_bits(num_in: int) -> None:
    given = random(6, num_in) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 0.0])[:, None]
    matrix = Int4Linear(linear_of(given))
    found = matrix.matrix
    assert found.scales is not None
    assert found.bits == 4
    assert found.weight.nbytes == len(given) * -(-num_in // (2 * GROUP)) * GROUP
    mantissas = torch.frexp(found.scales).mantissa * 2**5
    assert torch.equal(mantissas, mantissas.round())
    for first in range(0, num_in, GROUP):
        here = slice(first, first + GROUP)
        scales = found.scales[:5, first // GROUP, None]
        steps = given[:5, here] / scales
        numbers = matrix.weight[:5, here] / scales
        assert bool((numbers.amin(dim=1) == -8).all())
        assert bool(((numbers >= -8) & (numbers <= 7)).all())
        within = steps <= 7.5  # what is farther on the other side becomes 7
        assert bool(((numbers - steps).abs()[within] <= 0.5001).all())
        assert bool((numbers[~within] == 7).all())
        assert bool((steps.abs() <= 8 * 33 / 32).all())
    assert matrix.weight[5].tolist() == [0.0] * num_in


def test_numbers_that_four_bits_hold_come_back_at_their_places() -> None:
    given = torch.arange(3 * 700).view(3, 700) * 7 % 16 - 8.0
    assert torch.equal(Int4Linear(linear_of(given * 0.375)).weight, given * 0.375)


@pytest.mark.parametrize("kind", [Fp8Linear, Int4Linear])
def test_bfloat16_holds_every_weight_exactly(kind: type[NarrowLinear]) -> None:
    matrix = kind(linear_of(random(20, 300) * 0.03))
    assert torch.equal(matrix.weight.bfloat16().float(), matrix.weight)


def test_a_product_is_that_of_the_rounded_weights() -> None:
    linear = nn.Linear(48, 32, bias=False)
    inputs, matrix = random(5, 48, seed=1), Fp8Linear(linear)
    torch.testing.assert_close(matrix(inputs), inputs @ matrix.weight.T, atol=1e-5, rtol=1e-5)
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


def test_a_gpu_needs_no_library_for_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_import_torchao", pytest.fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_quantization(Quantization.INT4, torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.INT4])
def test_fused_passes_in_few_bits_score_what_plain_ones_do(quantization: Quantization) -> None:
    pytest.importorskip("triton", reason="fused kernels need Triton")
    plain = answers(fixed_shapes(in_few_bits(tiny_model(), quantization)), 6)
    exact = answers(fixed_shapes(tiny_model()), 6)
    model = in_few_bits(tiny_model(), quantization)
    model.fuse(Counted().kernels)
    fused = answers(fixed_shapes(model), 6)
    for found, expected, right in zip(fused, plain, exact, strict=True):
        assert float((expected - right).norm() / right.norm()) > 0.01
        assert float((found - expected).norm() / right.norm()) < 0.001
