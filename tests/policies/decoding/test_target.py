"""The cached passes against their slow twin: the whole sequence recomputed for every token."""

import dataclasses
import random

import pytest
import torch

from deft_policies.decoding.methods import find_method
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.graphs import StepRunner
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.vla import OpenVLAModel
from tests.policies.decoding.scripts import Decoding, Session
from tests.recorder import RecordingCapturer
from tests.tiny_openvla import (
    one_row,
    plain_decode,
    plain_next_tokens,
    random_prompts,
    tiny_model,
)

TEXT_LENGTHS = [5, 9, 3]


def runners() -> list[StepRunner]:
    return [StepRunner(), StepRunner(RecordingCapturer().capture)]


def target_of(model: OpenVLAModel, runner: StepRunner | None = None) -> Target:
    return Target(model.decoder, model.config.action_tokens, runner=runner)


def rows_of(target: Target, prompts: Prompts) -> KVCache:
    """Memory with room for some trees behind the prompts."""
    rows = target.new_cache()
    rows.reserve(len(prompts.lengths), prompts.embeds.shape[1] + 64)
    return rows


def plain(target: Target) -> Decoding:
    return Decoding(target, find_method("autoregressive"))


def tokens_of(decoder: Decoding, prompts: Prompts) -> list[list[int]]:
    traces = decoder.decode(prompts, Session.of(len(prompts.lengths)))
    return [list(trace.tokens) for trace in traces]


def random_tree(prompts: Prompts, num_nodes: int, seed: int) -> DraftTree:
    rng = random.Random(seed)
    num_rows = len(prompts.lengths)
    tokens = [[rng.randrange(384) for _ in range(num_nodes)] for _ in range(num_rows)]
    parents = [[-1, *(rng.randrange(n) for n in range(1, num_nodes))] for _ in range(num_rows)]
    shape = (num_rows, num_nodes)
    return DraftTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        is_real=torch.ones(shape, dtype=torch.bool),
        log_probs=torch.zeros(shape),
        sources=torch.zeros(shape, dtype=torch.int64),
    )


def path_to(tree: DraftTree, row: int, node: int) -> list[int]:
    path = []
    while node > 0:
        path.append(node)
        node = int(tree.parents[row, node])
    return path[::-1]


def tokens_on(tree: DraftTree, row: int, path: list[int]) -> list[int]:
    return [int(tree.tokens[row, node]) for node in path]


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_decoding_through_the_cache_equals_recomputing_everything(
    runner: StepRunner, num_kv_heads: int
) -> None:
    model = tiny_model(num_kv_heads=num_kv_heads)
    prompts = random_prompts(model, TEXT_LENGTHS)
    traces = plain(target_of(model, runner)).decode(prompts, Session.of(3))
    expected = [plain_decode(model, one_row(prompts, row).embeds[0], 7) for row in range(3)]
    assert [list(trace.tokens) for trace in traces] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3
    assert [trace.num_passes for trace in traces] == [7, 7, 7]
    assert [trace.passes[-1].tokens for trace in traces] == [row.tokens[-2:-1] for row in traces]


