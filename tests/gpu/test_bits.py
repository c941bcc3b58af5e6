"""In bfloat16 on a GPU, too, a token has the same bits alone as among others."""

import pytest
import torch

from deft_policies.decoding.target import Target
from deft_policies.model.kernels.launch import FusedKernels
from deft_policies.model.sizes import LlamaSizes
from tests.policies.model.test_batch_invariant import (
    CHAIN,
    SIZES,
    TREES,
    WITH_SHARED_KEYS,
    check_batch,
    check_chains,
    check_prefill,
    check_tree,
    make_target,
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


@ALL_SIZES
def test_this_machine_computes_rows_alike(sizes: LlamaSizes) -> None:
    assert on_gpu(sizes).describe_equality().startswith("bit-equal")


@ALL_SIZES
@pytest.mark.parametrize("length", [61, 84])
def test_a_token_among_a_chain(length: int, sizes: LlamaSizes) -> None:
    check_chains(on_gpu(sizes), length)


@ALL_SIZES
@pytest.mark.parametrize("kind", TREES)
def test_a_token_among_a_tree(sizes: LlamaSizes, kind: str) -> None:
    check_tree(on_gpu(sizes), TREES[kind])


@ALL_SIZES
@pytest.mark.parametrize("kind", ["chain", *TREES])
def test_a_token_that_rides_in_the_prefill(kind: str, sizes: LlamaSizes) -> None:
    target = on_gpu(sizes)
    for length in (59, 127, 300):
        check_prefill(target, TREES.get(kind, CHAIN), length, keeps_hidden=True)


@ALL_SIZES
@pytest.mark.parametrize("lengths", [[84] * 8, [59, 84, 130]])
def test_a_row_among_a_batch(lengths: list[int], sizes: LlamaSizes) -> None:
    check_batch(on_gpu(sizes), lengths, TREES["woven"])


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
