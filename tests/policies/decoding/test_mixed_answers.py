"""The second line of defence: an answer's number goes with its tokens, and is compared when read.

Each planted mistake swaps the rows of one stage of a round, as a wrong index would.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deft_policies.decoding import round as rounds
from deft_policies.decoding.batch import Batch, Pass
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.target import Scores, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import MixedAnswersError
from tests.policies.decoding.scripts import clock
from tests.policies.decoding.test_alone import row_of
from tests.policies.decoding.test_any_length import decoder, prompt, side_by_side
from tests.tiny_target import ACTIONS

METHODS = ("autoregressive", "lossless:plan=memory", "deft:plan=memory", "token-recycling")
Patch = Callable[[pytest.MonkeyPatch], None]


def swapped(value: Any) -> Any:
    """The same with its first two rows exchanged."""
    if isinstance(value, Tensor):
        is_single = value.dim() == 0 or len(value) == 1
        return value if is_single else torch.cat((value[:2].flip(0), value[2:]))
    if is_dataclass(value) and not isinstance(value, type):
        kept = {one.name: swapped(getattr(value, one.name)) for one in fields(value)}
        return replace(value, **kept)
    return value


def in_draft(patch: pytest.MonkeyPatch) -> None:
    """The root of a row is its neighbour's."""
    last_pass = Batch.last_pass

    def wrong(self: Batch) -> Pass:
        found: Pass = swapped(last_pass(self))
        return found

    patch.setattr(Batch, "last_pass", wrong)


def in_verify(patch: pytest.MonkeyPatch) -> None:
    score = Target.score

    def wrong(self: Target, cache: Any, tree: DraftTree) -> Scores:
        found: Scores = swapped(score(self, cache, tree))
        return found

    patch.setattr(Target, "score", wrong)


def in_accept(patch: pytest.MonkeyPatch) -> None:
    judge, on_host = rounds.judge, rounds.judge_on_host
    patch.setattr(rounds, "judge", lambda *asked: swapped(judge(*asked)))
    patch.setattr(rounds, "judge_on_host", lambda *asked: swapped(on_host(*asked)))


def in_commit(patch: pytest.MonkeyPatch) -> None:
    """What a pass leaves behind lies in the slots of its neighbours."""
    commit = Batch.commit

    def wrong(self: Batch, done: Pass, is_plain: bool = False) -> None:
        commit(self, swapped(done), is_plain)

    patch.setattr(Batch, "commit", wrong)


PLANTS = (in_draft, in_verify, in_accept, in_commit)
# Plain decoding guesses nothing, so it accepts nothing.
PAIRS = [(one, two) for one in METHODS for two in PLANTS if (one, two) != (METHODS[0], in_accept)]


@pytest.mark.parametrize(("method", "plant"), PAIRS)
def test_rows_that_change_places_are_an_error_and_no_answer(
    method: str, plant: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    rows = [row_of(method, 7, seed) for seed in (1, 2)]
    engine = Engine(Target(decoder(), ACTIONS))
    prompts = side_by_side([prompt(3, 1), prompt(3, 2)])
    with torch.inference_mode(), pytest.raises(MixedAnswersError, match="was expected"):
        engine.decode(prompts, rows, clock())
    assert all(row.trace is None for row in rows)
    monkeypatch.undo()
    with torch.inference_mode():  # the engine goes on
        engine.decode(prompts, again := [row_of(method, 7, seed) for seed in (1, 2)], clock())
    assert all(len(row.tokens) == 7 for row in again)