@pytest.mark.parametrize("runner", runners())
def test_a_row_decodes_the_same_alone_and_in_a_batch(runner: StepRunner) -> None:
    model = tiny_model(seed=1)
    prompts = random_prompts(model, [4, 8, 8, 1])
    decoder = plain(target_of(model, runner))
    together = tokens_of(decoder, prompts)
    for row in range(4):
        assert tokens_of(decoder, one_row(prompts, row)) == [together[row]]


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("keep_hidden", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_prefill_drafts_are_scored_as_the_sequence(
    runner: StepRunner, keep_hidden: bool, seed: int
) -> None:
    model = tiny_model(seed)
    prompts = random_prompts(model, TEXT_LENGTHS, seed)
    tree = random_tree(prompts, 7, seed)
    target = target_of(model, runner)
    prompts = dataclasses.replace(prompts, keep_hidden=keep_hidden)
    scores, hidden = target.prefill(rows_of(target, prompts), 0, prompts, tree)
    for row in range(3):
        prompt = one_row(prompts, row).embeds[0]
        for node in range(7):
            guessed = tokens_on(tree, row, path_to(tree, row, node))
            expected = plain_next_tokens(model, prompt, guessed)[-1]
            assert int(scores.logits[row, node].argmax()) == expected
    assert hidden.shape[1] == (prompts.embeds.shape[1] if keep_hidden else 0)


def test_a_single_chain_in_the_prefill_needs_no_mask_and_scores_the_same() -> None:
    model = tiny_model()
    prompts = random_prompts(model, TEXT_LENGTHS)
    chain = dataclasses.replace(
        random_tree(prompts, 5, 0), parents=torch.arange(-1, 4).expand(3, -1)
    )
    targets = target_of(model), target_of(model, StepRunner(RecordingCapturer().capture))
    causal, masked = (one.prefill(rows_of(one, prompts), 0, prompts, chain)[0] for one in targets)
    torch.testing.assert_close(causal.logits, masked.logits, atol=1e-4, rtol=1e-4)


def test_prompt_hidden_states_are_those_of_the_plain_forward() -> None:
    model = tiny_model()
    prompts = random_prompts(model, TEXT_LENGTHS)
    target = target_of(model)
    tree = random_tree(prompts, 4, 0)
    _, hidden = target.prefill(rows_of(target, prompts), 0, prompts, tree)
    for row, length in enumerate(prompts.lengths.tolist()):
        plain = model.decoder(one_row(prompts, row).embeds)[0]
        torch.testing.assert_close(hidden[row, :length], plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("seed", range(6))
def test_rows_commit_paths_of_different_lengths(runner: StepRunner, seed: int) -> None:
    """Four rounds: guesses in the prefill, then three trees; any path may be kept, in any row."""
    rng = random.Random(seed)
    model = tiny_model(seed)
    prompts = random_prompts(model, TEXT_LENGTHS, seed)
    target = target_of(model, runner)
    rows = rows_of(target, prompts)
    written: list[list[int]] = [[], [], []]
    for round_number, num_nodes in enumerate((6, 9, 4, 2)):
        tree = random_tree(prompts, num_nodes, 100 * seed + round_number)
        if round_number == 0:
            scores, _ = target.prefill(rows, 0, prompts, tree)
        else:
            scores = target.score(rows, tree)
            for row in range(3):
                written[row].append(int(tree.tokens[row, 0]))
        paths = [path_to(tree, row, rng.randrange(num_nodes)) for row in range(3)]
        for row, path in enumerate(paths):
            prompt = one_row(prompts, row).embeds[0]
            for node in range(num_nodes):
                guessed = written[row] + tokens_on(tree, row, path_to(tree, row, node))
                expected = plain_next_tokens(model, prompt, guessed)[-1]
                assert int(scores.logits[row, node].argmax()) == expected
            written[row] += tokens_on(tree, row, path)
        longest = max(len(path) for path in paths)
        padded = [[0, *path, *([0] * (longest - len(path)))] for path in paths]
        kept = torch.tensor([len(path) + 1 for path in paths])
        rows.keep(torch.tensor(padded), kept, in_place=False)


def test_scoring_again_without_a_commit_forgets_the_first_tree() -> None:
    model = tiny_model()
    prompts = random_prompts(model, TEXT_LENGTHS)
    target = target_of(model)
    rows = rows_of(target, prompts)
    target.prefill(rows, 0, prompts, DraftTree.root_only(prompts.last_tokens))
    tree = random_tree(prompts, 5, 3)
    first = target.score(rows, tree).logits
    target.score(rows, random_tree(prompts, 9, 4))
    torch.testing.assert_close(target.score(rows, tree).logits, first)


def test_a_longer_prompt_and_a_larger_batch_make_the_cache_grow() -> None:
    model = tiny_model()
    decoder = plain(target_of(model))
    small, large = random_prompts(model, [3]), random_prompts(model, [150, 2])
    before = tokens_of(decoder, small)
    expected = [plain_decode(model, one_row(large, row).embeds[0], 7) for row in range(2)]
    assert tokens_of(decoder, large) == expected
    assert tokens_of(decoder, small) == before


def test_the_head_over_action_rows_alone_equals_that_part_of_the_whole() -> None:
    model = tiny_model()
    actions = model.config.action_tokens
    whole = target_of(model)
    part = Target(model.decoder, actions, action_rows_only=True)
    hidden = torch.randn(2, 3, model.config.llm.width)
    expected = whole.logits(hidden)[..., actions.first : actions.last + 1]
    torch.testing.assert_close(part.logits(hidden), expected)
    torch.testing.assert_close(whole.logits(hidden, actions), expected)
    assert part.vocabulary == actions
    prompts = random_prompts(model, TEXT_LENGTHS)
    decoded = tokens_of(plain(part), prompts)
    assert all(actions.first <= token <= actions.last for row in decoded for token in row)


def test_inference_leaves_nothing_that_disturbs_training() -> None:
    model = tiny_model()
    prompts = random_prompts(model, TEXT_LENGTHS)
    decoder = plain(target_of(model))
    with torch.inference_mode():
        before = tokens_of(decoder, prompts)
    assert tokens_of(decoder, prompts) == before  # the same cache, outside of inference mode
    model.requires_grad_(True)
    model.decoder(prompts.embeds).sum().backward()
    assert model.decoder.layers[0].attention.qkv.weight.grad is not None
