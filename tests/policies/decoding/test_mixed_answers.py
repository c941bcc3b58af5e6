"""The second line of defence: an answer's number goes with its tokens, and is compared when read.

Each planted mistake swaps the rows of one stage of a round, as a wrong index would.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from deft_policies.decoding.engine import Engine
from deft_policies.decoding.read import Reading
from deft_policies.decoding.sequence import PassResult
from deft_policies.decoding.target import PassRow, Scores, Target
from deft_policies.errors import MixedAnswersError
from tests.policies.decoding.scripts import clock
from tests.policies.decoding.test_alone import row_of
from tests.policies.decoding.test_any_length import decoder, prompt
from tests.tiny_target import ACTIONS

METHODS = ("autoregressive", "lossless:plan=memory", "deft:plan=memory", "token-recycling")
Patch = Callable[[pytest.MonkeyPatch], None]


def swapped(values: Sequence[Any]) -> list[Any]:
    """The same with the first two exchanged."""
    first, *rest = values
    return [rest[0], first, *rest[1:]] if rest else [first]


def in_draft(patch: pytest.MonkeyPatch) -> None:
    """A row brings its neighbour's tree."""
    row_of_pass = Engine._pass_row

    def wrong(self: Engine, sequence: Any, tree: Any) -> PassRow:
        others = [one for one in self.sequences if one is not sequence]
        row = row_of_pass(self, sequence, tree)
        return replace(row, number=others[0].number) if others else row

    patch.setattr(Engine, "_pass_row", wrong)


def in_verify(patch: pytest.MonkeyPatch) -> None:
    """The scores of rows change places."""
    forward = Target.forward

    def wrong(self: Target, cache: Any, rows: Sequence[PassRow]) -> Scores:
        found = forward(self, cache, rows)
        found.first = swapped(found.first)
        return found

    patch.setattr(Target, "forward", wrong)


def in_read(patch: pytest.MonkeyPatch) -> None:
    """What was read of rows changes places."""
    finish = Reading.finish

    def wrong(self: Reading) -> list[PassResult]:
        return swapped(finish(self))

    patch.setattr(Reading, "finish", wrong)


@pytest.mark.parametrize("plant", [in_draft, in_verify, in_read])
@pytest.mark.parametrize("method", METHODS)
def test_rows_that_change_places_are_an_error_and_no_answer(
    method: str, plant: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    rows = [row_of(method, 7, seed) for seed in (1, 2)]
    engine = Engine(Target(decoder(), ACTIONS))
    prompts = [prompt(3, 1), prompt(3, 2)]
    with torch.inference_mode(), pytest.raises(MixedAnswersError, match="was expected"):
        engine.decode(prompts, rows, clock())
    assert all(row.trace is None for row in rows)
    monkeypatch.undo()
    with torch.inference_mode():  # the engine goes on
        engine.decode(prompts, again := [row_of(method, 7, seed) for seed in (1, 2)], clock())
    assert all(len(row.tokens) == 7 for row in again)
