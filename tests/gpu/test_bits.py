"""In bfloat16 on a GPU, too, a token has the same bits alone as among others."""

import pytest

from deft_policies.decoding.target import Target
from deft_policies.model.kernels.launch import FusedKernels
from deft_policies.model.sizes import LlamaSizes
from scripts.bit_equality import (
    CHAIN,
    SHARED_KEYS,
    SMALL,
    TREES,
    WIDE,
    batch_case,
    chain_cases,
    find_frame_differences,
    make_target,
    rider_case,
    tree_case,
)
from tests.policies.model.test_batch_invariant import WIDTHS, differing, passes_of
from tests.tiny_openvla import tiny_model

pytestmark = pytest.mark.gpu
ALL_SIZES = pytest.mark.parametrize(
    "sizes", [SMALL, SHARED_KEYS, WIDE], ids=["own keys", "shared keys", "wide"]
)


def on_gpu(sizes: LlamaSizes) -> Target:
    return make_target(sizes, kernels=FusedKernels())


@ALL_SIZES
def test_this_machine_computes_rows_alike(sizes: LlamaSizes) -> None:
    assert on_gpu(sizes).describe_equality().startswith("bit-equal")


@ALL_SIZES
@pytest.mark.parametrize("length", [61, 84])
def test_a_token_among_a_chain(length: int, sizes: LlamaSizes) -> None:
    target = on_gpu(sizes)
    assert not differing(passes_of(target), chain_cases(target, length, WIDTHS))


@ALL_SIZES
@pytest.mark.parametrize("kind", TREES)
def test_a_token_among_a_tree(sizes: LlamaSizes, kind: str) -> None:
    target = on_gpu(sizes)
    assert not differing(passes_of(target), [tree_case(target, kind, 84)])


@ALL_SIZES
@pytest.mark.parametrize("kind", ["chain", *TREES])
def test_a_token_that_rides_in_the_prefill(kind: str, sizes: LlamaSizes) -> None:
    target, parents = on_gpu(sizes), TREES.get(kind, CHAIN)
    cases = [rider_case(target, parents, length) for length in (59, 127, 300)]
    assert not differing(passes_of(target), cases)


@ALL_SIZES
@pytest.mark.parametrize("lengths", [[84] * 8, [59, 84, 130]])
def test_a_row_among_a_batch(lengths: list[int], sizes: LlamaSizes) -> None:
    target = on_gpu(sizes)
    case = batch_case(target, lengths, TREES["woven"])
    assert not differing(passes_of(target, len(lengths)), [case])


@pytest.mark.parametrize("count", [2, 8])
def test_a_frame_is_seen_alone_as_among_others(count: int) -> None:
    model = tiny_model().bfloat16().cuda()
    model.fuse(FusedKernels())
    assert not find_frame_differences(model, count)
