"""In bfloat16 on a CPU a token has the same bits alone as among others, whatever it is among.

The slow twin is plain decoding: one row, one token a pass. Sizes are those of the small policies
that ship; every machine that runs the tests asks its own processor.
"""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

from deft_policies.decoding.target import Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.cpu_products import Rows, find_rows
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.sizes import LlamaSizes, TokenRange
from scripts.bit_equality import (
    CHAIN,
    SHARED_KEYS,
    SMALL,
    TREES,
    Case,
    Passes,
    batch_case,
    chain_cases,
    find_difference,
    find_frame_differences,
    find_plain_difference,
    make_target,
    prompts_of,
    rider_case,
    tokens_of,
    tree_case,
)
from tests.fake_graphs import RecordingCapturer
from tests.tiny_openvla import tiny_model

WIDTHS = (1, 2, 3, 4, 5, 7, 8, 16, 26, 50, 64)
LIKE = torch.empty(0, dtype=torch.bfloat16)
SIZES = pytest.mark.parametrize("sizes", [SMALL, SHARED_KEYS], ids=["own keys", "shared keys"])


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def passes_of(target: Target, num_rows: int = 1) -> Passes:
    return Passes(target, num_rows, longest=300)


def differing(passes: Passes, cases: Iterable[Case]) -> dict[str, str]:
    found = {one.name: find_difference(one, passes, passes) for one in cases}
    assert found
    return {name: where for name, where in found.items() if where}


