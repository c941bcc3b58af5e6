"""Fused kernels, under Triton's interpreter, against the plain operations that they replace."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="fused kernels need Triton")

from deft_policies.model.kernels import launch
from deft_policies.model.llama import RMSNorm, rotate_
from deft_policies.model.sizes import LlamaSizes
from tests.triton_twins import Counted

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
FORMATS = [torch.float32, torch.bfloat16]
# The interpreter cannot multiply matrices of bfloat16; float16 takes the same way.
PRODUCT_FORMATS = [torch.float32, torch.float16]


def head_sizes(num_kv_heads: int) -> LlamaSizes:
    return LlamaSizes(1, 32, 1, 1, num_heads=4, num_kv_heads=num_kv_heads, head_dim=8)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def assert_alike(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    bound = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


def ends_of(mask: Tensor) -> Tensor:
    """[row, node] of a mask [row, 1, node, slot] that is added."""
    return ((mask[:, 0] == 0) * torch.arange(1, mask.shape[3] + 1)).amax(2)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [40])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    norm = RMSNorm(width, 1e-6).to(dtype)
    norm.weight.data = random(width, dtype=dtype, seed=1)
    hidden = random(5, width, dtype=dtype)
    assert_alike(Counted().kernels.rms_norm(hidden, norm.weight, 1e-6), norm(hidden))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("is_scaled", [True, False])
def test_adding_a_branch_and_normalising_the_sum(dtype: torch.dtype, is_scaled: bool) -> None:
    norm = torch.nn.LayerNorm(24, eps=1e-6).to(dtype)
    norm.weight.data, norm.bias.data = random(24, dtype=dtype), random(24, dtype=dtype, seed=1)
    residual, branch = random(2, 3, 24, dtype=dtype, seed=2), random(2, 3, 24, dtype=dtype, seed=3)
    scale = random(24, dtype=dtype, seed=4) if is_scaled else None
    total, out = Counted().kernels.add_layer_norm(residual, branch, scale, norm)
    expected = residual + (branch if scale is None else branch * scale)
    assert_alike(total, expected)
    assert_alike(out, norm(total))


@pytest.mark.parametrize("dtype", FORMATS)
def test_gate_times_up(dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * 48, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=1)
    assert_alike(Counted().kernels.silu_times(gate_up), functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_rotating_and_appending_in_one_launch(dtype: torch.dtype, num_kv_heads: int) -> None:
    heads = head_sizes(num_kv_heads)
    num_rotated, slots = 4 + num_kv_heads, torch.tensor([9, 3, 17])
    fused = random(3, (4 + 2 * num_kv_heads) * 8, dtype=dtype)
    cos, sin = random(3, 8, dtype=dtype, seed=1), random(3, 8, dtype=dtype, seed=2)
    cache = random(2, 10, 2 * num_kv_heads, 8, dtype=dtype, seed=3)
    plain, expected = fused.clone().view(3, -1, 8), cache.clone()
    rotate_(plain[:, :num_rotated], cos[:, None], sin[:, None])
    expected.view(20, 2 * num_kv_heads, 8)[slots] = plain[:, 4:]
    Counted().kernels.rotate_append(fused, (cos, sin), cache, slots, heads)
    assert_alike(fused.view(3, -1, 8)[:, :4], plain[:, :4])
    assert_alike(cache, expected)


@pytest.mark.parametrize("dtype", PRODUCT_FORMATS)
@pytest.mark.parametrize("num_kv_heads", [4, 1])
@pytest.mark.parametrize("num_nodes", [1, 24])
def test_split_attention(dtype: torch.dtype, num_kv_heads: int, num_nodes: int) -> None:
    """Rows of two lengths in a cache of 200 slots: shares of it are empty, full and cut."""
    heads, read = head_sizes(num_kv_heads), 150
    fused = random(2 * num_nodes, (4 + 2 * num_kv_heads) * 8, dtype=dtype)
    cache = random(2, 200, 2 * num_kv_heads, 8, dtype=dtype, seed=1)
    seen = torch.rand(2, 1, num_nodes, read, generator=torch.Generator().manual_seed(2)) < 0.7
    seen[0, :, :, 70:] = False
    seen[:, :, :, 0] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    counted = Counted()
    found = counted.kernels.attend(fused, cache, mask, ends_of(mask), heads)
    queries = fused.view(2, num_nodes, -1, 8)[:, :, :4].transpose(1, 2)
    keys_values = cache[:, :read].transpose(1, 2).repeat_interleave(4 // num_kv_heads, dim=1)
    keys, values = keys_values.chunk(2, dim=1)
    expected = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask.to(dtype)
    )
    assert_alike(found, expected.transpose(1, 2).reshape(2 * num_nodes, -1))
    assert counted.launched == ["attend_split", "join_splits"]


@pytest.mark.parametrize("dtype", PRODUCT_FORMATS)
def test_attention_has_the_same_bits_however_slots_are_split_and_wherever_they_lie(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In eighths, whose products are exact: the interpreter multiplies with the host's library."""
    heads, fused = head_sizes(2), (random(20, 64, dtype=dtype) * 8).round() / 8
    cache = (random(1, 200, 4, 8, dtype=dtype, seed=1) * 8).round() / 8
    left_out = torch.rand(1, 1, 20, 150, generator=torch.Generator().manual_seed(2)) < 0.4
    mask = torch.zeros(1, 1, 20, 150).masked_fill_(left_out, float("-inf"))
    kernels = Counted().kernels
    expected = kernels.attend(fused, cache, mask, ends_of(mask), heads)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(3))
    moved = cache.clone()
    moved[:, :150], moved_mask = cache[:, order], mask[..., order]
    for most in (1, 2, 4):
        monkeypatch.setattr(launch, "_MOST_SPLITS", most)
        assert torch.equal(kernels.attend(fused, cache, mask, ends_of(mask), heads), expected)
        assert torch.equal(
            kernels.attend(fused, moved, moved_mask, ends_of(moved_mask), heads), expected
        )


