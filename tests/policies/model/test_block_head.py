"""A block head by its passes over a cache against whole sequences at once: the same numbers."""

import pytest
import torch
from torch import Tensor

from deft_policies.model.block_head import BlockHead, BlockPasses
from deft_policies.model.kv_cache import KVCache
from tests.policies.decoding.captures import random_block
from tests.tiny_target import ACTIONS, WIDTH, tiny_decoder

LENGTH, ANCHORS, PLACES = 20, (4, 9, 15), 7


def head_and_inputs() -> tuple[BlockHead, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(1, LENGTH, 2 * WIDTH, generator=generator)
    embeds = torch.randn(1, len(ANCHORS), WIDTH, generator=generator)
    return random_block(tiny_decoder().sizes), states, embeds


def taught(head: BlockHead, states: Tensor, embeds: Tensor) -> Tensor:
    return head(states, embeds, torch.tensor([ANCHORS]))


@pytest.mark.parametrize("index", range(len(ANCHORS)))
def test_a_block_over_a_cache_is_the_block_that_was_taught(index: int) -> None:
    head, states, embeds = head_and_inputs()
    anchor, expected = ANCHORS[index], taught(head, states, embeds)[:, index]
    before, positions = torch.arange(anchor)[None], anchor + torch.arange(PLACES)[None]
    cache = KVCache(head.sizes.backbone, head.fuse.weight)
    cache.reserve(2, 40)
    here = slice(1, 2)
    head.append(states[:, :anchor], before, cache.open_same(here, 0, anchor))
    found = head.run(embeds[:, index], positions, cache.open_same(here, anchor, PLACES))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    fixed = KVCache(head.sizes.backbone, head.fuse.weight)
    fixed.reserve(1, 40)
    passes = BlockPasses(head, fixed, None)
    passes.append(states[:, :anchor], torch.tensor([0]), before)
    again = passes.run(embeds[:, index], positions, torch.tensor([anchor]))
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


def test_a_block_sees_neither_later_positions_nor_other_blocks() -> None:
    head, states, embeds = head_and_inputs()
    expected = taught(head, states, embeds)[:, 0]
    states[:, ANCHORS[0] :] = 7.0
    embeds[:, 1:] = 7.0
    torch.testing.assert_close(taught(head, states, embeds)[:, 0], expected)
    states[:, ANCHORS[0] - 1] = 7.0
    assert not torch.allclose(taught(head, states, embeds)[:, 0], expected)


def test_what_a_place_drafts_depends_on_the_token_before_it() -> None:
    head, states, embeds = head_and_inputs()
    ahead = torch.zeros(1, PLACES, len(ACTIONS))
    some = head.follow(ahead, 2, torch.tensor([[ACTIONS.first, ACTIONS.first + 1]]))
    assert not torch.allclose(some[0, 0], some[0, 1])
    outside = head.follow(ahead, 2, torch.tensor([[0, ACTIONS.first - 1]]))  # the same to the head
    assert torch.equal(outside[0, 0], outside[0, 1])
