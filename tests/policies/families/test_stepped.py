"""A policy that is played round by round answers as one that is asked for whole batches."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from deft_core.image_chain import ImageChain
from deft_core.types import ActOptions
from deft_policies.base import PolicyRequest, Running
from deft_policies.decoding.drafts import DraftSource
from deft_policies.decoding.planner import DraftModels, Maker
from deft_policies.decoding.target import PassRow, Scores, Target
from deft_policies.errors import NotFiniteError, RequestError
from deft_policies.families.openvla import OpenVLA, VlaTarget
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.image import ImageProcessor
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.random_weights import word_ids
from tests.policies.families.test_policy import request_for, tiny_policy, tokens_of
from tests.tiny_openvla import tiny_model

METHODS = (None, "lossless", "within-bins", "pld")


def requests(number: int) -> list[PolicyRequest]:
    """Different frames, prompts of different lengths, several methods."""
    return [
        request_for(
            10 * number + index,
            ActOptions(decoding=METHODS[(number + index) % len(METHODS)]),
            "lift it " * (1 + index),
        )
        for index in range(1 + number % 3)
    ]


def test_frames_that_join_and_leave_between_rounds_are_answered_as_alone() -> None:
    policy = tiny_policy()
    asked = [request for number in range(6) for request in requests(number)]
    alone = [tokens_of(tiny_policy().act([request]))[0] for request in asked]
    running: list[Running] = []
    ended: list[Running] = []
    for number in range(6):
        running += policy.start(requests(number))
        ended += policy.step()
    while len(ended) < len(running):
        ended += policy.step()
    assert {id(one) for one in ended} == {id(one) for one in running}
    answers = [one.answer for one in running if one.answer is not None]
    assert tokens_of(answers) == alone
    assert all(answer.memory.num_steps == 1 for answer in answers)
    assert len(policy.step()) == 0


def test_an_answer_tells_of_its_own_rounds_alone() -> None:
    policy = tiny_policy()
    (first,) = policy.start([request_for()])
    policy.step()
    (second,) = policy.start([request_for(1)])
    while not second.has_ended:
        policy.step()
    for one in (first, second):
        assert one.answer is not None
        chunk = one.answer.chunk
        assert chunk.trace is not None
        assert [done.is_prefill for done in chunk.trace.passes] == [True] + [False] * 6
        timings = chunk.timings
        assert timings.vision_ms > 0
        stages = [value for name, value in vars(timings).items() if name != "total_ms"]
        assert timings.total_ms == pytest.approx(sum(stages))


def test_a_cancelled_frame_is_never_answered_and_the_others_are() -> None:
    policy = tiny_policy()
    kept, left = policy.start([request_for(0), request_for(1)])
    policy.step()
    policy.cancel(left)
    policy.cancel(left)  # it has gone
    ended: list[Running] = []
    while not ended:
        ended += policy.step()
    assert [id(one) for one in ended] == [id(kept)]
    assert not left.has_ended
    assert kept.answer is not None
    assert tokens_of([kept.answer]) == tokens_of(tiny_policy().act([request_for(0)]))


def test_numbers_that_mean_nothing_end_one_frame_and_no_other() -> None:
    class Broken(VlaTarget):
        """Scores with NaN in the second row, of passes behind the prompt."""

        def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
            scores = super().forward(cache, rows)
            for index, row in enumerate(rows):
                if index and row.prompt is None:
                    here = scores.nodes(index, row.tree)
                    scores.logits[here] = scores.for_host[here, 1] = float("nan")
            return scores

    model = tiny_model()
    images = ImageProcessor(model.config.image, ImageChain.NONE)
    ours = OpenVLA(Broken(model), partial(word_ids, 300), images, model.config.statistics)
    policy = VlaPolicy(ours, ModelOptions(decoding="autoregressive"))
    fine, broken = policy.start([request_for(0), request_for(1)])
    while not broken.has_ended:
        policy.step()
    assert not fine.has_ended  # a broken answer goes no further
    while not fine.has_ended:
        policy.step()
    assert isinstance(broken.error, NotFiniteError)
    assert fine.answer is not None
    assert np.isfinite(fine.answer.chunk.actions).all()
    with pytest.raises(NotFiniteError):
        policy.act([request_for(0), request_for(1)])


def test_where_one_frame_cannot_start_none_does() -> None:
    class Failing(DraftModels):
        def makers(self, target: Target) -> dict[str, Maker]:
            def fail() -> DraftSource:
                raise RequestError("drafts", "no n-grams today")

            return super().makers(target) | {"ngram": fail}

    model = tiny_policy().model
    assert isinstance(model, OpenVLA)
    policy = VlaPolicy(model, ModelOptions(decoding="autoregressive"), Failing())
    with pytest.raises(RequestError, match="no n-grams today"):
        policy.start([request_for(0), request_for(1, ActOptions(decoding="pld"))])
    assert policy.engine.unfinished == []


def test_nothing_is_on_its_way_after_a_step_that_failed() -> None:
    class Exhausted(VlaTarget):
        is_full = True

        def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
            if self.is_full and rows[0].prompt is None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(cache, rows)

    model = tiny_model()
    target = Exhausted(model)
    images = ImageProcessor(model.config.image, ImageChain.NONE)
    ours = OpenVLA(target, partial(word_ids, 300), images, model.config.statistics)
    policy = VlaPolicy(ours, ModelOptions(decoding="autoregressive"))
    started = policy.start([request_for(0), request_for(1)])
    policy.step()
    with pytest.raises(Exception, match="no memory for a batch of 2"):
        policy.step()
    assert not any(one.has_ended for one in started)
    target.is_full = False
    assert len(policy.step()) == 0
    request = replace(request_for(0))
    assert tokens_of(policy.act([request])) == tokens_of(tiny_policy().act([request]))
