"""Draft sources without a trained head: what each of them says, in cases worked out by hand."""

from pathlib import Path

import pytest
import torch

from deft_policies.checkpoint.drafts import is_medusa, load_medusa, save_medusa
from deft_policies.decoding.drafts import Branches, Chain, DraftSource
from deft_policies.decoding.drafts.heads import MedusaDrafts
from deft_policies.decoding.drafts.session import (
    Extrapolation,
    JacobiDrafts,
    PreviousAction,
)
from deft_policies.decoding.plan import TreeShape
from deft_policies.decoding.trace import PassRecord
from deft_policies.decoding.tree import DraftTree, merge
from deft_policies.errors import CheckpointError
from deft_policies.memory import SessionMemory
from deft_policies.methods.pld import NgramLookup
from deft_policies.model.draft_heads import MedusaHeads
from deft_policies.model.sizes import TokenRange
from tests.policies.decoding.scripts import answer_of
from tests.tiny_target import ACTIONS, WIDTH, TinyTarget, tiny_decoder


def memory_of(*actions: tuple[int, ...]) -> SessionMemory:
    return SessionMemory(own=actions)


def ask(
    source: DraftSource, memory: SessionMemory, committed: list[int], length: int
) -> list[Chain]:
    """Chains behind what is committed, as deep as is of use."""
    answer = answer_of(memory, committed, length)
    found = source.draft(answer, answer.room)
    assert isinstance(found, list)
    return found


def test_the_previous_action_is_the_targets_own_not_the_executed_one() -> None:
    """An action's last token is never guessed, so those here have one more."""
    memory = SessionMemory(own=((30, 31, 32, 0),))
    assert ask(PreviousAction(), memory, [], 4) == [[30, 31, 32]]
    assert ask(PreviousAction(), memory, [30], 4) == [[31, 32]]
    assert ask(PreviousAction(), SessionMemory(), [], 4) == []


def test_extrapolation_continues_the_line_inside_the_vocabulary() -> None:
    two = Extrapolation(TokenRange(20, 60))
    memory = memory_of((30, 50, 59, 5, 0), (32, 47, 60, 7, 0))
    assert ask(two, memory, [], 5) == [[34, 44, 60, 7]]  # 7 is no bin: repeated
    assert ask(two, memory_of((30, 30, 0)), [], 3) == []


def test_ngrams_repeat_what_followed_at_the_same_phase() -> None:
    memory = memory_of((1, 2, 3, 4, 0), (5, 2, 6, 7, 0), (1, 2, 8, 9, 0))
    lookup = NgramLookup()
    # After (1, 2) the newest action that began so went on with 8, 9.
    assert ask(lookup, memory, [1, 2], 5) == [[8, 9]]
    # After (5,) only the second action began so.
    assert ask(lookup, memory, [5], 5) == [[2, 6, 7]]
    # Before anything is committed the end of the last action is what is looked up: 3, 4, 0.
    again = memory_of((1, 2, 3, 4, 0), (5, 6, 3, 4, 0), (7, 7, 7, 7, 7), (1, 2, 3, 4, 0))
    assert ask(lookup, again, [], 5) == [[7, 7, 7, 7]]
    # A token seen only at another position is no match.
    assert ask(lookup, memory, [2], 5) == []


def test_a_longer_ngram_wins_over_a_newer_one() -> None:
    memory = memory_of((1, 2, 3, 6, 0), (9, 9, 3, 5, 0), (0, 0, 0, 0, 0))
    assert ask(NgramLookup(), memory, [1, 2, 3], 5) == [[6]]


def test_recycling_reads_the_answers_behind_the_first_mismatch() -> None:
    """Drafts 11, 12, 13 in the prefill; the target says 11, then 22: the rest was predicted too."""
    answer = answer_of(SessionMemory(), [11, 22])
    tree = merge([0], [("test", [[11, 12, 13]])], 64)
    answer.last = PassRecord(False, tree, [11, 22, 23, 24], [0, 1], 0, [])
    assert JacobiDrafts().draft(answer, 9) == [[23, 24]]
    assert JacobiDrafts().draft(answer, 1) == [[23]]


def test_recycling_follows_the_deepest_chain_below_the_accepted_path() -> None:
    tree = merge([0], [("test", [[11, 12], [11, 13, 14, 15]])], 64)
    answer = answer_of(SessionMemory(), [11, 22])
    said = [11, 22, 30, 31, 32, 33]  # after 0, 11, 12, 13, 14, 15
    answer.last = PassRecord(False, tree, said, [0, 1], 0, [])
    assert JacobiDrafts().draft(answer, 9) == [[31, 32, 33]]
    answer.last = PassRecord(False, tree, said, [0, 1, 2], 0, [])
    assert JacobiDrafts().draft(answer, 9) == [[]]


# Medusa heads and smaller models.


def test_medusa_trees_take_the_odds_of_each_level_from_one_hidden_state() -> None:
    target = TinyTarget(tiny_decoder())
    heads = MedusaHeads(WIDTH, 4).requires_grad_(False)
    heads.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(1, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    answer = answer_of(SessionMemory(), [38, 39, 40])
    tree = merge([38], [("test", [[39]])], 64)
    answer.last = PassRecord(False, tree, [39, 40], [0, 1], 0, [])
    source = MedusaDrafts(heads, target)  # type: ignore[arg-type]
    source.observe(answer, hidden[0], torch.zeros(2, 1))
    answer.shape = TreeShape(5, 2, 14)
    drafted = source.draft(answer, 3)
    odds = target.logits(heads(hidden[:, 1]), ACTIONS).log_softmax(dim=-1)[0]
    answer.shape = TreeShape.of_paths(((0,), (2,), (0, 1), (2, 0), (2, 0, 3)))
    fixed = source.draft(answer, 3)
    assert isinstance(drafted, Branches)
    assert isinstance(fixed, Branches)
    ranked = odds.argsort(dim=1, descending=True) + ACTIONS.first
    places = [(0, 0), (0, 2), (1, 1), (1, 0), (2, 3)]
    assert fixed.tokens == [int(ranked[place]) for place in places]
    assert fixed.parents == [0, 0, 1, 2, 4]
    grown = merge([40], [("test", drafted)], 64)
    assert max(grown.depths()) == 3  # what is missing but the last
    best = odds.argmax(dim=1) + ACTIONS.first
    assert [grown.tokens[node] for node in _likeliest_path(grown)] == best[:3].tolist()


def _likeliest_path(tree: DraftTree) -> list[int]:
    """Nodes of the deepest level's best path, from the root's child downwards."""
    depths = tree.depths()
    deepest = [node for node, depth in enumerate(depths) if depth == max(depths)]
    return tree.path_to(max(deepest, key=lambda node: tree.log_probs[node]))[1:]


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
