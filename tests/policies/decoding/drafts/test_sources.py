"""Draft sources without a trained head: what each of them says, in cases worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deft_policies.checkpoint.drafts import (
    is_medusa,
    load_index,
    load_medusa,
    save_index,
    save_medusa,
)
from deft_policies.decoding.drafts import Chains, DraftSource
from deft_policies.decoding.drafts.heads import MedusaDrafts
from deft_policies.decoding.drafts.retrieval import (
    Retrieval,
    RetrievalIndex,
    build_index,
    frame_keys,
)
from deft_policies.decoding.drafts.session import (
    Extrapolation,
    JacobiDrafts,
    NgramLookup,
    PreviousAction,
)
from deft_policies.decoding.engine import DraftModels
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.plan import TreeShape
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import CheckpointError
from deft_policies.memory import SessionMemory
from deft_policies.model.draft_heads import MedusaHeads
from deft_policies.model.sizes import TokenRange
from tests.policies.decoding.scripts import Decoding, Session, batch_of, limits_of, pass_of
from tests.tiny_target import (
    ACTIONS,
    CPU,
    LENGTH,
    WIDTH,
    TinyTarget,
    fast_target,
    greedy,
    random_prompts,
    tiny_decoder,
)

PROMPTS = random_prompts(tiny_decoder(), [3])


def memory_of(*actions: tuple[int, ...]) -> SessionMemory:
    return SessionMemory(own=actions)


def ask(
    source: DraftSource, memories: list[SessionMemory], committed: list[list[int]], length: int
) -> list[list[list[int]]]:
    """Guesses behind what is committed, cut at the first unknown: [row][chain][step]."""
    batch = batch_of(memories, committed, length)
    guesses = source.draft(batch, limits_of(batch))
    assert isinstance(guesses, Chains)
    known = guesses.is_known.long().cummin(dim=2).values.sum(dim=2).tolist()
    return [
        [chain[:count] for chain, count in zip(row, counts, strict=True)]
        for row, counts in zip(guesses.tokens.tolist(), known, strict=True)
    ]


def test_the_previous_action_is_the_targets_own_not_the_executed_one() -> None:
    """An action's last token is never guessed, so those here have one more."""
    memory = SessionMemory(own=((30, 31, 32, 0),))
    assert ask(PreviousAction(), [memory, SessionMemory()], [[], []], 4) == [[[30, 31, 32]], [[]]]
    assert PreviousAction.least_steps == 1


def test_extrapolation_continues_the_line_inside_the_vocabulary() -> None:
    two = Extrapolation(TokenRange(20, 60))
    memory = memory_of((30, 50, 59, 5, 0), (32, 47, 60, 7, 0))
    assert ask(two, [memory], [[]], 5) == [[[34, 44, 60, 7]]]  # 7 is no bin: repeated
    assert ask(two, [memory_of((30, 30, 0))], [[]], 3) == [[[]]]
    assert Extrapolation.least_steps == 2


def test_ngrams_repeat_what_followed_at_the_same_phase() -> None:
    memory = memory_of((1, 2, 3, 4, 0), (5, 2, 6, 7, 0), (1, 2, 8, 9, 0))
    lookup = NgramLookup()
    # After (1, 2) the newest action that began so went on with 8, 9.
    assert ask(lookup, [memory], [[1, 2]], 5) == [[[8, 9]]]
    # After (5,) only the second action began so.
    assert ask(lookup, [memory], [[5]], 5) == [[[2, 6, 7]]]
    # Before anything is committed the end of the last action is what is looked up: 3, 4, 0.
    again = memory_of((1, 2, 3, 4, 0), (5, 6, 3, 4, 0), (7, 7, 7, 7, 7), (1, 2, 3, 4, 0))
    assert ask(lookup, [again], [[]], 5) == [[[7, 7, 7, 7]]]
    # A token seen only at another position is no match.
    assert ask(lookup, [memory], [[2]], 5) == [[[]]]