@pytest.mark.usefixtures("threads")
@SIZES
@pytest.mark.parametrize("length", [61, 84])
def test_a_token_among_a_chain(length: int, sizes: LlamaSizes) -> None:
    target = make_target(sizes)
    assert not differing(passes_of(target), chain_cases(target, length, WIDTHS))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_a_token_among_a_chain_where_weights_are_quantised(quantization: Quantization) -> None:
    pytest.importorskip("torchao", reason="quantised weights need torchao")
    target = make_target(quantization=quantization)
    assert not differing(passes_of(target), chain_cases(target, 61, (2, 7, 12)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", TREES)
@SIZES
def test_a_token_among_a_tree(sizes: LlamaSizes, kind: str) -> None:
    target = make_target(sizes)
    assert not differing(passes_of(target), [tree_case(target, kind, 84)])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["chain", *TREES])
@pytest.mark.parametrize("keeps_hidden", [True, False])
def test_a_token_that_rides_in_the_prefill(kind: str, keeps_hidden: bool) -> None:
    target, parents = make_target(), TREES.get(kind, CHAIN)
    cases = [rider_case(target, parents, length, keeps_hidden) for length in (59, 82, 127)]
    assert not differing(passes_of(target), cases)


@pytest.mark.promise
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("lengths", [[84] * 8, [59, 84, 130], [84, 61]])
def test_a_row_among_a_batch(lengths: list[int]) -> None:
    target = make_target()
    cases = [batch_case(target, lengths, one) for one in (CHAIN[:8], TREES["woven"])]
    passes = passes_of(target, len(lengths))
    for case in cases:
        assert not find_difference(case, passes, passes)


def test_what_is_kept_of_a_tree_is_what_plain_decoding_leaves() -> None:
    """Passes after a tree read the keys and values of its path."""
    target = make_target()
    passes, case = passes_of(target), tree_case(target, "woven", 84)
    row, path = case.paths[-1]
    passes.run(case)
    start = case.prompts[row].length
    moves = [(0, start + node, start + at) for at, node in enumerate(path) if node != at]
    passes.cache.keep(moves)
    (after,) = tokens_of(target, 1, 3, seed=5)
    found = passes.verify(case.prompts, [DraftTree.of_committed(after)], len(path))
    tokens = [*case.plain_tokens(row, path), *after]
    along = passes_of(target).plain(case.prompts[row], tokens)
    assert torch.equal(found.logits[0], along.logits[-3:])
    assert torch.equal(found.hidden[0], along.hidden[-3:])


@pytest.mark.promise
@pytest.mark.parametrize("rides", [True, False])
def test_where_bits_first_differ_is_named(rides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that gives the fourth of several rows other bits, in one layer."""
    target = make_target()
    passes, twin = passes_of(target), passes_of(target)
    chain = next(chain_cases(target, 61, (6,)))
    case = rider_case(target, CHAIN[:6], 61) if rides else chain
    broken, row = target.passes._layers[1].gate_up, 60 + 3 if rides else 3
    plain = broken.apply

    def apply(rows: Tensor) -> Tensor:
        found = plain(rows)
        if len(rows) > (64 if rides else 4):
            found[row] *= 1.5
        return found

    assert find_difference(case, passes, twin) == ""
    monkeypatch.setattr(broken, "apply", apply)
    assert find_difference(case, passes, twin) == "layer 1, gate_up, row 0, node 3"
    assert broken.apply is apply


def test_plain_decoding_in_two_ways_is_compared_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, other = make_target(), make_target()
    (prompt,), tokens = prompts_of(target, [61]), [200, 300, 400]
    assert find_plain_difference(prompt, tokens, passes_of(target), passes_of(other)) == ""
    head, count = other.passes.head, 0
    plain = head.apply

    def apply(rows: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return plain(rows) * (2 if count % 4 == 3 else 1)  # of four passes the third

    monkeypatch.setattr(head, "apply", apply)
    where = find_plain_difference(prompt, tokens, passes_of(target), passes_of(other))
    assert where == "token 2: head, row 0, node 0"


def test_what_captured_passes_compute_is_compared_when_they_are_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay runs no Python of the operations that are noted."""

    def captured() -> Passes:
        runner = StepRunner(RecordingCapturer().capture, Reserve(rows=1, shortest=61, longest=61))
        decoder = make_target().decoder.float()
        target = Target(decoder, TokenRange(192, 447), runner=runner)
        return Passes(target, 1, longest=64, is_captured=True)

    passes, twin, tokens = captured(), captured(), [200, 300, 400]
    (prompt,) = prompts_of(twin.target, [61])
    assert find_plain_difference(prompt, tokens, passes, twin) == ""
    broken = (other := captured()).target.passes._layers[1].down
    plain = broken.add_to

    def add_to(residual: Tensor, rows: Tensor) -> Tensor | None:
        found = plain(residual, rows)
        residual *= 1.5 if len(rows) == 1 else 1.0
        return found

    monkeypatch.setattr(broken, "add_to", add_to)
    where = find_plain_difference(prompt, tokens, other, twin)
    assert where == "token 1: layer 1, down, row 0, node 0"


def test_where_few_rows_differ_products_get_more_and_at_last_blocks() -> None:
    """Machines of which each computes alike only what it is said to."""

    def machine(is_alike: Callable[[int], bool]) -> Callable[[Tensor], Tensor]:
        return lambda rows: rows * (1.0 if is_alike(len(rows)) else 1.0 + len(rows) / 8)

    for is_alike, expected in (
        (lambda num: num % 4 == 0, Rows(4)),
        (lambda num: num % 16 == 0, Rows(16)),
        (lambda num: num == 64, Rows(64, in_blocks=True)),
    ):
        assert find_rows([(8, 8, machine(is_alike))], LIKE) == expected
    never = machine(lambda num: False)
    products = [(8, 8, machine(lambda num: True)), (8, 24, noisy(never))]
    assert "8 to 24" in find_rows(products, LIKE).problem


def noisy(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda rows: product(rows) + torch.rand(1, generator=generator)


def test_in_blocks_every_product_has_as_many_rows() -> None:
    sizes: list[int] = []

    def product(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return 2 * rows

    blocks = Rows(64, in_blocks=True)
    given = torch.randn(130, 3)
    found = blocks.multiply(product, blocks.pad(given))
    assert torch.equal(found[:130], 2 * given)
    assert sizes == [64, 64, 64]


@pytest.mark.usefixtures("threads")
def test_this_machine_computes_rows_alike() -> None:
    assert make_target().describe_equality().startswith("bit-equal")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_frame_is_seen_alone_as_among_others(count: int) -> None:
    model = tiny_model().bfloat16()
    model.pack_vision()
    assert not find_frame_differences(model, count)


def test_the_actions_rows_of_the_head() -> None:
    target = make_target()
    hidden = torch.randn(1, 9, SMALL.width).bfloat16()
    every = target.logits(hidden, target.action_tokens)
    for token in range(9):
        one = target.logits(hidden[:, token : token + 1], target.action_tokens)
        assert torch.equal(one, every[:, token : token + 1])
