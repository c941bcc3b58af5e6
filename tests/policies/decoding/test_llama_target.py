"""The cached passes against their slow twin: the whole sequence recomputed for every token."""

import dataclasses
import random

import pytest
import torch

from deft_policies.decoding.autoregressive import AutoregressiveDecoder
from deft_policies.decoding.decoder import DraftModels, build_decoder
from deft_policies.decoding.knobs import find_method
from deft_policies.decoding.llama_target import LlamaTarget, Room
from deft_policies.decoding.records import StageClock
from deft_policies.decoding.target import Prompts
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.graphs import CapturedRunner
from deft_policies.model.layout import EagerRunner, StepRunner
from deft_policies.model.vla import OpenVLAModel
from tests.policies.decoding.scripts import Session, clock
from tests.recorder import RecordingCapturer
from tests.tiny_openvla import (
    CPU,
    one_row,
    plain_decode,
    plain_next_tokens,
    random_prompts,
    tiny_model,
)

TEXT_LENGTHS = [5, 9, 3]


def runners() -> list[StepRunner]:
    return [EagerRunner(), CapturedRunner(RecordingCapturer())]


def target_of(model: OpenVLAModel, runner: StepRunner | None = None) -> LlamaTarget:
    room = Room(new_tokens=8, nodes=16)
    return LlamaTarget(model.decoder, model.config.vocabulary.tokens, room=room, runner=runner)


def tokens_of(decoder: AutoregressiveDecoder, prompts: Prompts) -> list[list[int]]:
    return [list(trace.tokens) for trace in decoder.decode(prompts, 7, StageClock(CPU))]


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
    decoder = AutoregressiveDecoder(target_of(model, runner))
    traces = decoder.decode(prompts, 7, StageClock(CPU))
    expected = [plain_decode(model, one_row(prompts, row).embeds[0], 7) for row in range(3)]
    assert [list(trace.tokens) for trace in traces] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3
    assert [trace.num_passes for trace in traces] == [7, 7, 7]
    assert [trace.passes[-1].tokens for trace in traces] == [row.tokens[-2:-1] for row in traces]