@pytest.mark.parametrize("dtype", PRODUCT_FORMATS)
@pytest.mark.parametrize("num_rows", [1, 60, 130])  # by all the tiles there are
@pytest.mark.parametrize("num_in", [64, 136])
def test_a_product_with_a_bias_or_what_is_there_already(
    dtype: torch.dtype, num_rows: int, num_in: int
) -> None:
    kernels, num_out = Counted().kernels, 72
    rows, weight = random(num_rows, num_in, dtype=dtype), random(num_out, num_in, dtype=dtype)
    weight *= num_in**-0.5
    bias, residual = random(num_out, dtype=dtype), random(num_rows, num_out, dtype=dtype, seed=1)
    assert_alike(kernels.product(rows, weight), functional.linear(rows, weight))
    assert_alike(kernels.product(rows, weight, bias), functional.linear(rows, weight, bias))
    expected = residual + functional.linear(rows, weight)
    assert kernels.product(rows, weight, residual=residual) is residual
    assert_alike(residual, expected)


@pytest.mark.parametrize("num_nodes", [1, 12])
def test_a_row_attends_alone_as_among_others(num_nodes: int) -> None:
    heads, kernels = head_sizes(2), Counted().kernels
    fused = random(3 * num_nodes, 64, dtype=torch.float32)
    cache = random(3, 200, 4, 8, dtype=torch.float32, seed=1)
    mask = torch.zeros(3, 1, num_nodes, 150)
    among = kernels.attend(fused, cache, mask, ends_of(mask), heads).view(3, num_nodes, -1)
    for row, given in enumerate(fused.view(3, num_nodes, -1)):
        alone = kernels.attend(given, cache[row : row + 1], mask[:1], ends_of(mask[:1]), heads)
        assert torch.equal(alone, among[row])
