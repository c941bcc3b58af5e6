"""The cached passes against their slow twin: the whole sequence recomputed for every token."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from deft_policies.decoding.methods import find_method
from deft_policies.decoding.target import PassRow, Prompt, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.vla import OpenVLAModel
from tests import tiny_target
from tests.fake_graphs import RecordingCapturer
from tests.policies.decoding.scripts import Decoding, Session
from tests.tiny_openvla import plain_decode, plain_next_tokens, random_prompts, tiny_model
from tests.tiny_target import ACTIONS, greedy, path_to, tiny_decoder

TEXT_LENGTHS = [5, 9, 3]
RUNNERS = {
    "packed": lambda: None,
    "fixed": lambda: StepRunner(None, Reserve(4, 5, 40)),
    "captured": lambda: StepRunner(RecordingCapturer().capture, Reserve(4, 5, 40)),
}


def target_of(model: OpenVLAModel, kind: str = "packed") -> Target:
    return Target(model.decoder, model.config.action_tokens, runner=RUNNERS[kind]())


def cache_of(target: Target) -> KVCache:
    cache = target.new_cache()
    target.set_aside(cache, 64, 64)
    return cache


def plain(target: Target) -> Decoding:
    return Decoding(target, find_method("autoregressive"))


def tokens_of(decoder: Decoding, prompts: Sequence[Prompt]) -> list[list[int]]:
    traces = decoder.decode(prompts, Session.of(len(prompts)))
    return [list(trace.tokens) for trace in traces]


def random_tree(root: int, num_nodes: int, rng: random.Random) -> DraftTree:
    parents = [-1, *(rng.randrange(n) for n in range(1, num_nodes))]
    return DraftTree(
        [root, *(rng.randrange(384) for _ in parents[1:])],
        parents,
        [""] * num_nodes,
        is_chain=parents == list(range(-1, num_nodes - 1)),
    )


def tokens_on(tree: DraftTree, node: int) -> list[int]:
    return [tree.tokens[one] for one in path_to(tree, node)[1:]]


def rows_of(
    prompts: Sequence[Prompt], trees: Sequence[DraftTree], keeps_hidden: bool = False
) -> list[PassRow]:
    """The prefills of prompts, in slots one after the other."""
    return [
        PassRow(slot, one.length - 1, tree, 7 + slot, prompt=one, keeps_hidden=keeps_hidden)
        for slot, (one, tree) in enumerate(zip(prompts, trees, strict=True))
    ]


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_decoding_through_the_cache_equals_recomputing_everything(
    kind: str, num_kv_heads: int
) -> None:
    model = tiny_model(num_kv_heads=num_kv_heads)
    prompts = random_prompts(model, TEXT_LENGTHS)
    traces = plain(target_of(model, kind)).decode(prompts, Session.of(3))
    expected = [plain_decode(model, prompt.embeds, 7) for prompt in prompts]
    assert [list(trace.tokens) for trace in traces] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3
    assert [trace.num_passes for trace in traces] == [7, 7, 7]
    assert [trace.passes[-1].tokens for trace in traces] == [row.tokens[-2:-1] for row in traces]


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_row_decodes_the_same_alone_and_in_a_batch(kind: str) -> None:
    model = tiny_model(seed=1)
    prompts = random_prompts(model, [4, 8, 8, 1])
    decoder = plain(target_of(model, kind))
    together = tokens_of(decoder, prompts)
    for row in range(4):
        assert tokens_of(decoder, [prompts[row]]) == [together[row]]


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("keeps_hidden", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_prefill_drafts_are_scored_as_the_sequence(
    kind: str, keeps_hidden: bool, seed: int
) -> None:
    model, rng = tiny_model(seed), random.Random(seed)
    prompts = random_prompts(model, TEXT_LENGTHS, seed)
    trees = [random_tree(prompt.last_token, 7, rng) for prompt in prompts]
    target = target_of(model, kind)
    rows = rows_of(prompts, trees, keeps_hidden)
    scores = target.forward(cache_of(target), rows)
    for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        logits = scores.logits[scores.nodes(index, tree)]
        for node in range(7):
            expected = plain_next_tokens(model, prompts[index].embeds, tokens_on(tree, node))[-1]
            assert int(logits[node].argmax()) == expected
            assert int(scores.best[scores.nodes(index, tree)][node]) == expected
        assert set(scores.for_host[scores.nodes(index, tree), 2].tolist()) == {row.number}
        assert (index in scores.prompts) == keeps_hidden


@pytest.mark.parametrize("kind", RUNNERS)
def test_prompt_hidden_states_are_those_of_the_plain_forward(kind: str) -> None:
    model, rng = tiny_model(), random.Random(0)
    prompts = random_prompts(model, TEXT_LENGTHS)
    target = target_of(model, kind)
    trees = [random_tree(prompt.last_token, 4, rng) for prompt in prompts]
    scores = target.forward(cache_of(target), rows_of(prompts, trees, keeps_hidden=True))
    for row, prompt in enumerate(prompts):
        expected = model.decoder(prompt.embeds[None])[0]
        torch.testing.assert_close(scores.prompts[row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("two_way", [1, 4, 7, 10])
def test_a_two_way_prefix_sees_itself_and_no_guess(kind: str, two_way: int) -> None:
    """Positions of the prefix see each other; what is behind it is causal."""
    model, rng = tiny_model(), random.Random(two_way)
    (one,) = random_prompts(model, [5])
    prompt = Prompt(one.embeds, one.last_token, one.patches, two_way)
    tree = random_tree(prompt.last_token, 6, rng)
    target = target_of(model, kind)
    cache = cache_of(target)
    scores = target.forward(cache, rows_of([prompt], [tree]))

    def expected(tokens: list[int]) -> int:
        words = model.decoder.embedding(torch.tensor(tokens, dtype=torch.int64))
        embeds = torch.cat((prompt.embeds, words))
        mask = torch.ones(len(embeds), len(embeds), dtype=torch.bool).tril()
        mask[:two_way, :two_way] = True
        hidden = model.decoder(embeds[None], mask[None, None])[0, -1]
        return int(model.decoder.head(hidden).argmax())

    for node in range(6):
        assert int(scores.best[node]) == expected(tokens_on(tree, node))
    later = PassRow(0, prompt.length, DraftTree.of_committed([17]), 1)
    assert int(target.forward(cache, [later]).best[0]) == expected([17])


@pytest.mark.parametrize("kind", RUNNERS)
def test_heads_of_256_may_share_one_key_and_value(kind: str) -> None:
    sizes = replace(tiny_decoder().sizes, num_kv_heads=1, head_dim=256)
    torch.manual_seed(0)
    decoder = LlamaDecoder(sizes).requires_grad_(False).eval()
    prompts = tiny_target.random_prompts(decoder, [3, 7])
    runner = RUNNERS[kind]()
    target = Target(decoder, ACTIONS, runner=runner)
    traces = plain(target).decode(prompts, Session.of(2))
    assert [trace.tokens for trace in traces] == greedy(decoder, prompts)


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("seed", range(6))
def test_rows_commit_paths_of_different_lengths(kind: str, seed: int) -> None:
    """Four rounds: guesses in the prefill, then three trees; any path may be kept, in any row."""
    rng, model = random.Random(seed), tiny_model(seed)
    prompts = random_prompts(model, TEXT_LENGTHS, seed)
    target = target_of(model, kind)
    cache = cache_of(target)
    written: list[list[int]] = [[], [], []]
    starts = [prompt.length - 1 for prompt in prompts]
    for number, num_nodes in enumerate((6, 9, 4, 2)):
        roots = [prompt.last_token if number == 0 else 11 for prompt in prompts]
        trees = [random_tree(root, num_nodes, rng) for root in roots]
        if number == 0:
            rows = rows_of(prompts, trees)
        else:
            rows = [PassRow(slot, starts[slot], trees[slot], 1) for slot in range(3)]
            written = [[*known, 11] for known in written]
        scores, moves = target.forward(cache, rows), []
        for slot, tree in enumerate(trees):
            found = scores.best[scores.nodes(slot, tree)].tolist()
            for node in range(num_nodes):
                guessed = written[slot] + tokens_on(tree, node)
                expected = plain_next_tokens(model, prompts[slot].embeds, guessed)[-1]
                assert found[node] == expected
            path = path_to(tree, rng.randrange(num_nodes))
            written[slot] += tokens_on(tree, path[-1])
            moves += [(slot, starts[slot] + n, starts[slot] + at) for at, n in enumerate(path)]
            starts[slot] += len(path)
        cache.keep(moves)


@pytest.mark.parametrize("kind", RUNNERS)
def test_scoring_again_without_a_commit_forgets_the_first_tree(kind: str) -> None:
    model, rng = tiny_model(), random.Random(3)
    prompts = random_prompts(model, TEXT_LENGTHS)
    target = target_of(model, kind)
    cache = cache_of(target)
    target.forward(cache, rows_of(prompts, [DraftTree.of_committed([0])] * 3))

    def score(trees: Sequence[DraftTree]) -> torch.Tensor:
        rows = [PassRow(n, prompts[n].length, tree, 1) for n, tree in enumerate(trees)]
        found = target.forward(cache, rows)
        return torch.cat([found.logits[found.nodes(n, t)] for n, t in enumerate(trees)]).clone()

    trees = [random_tree(5, 5, rng) for _ in range(3)]
    first = score(trees)
    score([random_tree(5, 9, rng) for _ in range(3)])
    torch.testing.assert_close(score(trees), first)


def test_rows_may_lie_in_any_slots_and_bring_trees_of_any_width() -> None:
    """As packed on a CPU: gaps between slots, and a root beside a tree beside a chain."""
    model, rng = tiny_model(), random.Random(1)
    prompts = random_prompts(model, TEXT_LENGTHS)
    target = target_of(model)
    cache, slots = cache_of(target), (4, 1, 7)
    for slot, prompt in zip(slots, prompts, strict=True):
        root = DraftTree.of_committed([prompt.last_token])
        target.forward(cache, [PassRow(slot, prompt.length - 1, root, 1, prompt=prompt)])
    trees = [random_tree(9, size, rng) for size in (1, 6, 3)]
    order = sorted(range(3), key=lambda one: slots[one])
    rows = [PassRow(slots[one], prompts[one].length, trees[one], 1) for one in order]
    scores = target.forward(cache, rows)
    for index, one in enumerate(order):
        found = scores.best[scores.nodes(index, trees[one])].tolist()
        for node in range(trees[one].num_nodes):
            guessed = [9, *tokens_on(trees[one], node)]
            assert found[node] == plain_next_tokens(model, prompts[one].embeds, guessed)[-1]


def test_a_longer_prompt_and_a_larger_batch_make_the_cache_grow() -> None:
    model = tiny_model()
    decoder = plain(target_of(model))
    small, large = random_prompts(model, [3]), random_prompts(model, [150, 2])
    before = tokens_of(decoder, small)
    expected = [plain_decode(model, prompt.embeds, 7) for prompt in large]
    assert tokens_of(decoder, large) == expected
    assert tokens_of(decoder, small) == before


def test_the_head_over_some_tokens_equals_that_part_of_the_whole() -> None:
    model = tiny_model()
    actions = model.config.action_tokens
    target, hidden = target_of(model), torch.randn(2, 3, model.config.llm.width)
    expected = target.logits(hidden)[..., actions.first : actions.last + 1]
    torch.testing.assert_close(target.logits(hidden, actions), expected)


def test_inference_leaves_nothing_that_disturbs_training() -> None:
    model = tiny_model()
    prompts = random_prompts(model, TEXT_LENGTHS)
    decoder = plain(target_of(model))
    with torch.inference_mode():
        before = tokens_of(decoder, prompts)
    assert tokens_of(decoder, prompts) == before  # the same cache, outside of inference mode
    model.requires_grad_(True)
    model.decoder(prompts[0].embeds[None]).sum().backward()
    assert model.decoder.layers[0].attention.qkv.weight.grad is not None