@pytest.mark.parametrize("runner", runners())
def test_a_row_decodes_the_same_alone_and_in_a_batch(runner: StepRunner) -> None:
    model = tiny_model(seed=1)
    prompts = random_prompts(model, [4, 8, 8, 1])
    decoder = AutoregressiveDecoder(target_of(model, runner))
    together = tokens_of(decoder, prompts)
    for row in range(4):
        assert tokens_of(decoder, one_row(prompts, row)) == [together[row]]


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("keep_hidden", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_guesses_riding_in_the_prefill_are_scored_as_if_they_were_the_sequence(
    runner: StepRunner, keep_hidden: bool, seed: int
) -> None:
    model = tiny_model(seed)
    prompts = random_prompts(model, TEXT_LENGTHS, seed)
    tree = random_tree(prompts, 7, seed)
    target = target_of(model, runner)
    scores, features = target.prefill(dataclasses.replace(prompts, keep_hidden=keep_hidden), tree)
    for row in range(3):
        prompt = one_row(prompts, row).embeds[0]
        for node in range(7):
            guessed = tokens_on(tree, row, path_to(tree, row, node))
            expected = plain_next_tokens(model, prompt, guessed)[-1]
            assert int(scores.logits[row, node].argmax()) == expected
    assert features.hidden.shape[1] == (prompts.embeds.shape[1] if keep_hidden else 0)


def test_a_single_chain_in_the_prefill_needs_no_mask_and_scores_the_same() -> None:
    model = tiny_model()
    prompts = random_prompts(model, TEXT_LENGTHS)
    chain = dataclasses.replace(
        random_tree(prompts, 5, 0), parents=torch.arange(-1, 4).expand(3, -1)
    )
    causal, _ = target_of(model).prefill(prompts, chain)
    masked, _ = target_of(model, CapturedRunner(RecordingCapturer())).prefill(prompts, chain)
    torch.testing.assert_close(causal.logits, masked.logits, atol=1e-4, rtol=1e-4)


def test_prompt_hidden_states_are_those_of_the_plain_forward() -> None:
    model = tiny_model()
    prompts = random_prompts(model, TEXT_LENGTHS)
    _, features = target_of(model).prefill(prompts, random_tree(prompts, 4, 0))
    for row, length in enumerate(prompts.lengths.tolist()):
        plain = model.decoder(one_row(prompts, row).embeds)[0]
        torch.testing.assert_close(features.hidden[row, :length], plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("seed", range(6))
def test_rows_commit_paths_of_their_own_length_and_go_on_as_if_nothing_else_had_been_there(
    runner: StepRunner, seed: int
) -> None:
    """Four rounds: guesses in the prefill, then three trees; any path may be kept, in any row."""
    rng = random.Random(seed)
    model = tiny_model(seed)
    prompts = random_prompts(model, TEXT_LENGTHS, seed)
    target = target_of(model, runner)
    written: list[list[int]] = [[], [], []]
    for round_number, num_nodes in enumerate((6, 9, 4, 2)):
        tree = random_tree(prompts, num_nodes, 100 * seed + round_number)
        if round_number == 0:
            scores, _ = target.prefill(prompts, tree)
        else:
            scores = target.score(tree)
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
        padded = [[0, *path, *([-1] * (longest - len(path)))] for path in paths]
        target.commit(torch.tensor(padded), torch.tensor([len(path) + 1 for path in paths]))


def test_scoring_again_without_a_commit_forgets_the_first_tree() -> None:
    model = tiny_model()
    prompts = random_prompts(model, TEXT_LENGTHS)
    target = target_of(model)
    target.prefill(prompts, DraftTree.root_only(prompts.last_tokens))
    tree = random_tree(prompts, 5, 3)
    first = target.score(tree).logits
    target.score(random_tree(prompts, 9, 4))
    torch.testing.assert_close(target.score(tree).logits, first)


def test_a_longer_prompt_and_a_larger_batch_make_the_cache_grow_and_drop_old_recordings() -> None:
    model = tiny_model()
    capturer = RecordingCapturer()
    decoder = AutoregressiveDecoder(target_of(model, CapturedRunner(capturer)))
    small, large = random_prompts(model, [3]), random_prompts(model, [150, 2])
    before = tokens_of(decoder, small)
    assert capturer.num_captured == 2  # one prefill, one decode step
    expected = [plain_decode(model, one_row(large, row).embeds[0], 7) for row in range(2)]
    assert tokens_of(decoder, large) == expected
    assert capturer.num_captured == 4
    assert tokens_of(decoder, small) == before


def test_a_recording_made_for_one_prompt_length_serves_its_whole_bucket() -> None:
    model = tiny_model()
    capturer = RecordingCapturer()
    decoder = AutoregressiveDecoder(target_of(model, CapturedRunner(capturer)))
    for length in (3, 5, 9, 11):
        prompts = random_prompts(model, [length], seed=length)
        assert tokens_of(decoder, prompts) == [plain_decode(model, prompts.embeds[0], 7)]
    assert capturer.num_captured == 2


def test_batches_of_three_and_four_share_their_recordings() -> None:
    model = tiny_model()
    capturer = RecordingCapturer()
    runner = CapturedRunner(capturer)
    method, models = find_method("autoregressive"), DraftModels(runner=runner)
    decoder = build_decoder(target_of(model, runner), method, models)
    four, three = random_prompts(model, [3, 5, 9, 1]), random_prompts(model, [4, 8, 2], seed=1)
    decoder.decode(four, Session.of(4).rows, clock())
    num_captured = capturer.num_captured
    expected = [tuple(plain_decode(model, one_row(three, row).embeds[0], 7)) for row in range(3)]
    traces = decoder.decode(three, Session.of(3).rows, clock())
    assert [trace.tokens for trace in traces] == expected
    assert capturer.num_captured == num_captured


def test_the_head_over_action_rows_alone_equals_that_part_of_the_whole() -> None:
    model = tiny_model()
    actions = model.config.vocabulary.tokens
    whole = target_of(model)
    part = LlamaTarget(model.decoder, actions, action_rows_only=True)
    hidden = torch.randn(2, 3, model.config.llm.width)
    expected = whole.logits(hidden)[..., actions.first : actions.last + 1]
    torch.testing.assert_close(part.logits(hidden), expected)
    torch.testing.assert_close(whole.logits(hidden, actions), expected)
    assert part.vocabulary == actions
    prompts = random_prompts(model, TEXT_LENGTHS)
    decoded = tokens_of(AutoregressiveDecoder(part), prompts)
    assert all(actions.first <= token <= actions.last for row in decoded for token in row)


def test_what_inference_leaves_behind_does_not_disturb_training_or_recording() -> None:
    model = tiny_model()
    prompts = random_prompts(model, TEXT_LENGTHS)
    decoder = AutoregressiveDecoder(target_of(model))
    with torch.inference_mode():
        before = tokens_of(decoder, prompts)
    assert tokens_of(decoder, prompts) == before  # the same cache, outside of inference mode
    model.requires_grad_(True)
    model.decoder(prompts.embeds).sum().backward()
    assert model.decoder.layers[0].attention.qkv.weight.grad is not None
