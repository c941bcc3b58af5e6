"""Weights in oneDNN's layout: an addition to torch's own product, which is always there."""

import pytest
import torch
from torch import nn

from deft_policies.model.passes import Projection, can_pack
from tests.tiny_target import fast_target, greedy, one_row, random_prompts, tiny_decoder


@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_a_packed_weight_multiplies_as_one_that_is_not(num_rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=False).requires_grad_(False)
    inputs = torch.randn(num_rows, 48)
    packed = Projection(linear, packs=True).apply(inputs)
    torch.testing.assert_close(packed, Projection(linear).apply(inputs))
    torch.testing.assert_close(packed, linear(inputs))


@pytest.mark.parametrize("name", ["_reorder_linear_weight", "_linear_pointwise"])
@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, RuntimeError])
def test_without_the_private_operators_torchs_own_product_answers_the_same(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder()
    prompts = random_prompts(decoder, [2, 5])
    answers = greedy(decoder, prompts)

    def refuse(*arguments: object) -> None:
        raise error(name)

    monkeypatch.setattr(torch.ops.mkldnn, name, refuse)
    can_pack.cache_clear()
    try:
        assert not can_pack()
        target = fast_target(decoder)
    finally:
        can_pack.cache_clear()
    for row, answer in enumerate(answers):
        found = target.logits_along(one_row(prompts, row), len(answer))
        assert tuple(int(one.argmax()) for one in found) == answer
