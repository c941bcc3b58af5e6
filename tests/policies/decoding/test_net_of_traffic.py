"""The random traffic finds rows that are mixed up, each mistake planted where it could be made.

The answer's number stays right here, so that it is the comparison that must notice.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from deft_policies.decoding.engine import Engine
from deft_policies.decoding.read import Reading
from deft_policies.decoding.sequence import PassResult
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import PassRow, Prompt, Scores, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.kv_cache import KVCache, Move
from tests.policies.decoding.test_alone_in_traffic import check
from tests.policies.decoding.test_mixed_answers import swapped

pytestmark = pytest.mark.promise

PLAYS = 200
Patch = Callable[[pytest.MonkeyPatch], None]


def is_beside_a_gap(rows: Sequence[PassRow]) -> bool:
    """Whether a slot before another one is empty: somebody hung up, or has ended."""
    return [row.slot for row in rows] != list(range(len(rows)))


def reads_the_cache_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    forward = Target.forward

    def wrong(self: Target, cache: Any, rows: Sequence[PassRow]) -> Scores:
        if rows[0].prompt is None and is_beside_a_gap(rows):
            slots = swapped([row.slot for row in rows])
            rows = [replace(row, slot=slot) for row, slot in zip(rows, slots, strict=True)]
        return forward(self, cache, rows)

    patch.setattr(Target, "forward", wrong)


def keeps_the_nodes_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    keep = KVCache.keep

    def wrong(self: KVCache, moves: Sequence[Move]) -> None:
        slots = sorted({slot for slot, _, _ in moves})
        if len(slots) > 1:
            other = dict(zip(slots, swapped(slots), strict=True))
            moves = [(other[slot], source, target) for slot, source, target in moves]
        keep(self, moves)

    patch.setattr(KVCache, "keep", wrong)


def reads_what_was_found_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    finish = Reading.finish

    def wrong(self: Reading) -> list[PassResult]:
        found = finish(self)
        mixed = swapped(found)
        same = [len(a.predictions) == len(b.predictions) for a, b in zip(found, mixed, strict=True)]
        if not all(same):
            return found
        return [replace(b, answer=a.answer) for a, b in zip(found, mixed, strict=True)]

    patch.setattr(Reading, "finish", wrong)


def takes_the_prompt_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    start = Engine.start

    def wrong(self: Engine, prompts: Sequence[Prompt], sequences: Sequence[Answer]) -> None:
        start(self, swapped(prompts), sequences)

    patch.setattr(Engine, "start", wrong)


def verifies_the_tree_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    draft = Engine._draft

    def wrong(self: Engine, active: list[Answer]) -> list[DraftTree]:
        return swapped(draft(self, active))

    patch.setattr(Engine, "_draft", wrong)


@pytest.mark.parametrize(
    "plant",
    [
        reads_the_cache_of_a_neighbour,
        keeps_the_nodes_of_a_neighbour,
        reads_what_was_found_of_a_neighbour,
        takes_the_prompt_of_a_neighbour,
        verifies_the_tree_of_a_neighbour,
    ],
)
def test_rows_that_are_mixed_up_are_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with torch.inference_mode(), pytest.raises(AssertionError):
        check(range(PLAYS), "bfloat16")
