"""In bfloat16 on a CPU a token has the same bits alone as among others, whatever it is among.

The slow twin is plain decoding: one row, one token a pass. Sizes are those of the small policies
that ship; every machine that runs the tests asks its own processor.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from deft_policies.decoding.target import Prompts, Scores, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.cpu_products import Rows, find_rows
from deft_policies.model.formats import Quantization
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.quantization import quantize_linears
from deft_policies.model.sizes import LlamaSizes, TokenRange
from tests.tiny_openvla import tiny_model

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels

SIZES = LlamaSizes(
    vocabulary=448,
    width=192,
    mlp_width=512,
    num_layers=3,
    num_heads=6,
    num_kv_heads=6,
    head_dim=32,
    max_positions=512,
)
LIKE = torch.empty(0, dtype=torch.bfloat16)
WITH_SHARED_KEYS = replace(SIZES, num_kv_heads=2)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def make_target(
    sizes: LlamaSizes = SIZES,
    seed: int = 0,
    quantization: Quantization = Quantization.NONE,
    kernels: "FusedKernels | None" = None,
) -> Target:
    """With fused kernels on a GPU."""
    decoder = LlamaDecoder(sizes).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.08, generator=generator)
    decoder.bfloat16().eval()
    for layer in decoder.layers:
        quantize_linears(layer, quantization, torch.device("cpu"))
    if kernels is not None:
        decoder.cuda().kernels = kernels
    return Target(decoder, TokenRange(192, 447))


def prompts_of(target: Target, lengths: list[int], seed: int = 1) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths), target.decoder.sizes.width)
    tokens = torch.randint(0, 192, (len(lengths),), generator=generator)
    embeds = torch.randn(shape, generator=generator).bfloat16()
    given = (embeds, torch.tensor(lengths), tokens)
    return Prompts(*(one.to(target.device) for one in given), slice(1, 5))


def row_of(prompts: Prompts, row: int) -> Prompts:
    length = int(prompts.lengths[row])
    return Prompts(
        prompts.embeds[row : row + 1, :length],
        prompts.lengths[row : row + 1],
        prompts.last_tokens[row : row + 1],
        prompts.patches,
    )


def tokens_of(num_rows: int, num_tokens: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(192, 448, (num_rows, num_tokens), generator=generator)


def alone(target: Target, prompts: Prompts, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and hidden states [token] of plain decoding along these tokens, the prompt's first."""
    cache = target.new_cache()
    cache.reserve(1, prompts.embeds.shape[1] + len(tokens) + 1)
    path, given = torch.zeros(1, 1, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64)
    path, given = path.to(target.device), given.to(target.device)
    scores, _ = target.prefill(cache, 0, prompts, DraftTree.root_only(prompts.last_tokens))
    found = [scores]
    for token in given[:, None]:
        cache.keep(path, 1, in_place=True)
        found.append(target.score(cache, DraftTree.root_only(token)))
    logits = torch.cat([one.logits[0] for one in found])
    return logits, torch.cat([one.hidden[0] for one in found])


def prefilled(target: Target, prompts: Prompts, room: int) -> KVCache:
    cache = target.new_cache()
    cache.reserve(len(prompts.lengths), prompts.embeds.shape[1] + room)
    target.prefill(cache, 0, prompts, DraftTree.root_only(prompts.last_tokens))
    path = torch.zeros(len(prompts.lengths), 1, dtype=torch.int64, device=target.device)
    cache.keep(path, 1, in_place=True)
    return cache


def check(scores: Scores, row: int, nodes: list[int], expected: tuple[Tensor, Tensor]) -> None:
    """The nodes' logits and hidden states are the first of these, bit by bit."""
    logits, hidden = expected
    assert torch.equal(scores.hidden[row, nodes], hidden[: len(nodes)])
    assert torch.equal(scores.logits[row, nodes], logits[: len(nodes)])


def paths_of(parents: list[int]) -> list[list[int]]:
    """The nodes from the root to every node."""
    paths: list[list[int]] = [[0]]
    for node, parent in enumerate(parents[1:], 1):
        paths.append([*paths[parent], node])
    return paths


def tree_of(tokens: Tensor, parents: list[int]) -> DraftTree:
    given = torch.tensor(parents, device=tokens.device).expand(len(tokens), -1)
    return replace(DraftTree.chain(tokens), parents=given, is_chain=False)