def test_a_longer_ngram_wins_over_a_newer_one() -> None:
    memory = memory_of((1, 2, 3, 6, 0), (9, 9, 3, 5, 0), (0, 0, 0, 0, 0))
    assert ask(NgramLookup(), [memory], [[1, 2, 3]], 5) == [[[6]]]


def test_recycling_reads_the_answers_behind_the_first_mismatch() -> None:
    """Drafts 11, 12, 13 in the prefill; the target says 11, then 22: the rest was predicted too."""
    tree = DraftTree.chain(torch.tensor([[0, 11, 12, 13]]))
    predictions = torch.tensor([[11, 22, 23, 24]])
    batch = batch_of([SessionMemory()], [[11, 22]])
    batch.last = pass_of(tree, predictions, [1], torch.tensor([[11, 22]]))
    guesses = JacobiDrafts().draft(batch, limits_of(batch))
    assert guesses.tokens[0, 0, :2].tolist() == [23, 24]
    assert guesses.is_known[0, 0].tolist() == [True, True, False, False]


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
    save_medusa(MedusaHeads(4, 2), tmp_path)
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
    batch, source = batch_of([SessionMemory()], [[]]), Retrieval(index)
    source.allocate(batch)
    source.begin(batch, blind, None)
    assert not source.draft(batch, limits_of(batch)).is_known.any()
    with pytest.raises(ValueError, match="visual features"):
        frame_keys(blind)


# Medusa heads and smaller models.


def test_medusa_trees_take_the_odds_of_each_level_from_one_hidden_state() -> None:
    target = TinyTarget(tiny_decoder())
    heads = MedusaHeads(WIDTH, 4).requires_grad_(False)
    heads.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(1, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([[39, 40]])
    batch = batch_of([SessionMemory()], [[38, 39, 40]])
    batch.last = pass_of(DraftTree.chain(tokens), tokens, [1], tokens, hidden)
    source = MedusaDrafts(heads, target)  # type: ignore[arg-type]
    drafted = source.draft(batch, limits_of(batch, TreeShape(5, 2, 14)))
    odds = target.logits(heads(hidden[:, 1]), ACTIONS).log_softmax(dim=-1)[0]
    shape = TreeShape.of_paths(((0,), (2,), (0, 1), (2, 0), (2, 0, 3)))
    fixed = source.draft(batch, limits_of(batch, shape))
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
    heads, hidden = MedusaHeads(8, 3), torch.randn(2, 8)
    assert torch.equal(heads(hidden), hidden[:, None].expand(-1, 3, -1))


def test_medusa_heads_survive_their_files(tmp_path: Path) -> None:
    heads = MedusaHeads(8, 3)
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


@pytest.mark.parametrize("num_rows", [1, 3])
def test_retrieval_drafts_in_the_published_loop_too(num_rows: int) -> None:
    """That loop decodes one token more than the index has."""
    decoder = tiny_decoder()
    prompts = random_prompts(decoder, [4, 2, 6][:num_rows])
    right = greedy(decoder, prompts)
    index = RetrievalIndex(frame_keys(prompts), torch.tensor(right), "tiny")
    method = find_method("spec-vla-published:drafts=retrieval,radius=0")
    built = Decoding(fast_target(decoder), method, DraftModels(index=index))
    traces = built.decode(prompts, Session.of(num_rows))
    assert [trace.tokens for trace in traces] == right
    assert all(max(trace.accepted_lengths) == LENGTH for trace in traces)


@pytest.mark.parametrize("length", [LENGTH - 1, LENGTH + 1])
def test_an_index_of_actions_of_another_length_is_refused(length: int) -> None:
    decoder = tiny_decoder()
    prompts = random_prompts(decoder, [4])
    index = RetrievalIndex(frame_keys(prompts), torch.full((1, length), 30), "tiny")
    method = find_method("lossless:drafts=retrieval")
    built = Decoding(fast_target(decoder), method, DraftModels(index=index))
    with pytest.raises(CheckpointError, match=f"holds actions of {length} tokens"):
        built.decode(prompts, Session.of(1))
