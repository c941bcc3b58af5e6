"""The random traffic finds rows that are mixed up, each mistake planted where it could be made.

The answer's number stays right here, so that it is the comparison that must notice.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deft_policies.decoding import steps
from deft_policies.decoding.batch import Batch, Pass, Row
from deft_policies.decoding.round import Round
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import DraftTree
from tests.policies.decoding.test_alone_in_traffic import check
from tests.policies.decoding.test_mixed_answers import swapped

PLAYS = 200
Patch = Callable[[pytest.MonkeyPatch], None]


def is_beside_a_gap(batch: Batch) -> bool:
    """Whether a slot before another one is empty: somebody hung up, or has ended."""
    return None in batch.whole.rows[: 1 + max(row.slot for row in batch.running)]


def drafts_from_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    last_pass = Batch.last_pass

    def wrong(self: Batch) -> Pass:
        found = last_pass(self)
        return replace(swapped(found), answers=found.answers) if is_beside_a_gap(self) else found

    patch.setattr(Batch, "last_pass", wrong)


def commits_to_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    commit = Batch.commit

    def wrong(self: Batch, done: Pass, is_plain: bool = False) -> None:
        mixed = replace(swapped(done), answers=done.answers)
        commit(self, mixed if is_beside_a_gap(self) else done, is_plain)

    patch.setattr(Batch, "commit", wrong)


def reads_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    read_lists = steps.read_lists

    def wrong(parts: Sequence[Tensor]) -> list[list[list[int]]]:
        is_finite, slots, *passes = read_lists(parts)
        for found in passes:
            if len(found) > 1:  # all but whose they are
                (kept, mine, *rest), (others, theirs, *more) = found[:2]
                found[:2] = [others, mine, *more], [kept, theirs, *rest]
        return [is_finite, slots, *passes]

    patch.setattr(steps, "read_lists", wrong)


def takes_the_prompt_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    prefill = Target.prefill

    def wrong(self: Target, cache: Any, first: int, prompts: Prompts, tree: DraftTree) -> Any:
        return prefill(self, cache, first, swapped(prompts), tree)

    patch.setattr(Target, "prefill", wrong)


def verifies_the_tree_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    draft = Round.draft

    def wrong(self: Round, rows: Batch, *rest: Any) -> DraftTree:
        found: DraftTree = swapped(draft(self, rows, *rest))
        return found

    patch.setattr(Round, "draft", wrong)


def remembers_the_session_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    fill = Batch.fill

    def wrong(self: Batch, rows: Sequence[Row], *rest: Any) -> None:
        fill(self, rows, *rest)
        self.past.copy_(swapped(self.past))
        self.num_past.copy_(swapped(self.num_past))

    patch.setattr(Batch, "fill", wrong)


@pytest.mark.parametrize(
    "plant",
    [
        drafts_from_a_neighbour,
        commits_to_a_neighbour,
        reads_a_neighbour,
        takes_the_prompt_of_a_neighbour,
        verifies_the_tree_of_a_neighbour,
        remembers_the_session_of_a_neighbour,
    ],
)
def test_rows_that_are_mixed_up_are_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with torch.inference_mode(), pytest.raises(AssertionError):
        check(range(PLAYS), "bfloat16")
