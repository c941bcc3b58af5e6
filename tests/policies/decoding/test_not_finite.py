"""Logits that are not finite are an error, whichever way an action is decoded.

One NaN among the weights once moved a robot almost fully in every dimension: the largest of NaNs is
a token like any other, and its action lies inside the statistics.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.target import PassRow, Scores, Target
from deft_policies.errors import NotFiniteError
from deft_policies.model.kv_cache import KVCache
from tests.policies.decoding.scripts import METHODS, Decoding, Session
from tests.policies.decoding.test_passes import DECODER, PROMPTS, random_models
from tests.tiny_target import ACTIONS

pytestmark = pytest.mark.promise

ROW = 1


class Broken(Target):
    """One logit of one row in one pass is not a number that can be compared."""

    def __init__(self, bad: float, broken_pass: int) -> None:
        super().__init__(DECODER, ACTIONS)
        self._bad, self._passes_left = bad, broken_pass

    def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
        scores = super().forward(cache, rows)
        self._passes_left -= 1
        if self._passes_left == -1:
            scores.logits[scores.nodes(ROW, rows[ROW].tree)][-1, -1] = self._bad
            scores.change(slice(None), scores.logits)
            scores.for_host[:, 1] = scores.logits.sum(dim=1)
        return scores


@pytest.mark.parametrize("broken_pass", [0, 1], ids=["prefill", "round"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
def test_one_logit_that_is_not_finite_withholds_the_action(
    method: Method, bad: float, broken_pass: int
) -> None:
    decoder = Decoding(Broken(bad, broken_pass), replace(method, is_guarded=False), random_models())
    session = Session.of(3)
    with pytest.raises(NotFiniteError, match="in 1 of 3 answers"):
        decoder.decode(PROMPTS, session)
    assert [memory.num_steps for memory in session.memories] == [0, 0, 0]


@pytest.mark.parametrize("name", ["autoregressive", "lossless"])
def test_a_logit_that_is_not_finite_withholds_an_action_that_is_drawn(name: str) -> None:
    method = find_method(name).with_sampling(1.0)
    decoder = Decoding(Broken(float("nan"), 1), replace(method, is_guarded=False), random_models())
    with pytest.raises(NotFiniteError):
        decoder.decode(PROMPTS, Session.of(3))
