"""In bfloat16 on a GPU, too, a token has the same bits alone as among others."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deft_policies.decoding.target import Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.kernels.launch import FusedKernels
from deft_policies.model.sizes import LlamaSizes
from tests.policies.model.test_batch_invariant import (
    SIZES,
    TREES,
    WITH_SHARED_KEYS,
    alone,
    check,
    make_target,
    paths_of,
    prefilled,
    prompts_of,
    row_of,
    tokens_of,
    tree_of,
)
from tests.tiny_openvla import tiny_model

pytestmark = pytest.mark.gpu

# One layer as wide as those of OpenVLA-7B.
WIDE = LlamaSizes(448, 4096, 11008, 1, 32, 32, 128, max_positions=512)
ALL_SIZES = pytest.mark.parametrize(
    "sizes", [SIZES, WITH_SHARED_KEYS, WIDE], ids=["own keys", "shared keys", "wide"]
)


def on_gpu(sizes: LlamaSizes) -> Target:
    return make_target(sizes, kernels=FusedKernels())


def tokens(num_rows: int, num_tokens: int, seed: int = 2) -> Tensor:
    return tokens_of(num_rows, num_tokens, seed).cuda()


@ALL_SIZES
def test_this_machine_computes_rows_alike(sizes: LlamaSizes) -> None:
    assert on_gpu(sizes).describe_equality().startswith("bit-equal")


@ALL_SIZES
@pytest.mark.parametrize("length", [61, 84])
def test_a_token_among_a_chain(length: int, sizes: LlamaSizes) -> None:
    target = on_gpu(sizes)
    prompts, given = prompts_of(target, [length]), tokens(1, 64)
    logits, hidden = alone(target, prompts, given[0].tolist())
    for width in (1, 2, 3, 7, 16, 26, 50, 64):
        scores = target.score(prefilled(target, prompts, 64), DraftTree.chain(given[:, :width]))
        check(scores, 0, list(range(width)), (logits[1:], hidden[1:]))


@ALL_SIZES
@pytest.mark.parametrize("kind", TREES)
def test_a_token_among_a_tree(sizes: LlamaSizes, kind: str) -> None:
    target, parents = on_gpu(sizes), TREES[kind]
    prompts, given = prompts_of(target, [84]), tokens(1, len(parents))
    scores = target.score(prefilled(target, prompts, 64), tree_of(given, parents))
    for path in paths_of(parents):
        logits, hidden = alone(target, prompts, given[0, path].tolist())
        check(scores, 0, path, (logits[1:], hidden[1:]))


@ALL_SIZES
@pytest.mark.parametrize("kind", ["chain", *TREES])
def test_a_token_that_rides_in_the_prefill(kind: str, sizes: LlamaSizes) -> None:
    parents, target = TREES.get(kind, list(range(-1, 44))), on_gpu(sizes)
    for length in (59, 127, 300):
        prompts = replace(prompts_of(target, [length]), keep_hidden=True)
        given = tokens(1, len(parents))
        given[0, 0] = prompts.last_tokens[0]
        cache = target.new_cache()
        cache.reserve(1, length + 64)
        scores, _ = target.prefill(cache, 0, prompts, tree_of(given, parents))
        for path in paths_of(parents):
            check(scores, 0, path, alone(target, prompts, given[0, path[1:]].tolist()))


@ALL_SIZES
@pytest.mark.parametrize("lengths", [[84] * 8, [59, 84, 130]])
def test_a_row_among_a_batch(lengths: list[int], sizes: LlamaSizes) -> None:
    target, parents = on_gpu(sizes), TREES["woven"]
    prompts, given = prompts_of(target, lengths), tokens(len(lengths), len(parents))
    scores = target.score(prefilled(target, prompts, 64), tree_of(given, parents))
    for row in range(len(lengths)):
        path = paths_of(parents)[-1]
        logits, hidden = alone(target, row_of(prompts, row), given[row, path].tolist())
        check(scores, row, path, (logits[1:], hidden[1:]))


@pytest.mark.parametrize("count", [2, 8])
def test_a_frame_is_seen_alone_as_among_others(count: int) -> None:
    model = tiny_model().bfloat16().cuda()
    model.fuse(FusedKernels())
    size = model.config.image.size
    shape = (count, 3 * len(model.towers), size, size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    among = model.see(pixels)
    for row in range(count):
        assert torch.equal(model.see(pixels[row : row + 1])[0], among[row])