CHAIN = list(range(-1, 44))
# The best path first, then branches; every second node another branch; all guesses side by side.
TREES = {
    "comb": [-1, 0, 1, 2, 0, 1, 2, 4],
    "woven": [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    "star": [-1, *[0] * 12],
}


def check_chains(target: Target, length: int) -> None:
    prompts, tokens = prompts_of(target, [length]), tokens_of(1, 64).to(target.device)
    logits, hidden = alone(target, prompts, tokens[0].tolist())
    for width in (1, 2, 3, 4, 5, 7, 8, 16, 26, 50, 64):
        scores = target.score(prefilled(target, prompts, 64), DraftTree.chain(tokens[:, :width]))
        check(scores, 0, list(range(width)), (logits[1:], hidden[1:]))


def check_tree(target: Target, parents: list[int]) -> None:
    prompts, tokens = prompts_of(target, [84]), tokens_of(1, len(parents)).to(target.device)
    scores = target.score(prefilled(target, prompts, 64), tree_of(tokens, parents))
    for path in paths_of(parents):
        logits, hidden = alone(target, prompts, tokens[0, path].tolist())
        check(scores, 0, path, (logits[1:], hidden[1:]))


def check_prefill(target: Target, parents: list[int], length: int, keeps_hidden: bool) -> None:
    """Along the paths to the leaves."""
    prompts = replace(prompts_of(target, [length]), keep_hidden=keeps_hidden)
    tokens = tokens_of(1, len(parents)).to(target.device)
    tokens[0, 0] = prompts.last_tokens[0]
    cache = target.new_cache()
    cache.reserve(1, length + 64)
    scores, _ = target.prefill(cache, 0, prompts, tree_of(tokens, parents))
    for path in [path for node, path in enumerate(paths_of(parents)) if node not in parents]:
        check(scores, 0, path, alone(target, prompts, tokens[0, path[1:]].tolist()))


def check_batch(target: Target, lengths: list[int], parents: list[int]) -> None:
    prompts = prompts_of(target, lengths)
    tokens = tokens_of(len(lengths), len(parents)).to(target.device)
    scores = target.score(prefilled(target, prompts, 64), tree_of(tokens, parents))
    path = paths_of(parents)[-1]
    for row in range(len(lengths)):
        logits, hidden = alone(target, row_of(prompts, row), tokens[row, path].tolist())
        check(scores, row, path, (logits[1:], hidden[1:]))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("sizes", [SIZES, WITH_SHARED_KEYS], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("length", [61, 84])
def test_a_token_among_a_chain(length: int, sizes: LlamaSizes) -> None:
    check_chains(make_target(sizes), length)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_a_token_among_a_chain_where_weights_are_quantised(quantization: Quantization) -> None:
    pytest.importorskip("torchao", reason="quantised weights need torchao")
    target = make_target(quantization=quantization)
    prompts, tokens = prompts_of(target, [61]), tokens_of(1, 12)
    logits, hidden = alone(target, prompts, tokens[0].tolist())
    for width in (2, 7, 12):
        scores = target.score(prefilled(target, prompts, 64), DraftTree.chain(tokens[:, :width]))
        check(scores, 0, list(range(width)), (logits[1:], hidden[1:]))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("sizes", [SIZES, WITH_SHARED_KEYS], ids=["own keys", "shared keys"])
def test_a_token_among_a_tree(sizes: LlamaSizes, kind: str) -> None:
    check_tree(make_target(sizes), TREES[kind])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["chain", *TREES])
@pytest.mark.parametrize("keeps_hidden", [True, False])
def test_a_token_that_rides_in_the_prefill(kind: str, keeps_hidden: bool) -> None:
    target = make_target()
    for length in (59, 82, 127):
        check_prefill(target, TREES.get(kind, CHAIN), length, keeps_hidden)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("lengths", [[84] * 8, [59, 84, 130], [84, 61]])
def test_a_row_among_a_batch(lengths: list[int]) -> None:
    target = make_target()
    for parents in (list(range(-1, 7)), TREES["woven"]):
        check_batch(target, lengths, parents)


def test_what_is_kept_of_a_tree_is_what_plain_decoding_leaves() -> None:
    """Passes after a tree read the keys and values of its path."""
    target, parents = make_target(), TREES["woven"]
    prompts = prompts_of(target, [84])
    tokens = tokens_of(1, len(parents))
    cache = prefilled(target, prompts, 64)
    target.score(cache, tree_of(tokens, parents))
    path = paths_of(parents)[-1]
    cache.keep(torch.tensor([path]), len(path), in_place=False)
    after = tokens_of(1, 3, seed=5)
    scores = target.score(cache, DraftTree.chain(after))
    logits, hidden = alone(target, prompts, [*tokens[0, path].tolist(), *after[0].tolist()])
    first = 1 + len(path)
    check(scores, 0, [0, 1, 2], (logits[first:], hidden[first:]))


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
    size = model.config.image.size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3 * len(model.towers), size, size, generator=generator).bfloat16()
    among = model.look(pixels)
    for row in range(count):
        alone = model.look(pixels[row : row + 1])
        assert torch.equal(alone[0], among[row])
        assert torch.equal(model.projector(alone)[0], model.projector(among)[row])


def test_the_actions_rows_of_the_head() -> None:
    target = make_target()
    hidden = torch.randn(1, 9, SIZES.width).bfloat16()
    every = target.logits(hidden, target.action_tokens)
    for token in range(9):
        one = target.logits(hidden[:, token : token + 1], target.action_tokens)
        assert torch.equal(one, every[:, token : token + 1])
