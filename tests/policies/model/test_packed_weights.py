"""Weights in other layouts: an addition to torch's own product, which is always there."""

import pytest
import torch
from torch import Tensor, nn

from deft_policies.model.cpu_products import PackableLinear, can_pack, can_pack_halves, pack
from deft_policies.model.products import product_of
from tests.tiny_target import fast_target, greedy, random_prompts, tiny_decoder

OPERATORS = [
    (torch.ops.mkldnn, "_reorder_linear_weight"),
    (torch.ops.mkldnn, "_linear_pointwise"),
    (torch.ops.quantized, "linear_prepack_fp16"),
    (torch.ops.quantized, "linear_dynamic_fp16"),
]


def linear_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(48, 80, bias=False).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("num_rows", [1, 7, 64])
@pytest.mark.parametrize("is_rounded", [False, True], ids=["any weights", "of bfloat16"])
def test_a_packed_weight_multiplies_as_one_that_is_not(num_rows: int, is_rounded: bool) -> None:
    linear = linear_of()
    if is_rounded:
        linear.weight.copy_(linear.weight.bfloat16())
    inputs = torch.randn(num_rows, 48)
    found = product_of(linear, packs=True).apply(inputs)
    torch.testing.assert_close(found, product_of(linear).apply(inputs))
    torch.testing.assert_close(found, linear(inputs))


def test_float16_is_used_where_it_holds_every_number() -> None:
    weight = linear_of().weight
    rounded = weight.bfloat16().float()
    many, half = pack(weight), pack(rounded)
    assert [one and one.least_rows for one in (many, half)] == [2, 1]
    too_large = rounded.clone()
    too_large[0, 0] = 70000.0
    found = pack(too_large)
    assert found is not None
    assert found.least_rows == 2


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX2",
    reason="with AVX2 alone, blocks of rows are summed in another order than single ones",
)
def test_a_row_has_the_same_bits_among_others_in_float16() -> None:
    half = pack(linear_of().weight.bfloat16().float())
    assert half is not None
    inputs = torch.randn(130, 48)
    alone = torch.cat([half.product(row[None]) for row in inputs])
    for count in (2, 3, 5, 16, 50, 130):
        assert torch.equal(half.product(inputs[:count]), alone[:count])


@pytest.mark.parametrize("has_gelu", [False, True])
def test_a_packed_layer_looks_as_one_that_is_not(has_gelu: bool) -> None:
    torch.manual_seed(0)
    layer = PackableLinear(48, 80, has_gelu).bfloat16().requires_grad_(False)
    inputs = torch.randn(2, 9, 48).bfloat16()
    expected: Tensor = layer(inputs)
    layer.pack()
    torch.testing.assert_close(layer(inputs), expected, rtol=0.02, atol=0.01)
    in_float32 = layer.float()(inputs.float())
    torch.testing.assert_close(in_float32, expected.float(), rtol=0.02, atol=0.01)


@pytest.mark.parametrize(("operators", "name"), OPERATORS, ids=[name for _, name in OPERATORS])
@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, RuntimeError])
def test_without_a_private_operator_torchs_own_product_answers_the_same(
    operators: object, name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder()
    prompts = random_prompts(decoder, [2, 5])
    answers = greedy(decoder, prompts)

    def refuse(*arguments: object) -> None:
        raise error(name)

    monkeypatch.setattr(operators, name, refuse)
    can_pack.cache_clear()
    can_pack_halves.cache_clear()
    try:
        assert not (can_pack(torch.float32) and can_pack_halves())
        target = fast_target(decoder)
    finally:
        can_pack.cache_clear()
        can_pack_halves.cache_clear()
    for prompt, answer in zip(prompts, answers, strict=True):
        found = target.logits_along(prompt, len(answer))
        assert tuple(int(one.argmax()) for one in found) == answer
