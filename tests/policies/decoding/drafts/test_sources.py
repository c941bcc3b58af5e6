"""Draft sources without a trained head: what each of them says, in cases worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deft_policies.decoding.drafts.guessers import (
    Extrapolation,
    NgramLookup,
    PreviousAction,
    Recycled,
    Retrieval,
    RetrievalIndex,
    build_index,
    frame_keys,
    line_weights,
    load_index,
    save_index,
)
from deft_policies.decoding.drafts.medusa import (
    MedusaDrafts,
    MedusaHeads,
    MedusaSizes,
    is_medusa,
    load_medusa,
    save_medusa,
)
from deft_policies.decoding.drafts.sources import Guesser
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.plan import TreeShape, TreeTemplate
from deft_policies.decoding.records import BatchProgress, PassResult
from deft_policies.decoding.tree import DraftTree, TokenRange
from deft_policies.decoding.verify import AcceptedPath
from deft_policies.errors import CheckpointError
from tests.tiny_target import (
    ACTIONS,
    CPU,
    WIDTH,
    TinyTarget,
    greedy,
    random_prompts,
    tiny_decoder,
)

PROMPTS = random_prompts(tiny_decoder(), [3])


def history_of(*actions: tuple[int, ...]) -> ActionHistory:
    history = ActionHistory()
    for action in actions:
        history.append(action, action, leak=1.0)
    return history


def ask(
    guesser: Guesser, histories: list[ActionHistory], committed: list[list[int]], length: int
) -> list[list[list[int]]]:
    """Guesses as lists, cut at the first unknown position: [row][chain][position]."""
    tensors = HistoryTensors.of(histories, length, max(guesser.steps_needed, 1), CPU)
    tokens = torch.zeros(len(histories), length + 1, dtype=torch.int64)
    for row, given in enumerate(committed):
        tokens[row, : len(given)] = torch.tensor(given, dtype=torch.int64)
    counts = [len(given) for given in committed]
    progress = BatchProgress(
        tokens, torch.tensor(counts), torch.zeros(len(counts)), min(counts), length, None
    )
    guesses = guesser.guess(PROMPTS, tensors, progress)
    known = guesses.is_known.long().cummin(dim=2).values.sum(dim=2).tolist()
    return [
        [chain[:count] for chain, count in zip(row, counts, strict=True)]
        for row, counts in zip(guesses.tokens.tolist(), known, strict=True)
    ]


def test_the_previous_action_is_the_targets_own_not_the_executed_one() -> None:
    history = ActionHistory()
    history.append(executed=(40, 41, 42), own=(30, 31, 32), leak=1.0)
    assert ask(PreviousAction(), [history, ActionHistory()], [[], []], 3) == [[[30, 31, 32]], [[]]]
    assert PreviousAction().can_guess(PROMPTS, [ActionHistory(), history])
    assert not PreviousAction().can_guess(PROMPTS, [ActionHistory()])


def test_extrapolation_continues_the_line_inside_the_vocabulary() -> None:
    two = Extrapolation(TokenRange(20, 60))
    history = history_of((30, 50, 59, 5), (32, 47, 60, 7))
    assert ask(two, [history], [[]], 4) == [[[34, 44, 60, 7]]]  # 7 is no bin: repeated
    assert ask(two, [history_of((30, 30))], [[]], 2) == [[[]]]
    three = Extrapolation(TokenRange(0, 99), num_steps=3)
    assert ask(three, [history_of((10,), (20,), (30,))], [[]], 1) == [[[40]]]
    assert not three.can_guess(PROMPTS, [history_of((10,), (20,))])


@pytest.mark.parametrize("num_steps", [2, 3, 5])
def test_line_weights_reproduce_any_line(num_steps: int) -> None:
    values = torch.tensor([3.0 + 2.0 * step for step in range(num_steps + 1)])
    ahead = (line_weights(num_steps, CPU) * values[:-1]).sum()
    assert float(ahead) == pytest.approx(float(values[-1]), abs=1e-5)


def test_ngram_lookup_repeats_what_followed_the_same_tokens_at_the_same_phase() -> None:
    history = history_of((1, 2, 3, 4), (5, 2, 6, 7), (1, 2, 8, 9))
    lookup = NgramLookup(longest=3, steps_kept=4)
    # After (1, 2) the newest action that began so went on with 8, 9.
    assert ask(lookup, [history], [[1, 2]], 4) == [[[1, 2, 8, 9]]]
    # After (5,) only the second action began so.
    assert ask(lookup, [history], [[5]], 4) == [[[5, 2, 6, 7]]]
    # Before anything is committed the end of the last action is what is looked up: 2, 3, 4.
    again = history_of((1, 2, 3, 4), (5, 6, 3, 4), (7, 7, 7, 7), (1, 2, 3, 4))
    assert ask(lookup, [again], [[]], 4) == [[[5, 6, 3, 4]]]
    # A token seen only at another position is no match.
    assert ask(lookup, [history], [[2]], 4) == [[[]]]


def test_a_longer_ngram_wins_over_a_newer_one() -> None:
    lookup = NgramLookup(longest=3, steps_kept=4)
    history = history_of((1, 2, 3, 0), (9, 9, 3, 5), (0, 0, 0, 0))
    assert ask(lookup, [history], [[1, 2, 3]], 4) == [[[1, 2, 3, 0]]]


def test_recycling_reads_the_answers_behind_the_first_mismatch() -> None:
    """Drafts 11, 12, 13 in the prefill; the target says 11, then 22: the rest was predicted too."""
    tree = DraftTree(
        tokens=torch.tensor([[0, 11, 12, 13]]),
        parents=torch.tensor([[-1, 0, 1, 2]]),
        is_real=torch.ones(1, 4, dtype=torch.bool),
        log_probs=torch.zeros(1, 4),
        sources=torch.zeros(1, 4, dtype=torch.int64),
    )
    predictions = torch.tensor([[11, 22, 23, 24]])
    verdict = AcceptedPath(
        torch.tensor([[0, 1, 0, 0]]), torch.tensor([1]), torch.tensor([22]), predictions
    )
    hidden = torch.zeros(1, 4, 1)
    zero = torch.tensor([0])
    last = PassResult(tree, predictions, verdict, predictions, hidden, zero, True)
    progress = BatchProgress(
        torch.zeros(1, 8, dtype=torch.int64), torch.tensor([2]), torch.tensor([22]), 2, 7, last
    )
    guesses = Recycled().guess(PROMPTS, HistoryTensors.of([ActionHistory()], 7, 0, CPU), progress)
    assert guesses.tokens[0, 0, 2:4].tolist() == [23, 24]
    assert guesses.is_known[0, 0].tolist() == [False, True, True, True, False, False, False]


# Retrieval.


def index_of(num_frames: int) -> tuple[RetrievalIndex, list[Tensor]]:
    decoder = tiny_decoder()
    frames = [random_prompts(decoder, [3, 5], seed) for seed in range(num_frames)]
    keys = [frame_keys(prompts) for prompts in frames]
    entries = [
        (key, torch.tensor(greedy(decoder, one))) for key, one in zip(keys, frames, strict=True)
    ]
    return build_index(entries, "tiny"), keys


def test_the_nearest_stored_frame_is_found_among_all() -> None:
    index, keys = index_of(6)
    for number, key in enumerate(keys):
        noisy = key + 0.01 * torch.randn(key.shape, generator=torch.Generator().manual_seed(1))
        found = index.nearest(noisy, 1)[:, 0]
        assert torch.equal(found, index.actions[2 * number : 2 * number + 2])


def test_neighbours_come_nearest_first() -> None:
    keys = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    index = RetrievalIndex(keys, torch.tensor([[1], [2], [3]]), "x")
    assert index.nearest(torch.tensor([[0.9, 0.1]]), 3).tolist() == [[[1], [2], [3]]]
    assert index.nearest(torch.tensor([[0.0, 1.0]]), 9).tolist() == [[[3], [2], [1]]]


def test_the_same_scene_under_another_instruction_has_another_key() -> None:
    embeds = PROMPTS.embeds.clone()
    embeds[:, -1] += 3.0
    other = replace(PROMPTS, embeds=embeds)
    assert float((frame_keys(PROMPTS) * frame_keys(other)).sum()) < 0.99
    padded = replace(PROMPTS, embeds=torch.cat((PROMPTS.embeds, torch.randn(1, 4, WIDTH)), dim=1))
    torch.testing.assert_close(frame_keys(padded), frame_keys(PROMPTS))


def test_an_index_survives_its_file(tmp_path: Path) -> None:
    index, _ = index_of(3)
    save_index(index, tmp_path / "index.safetensors")
    loaded = load_index(tmp_path / "index.safetensors", "tiny", CPU)
    assert torch.equal(loaded.keys, index.keys.float())
    assert torch.equal(loaded.actions, index.actions)
    with pytest.raises(CheckpointError, match="built with model 'tiny'"):
        load_index(tmp_path / "index.safetensors", "another", CPU)


def test_a_file_that_is_no_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="cannot be read as a retrieval index"):
        load_index(path, "tiny", CPU)
    save_medusa(MedusaHeads(MedusaSizes(4, 2)), tmp_path)
    with pytest.raises(CheckpointError, match="is not a retrieval index"):
        load_index(tmp_path / "model.safetensors", "tiny", CPU)


def test_an_index_needs_entries_that_fit_together() -> None:
    with pytest.raises(ValueError, match="nothing to index"):
        build_index([], "tiny")
    with pytest.raises(ValueError, match="2 frames come with 1 actions"):
        build_index([(torch.zeros(2, 3), torch.zeros(1, 7))], "tiny")


def test_a_frame_without_features_cannot_be_looked_up() -> None:
    index, _ = index_of(2)
    blind = replace(PROMPTS, features=None)
    assert not Retrieval(index).can_guess(blind, [])
    with pytest.raises(ValueError, match="visual features"):
        frame_keys(blind)


# Medusa heads and smaller models.


def test_medusa_trees_take_the_odds_of_each_level_from_one_hidden_state() -> None:
    target = TinyTarget(tiny_decoder())
    heads = MedusaHeads(MedusaSizes(WIDTH, 4)).requires_grad_(False)
    heads.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(1, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    steps = torch.tensor([[0, 1]])
    verdict = AcceptedPath(steps, torch.tensor([1]), torch.tensor([40]), steps)
    tree = DraftTree(steps, steps - 1, steps >= 0, steps.float(), steps)
    last = PassResult(tree, steps, verdict, steps, hidden, torch.tensor([1]))
    blank = torch.zeros(1, 8, dtype=torch.int64)
    progress = BatchProgress(blank, torch.tensor([3]), torch.tensor([40]), 3, 7, last)
    drafted = MedusaDrafts(heads, target).grow(progress, TreeShape(5, 2, 14))
    odds = target.logits(heads(hidden[:, 1]), ACTIONS).log_softmax(dim=-1)[0]
    shape = TreeShape.of_template(TreeTemplate(((0,), (2,), (0, 1), (2, 0), (2, 0, 3))))
    fixed = MedusaDrafts(heads, target).grow(progress, shape)
    ranked = odds.argsort(dim=1, descending=True) + ACTIONS.first
    places = [(0, 0), (0, 2), (1, 1), (1, 0), (2, 3)]
    assert fixed.tokens[0, 1:].tolist() == [int(ranked[place]) for place in places]
    assert fixed.parents[0].tolist() == [-1, 0, 0, 1, 2, 4]
    assert int(drafted.depths().max()) == 3  # what is missing but the last
    best = odds.argmax(dim=1) + ACTIONS.first
    chain = [int(drafted.tokens[0, node]) for node in _likeliest_path(drafted)]
    assert chain == best[:3].tolist()


def _likeliest_path(tree: DraftTree) -> list[int]:
    """Nodes of the deepest level's best path, from the root's child downwards."""
    deepest = tree.depths()[0] == tree.depths().max()
    node = int(tree.log_probs[0].masked_fill(~deepest, -1e9).argmax())
    path = []
    while node > 0:
        path.append(node)
        node = int(tree.parents[0, node])
    return path[::-1]


def test_new_medusa_heads_say_what_the_target_says() -> None:
    heads, hidden = MedusaHeads(MedusaSizes(8, 3)), torch.randn(2, 8)
    assert torch.equal(heads(hidden), hidden[:, None].expand(-1, 3, -1))


def test_medusa_heads_survive_their_files(tmp_path: Path) -> None:
    heads = MedusaHeads(MedusaSizes(8, 3))
    with torch.no_grad():
        heads.weight.normal_()
    save_medusa(heads, tmp_path)
    assert is_medusa(tmp_path)
    loaded = load_medusa(tmp_path, 8, torch.zeros(1))
    assert torch.equal(loaded.weight, heads.weight)
    with pytest.raises(CheckpointError, match="8 wide, but the target is 16"):
        load_medusa(tmp_path, 16, torch.zeros(1))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_medusa(tmp_path, 8, torch.zeros(1))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="does not describe Medusa heads"):
        load_medusa(tmp_path, 8, torch.zeros(1))
