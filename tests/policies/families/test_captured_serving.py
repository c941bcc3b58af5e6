"""Serving from captured passes: nothing is captured while robots wait, whatever they send."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from deft_core.image_chain import ImageChain
from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.decoding.captured import Shape, shapes_of
from deft_policies.decoding.plan import KeyMask
from deft_policies.decoding.planner import DraftModels
from deft_policies.errors import RequestError
from deft_policies.families.openvla import OpenVLA, VlaTarget
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.image import ImageProcessor
from deft_policies.model.random_weights import word_ids
from deft_policies.model.statistics import ActionStatistics
from scripts.scripted_drafts import random_head
from tests.draws import draws
from tests.fake_graphs import RecordingCapturer
from tests.tiny_openvla import tiny_config, tiny_model

METHODS = (
    "autoregressive",
    "autoregressive:temperature=1",
    "lossless",
    "lossless:drafts=previous+head",
    "deft",
    "within-bins:radius=3",
    "spec-vla",
    "spec-vla:radius=3",
    "spec-vla-published",
)
PROMPT_LENGTHS = range(3, 15)  # words, each an id
RESERVE = Reserve(rows=8, shortest=40, longest=48)


def policy_on(runner: StepRunner, key_mask: KeyMask = KeyMask.CAUSAL) -> VlaPolicy:
    model = tiny_model()
    target = VlaTarget(model, runner=runner)
    drafts = DraftModels(head=random_head(model), key_mask=key_mask)
    images = ImageProcessor(tiny_config().image, ImageChain.NONE)
    smaller = ActionStatistics(-np.ones(7) / 2, np.ones(7) / 2, np.arange(7) < 6)
    statistics = {"first": tiny_config().statistics["tiny"], "second": smaller}
    return VlaPolicy(OpenVLA(target, partial(word_ids, 300), images, statistics), drafts=drafts)


def mixed_batches(
    seed: int, num_frames: int, most: int = 8
) -> list[list[tuple[Observation, ActOptions, int]]]:
    """Frames of sixteen sessions; methods, statistics and prompt lengths are drawn for each."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    batches, left = [], num_frames
    while left:
        size = min(left, rng.randint(1, most))
        batches.append(
            [
                (
                    Observation(
                        numbers.integers(0, 256, (28, 28, 3), dtype=np.uint8),
                        " ".join(["word"] * rng.choice(PROMPT_LENGTHS)),
                    ),
                    ActOptions(
                        decoding=rng.choice(METHODS),
                        statistics_key=rng.choice(("first", "second")),
                        want_trace=rng.random() < 0.5,
                        want_log_probs=rng.random() < 0.5,
                    ),
                    session,
                )
                for session in rng.sample(range(16), size)
            ]
        )
        left -= size
    return batches


def serve(
    policy: VlaPolicy, batches: list[list[tuple[Observation, ActOptions, int]]]
) -> list[tuple[int, ...]]:
    memories = [SessionMemory()] * 16
    tokens = []
    for batch in batches:
        requests = [PolicyRequest(frame, memories[who], options) for frame, options, who in batch]
        for (_, _, who), answer in zip(batch, policy.act(requests), strict=True):
            memories[who] = answer.memory
            tokens += [answer.chunk.trace.tokens] if answer.chunk.trace else []
    return tokens


def captured_policy(
    reserve: Reserve, key_mask: KeyMask = KeyMask.CAUSAL
) -> tuple[StepRunner, VlaPolicy]:
    runner = StepRunner(RecordingCapturer().capture, reserve)
    policy = policy_on(runner, key_mask)
    policy.warm_up(METHODS)
    return runner, policy


def test_mixed_frames_of_several_robots_are_answered_as_without_captures() -> None:
    """And nothing is captured after the warm-up."""
    runner, policy = captured_policy(replace(RESERVE, rows=4))
    num_captured = runner.num_captured
    batches = mixed_batches(3, num_frames=draws(40), most=4)
    assert any(len({options.decoding for _, options, _ in batch}) == 4 for batch in batches)
    tokens = serve(policy, batches)
    assert len(tokens) == draws(40)
    assert tokens == serve(policy_on(StepRunner()), batches)
    assert runner.num_captured == num_captured
    assert not runner.uncaptured


def test_a_method_that_nobody_named_before_is_served_from_what_was_captured() -> None:
    runner = StepRunner(RecordingCapturer().capture, replace(RESERVE, rows=2))
    policy, plain = policy_on(runner), policy_on(StepRunner())
    policy.warm_up()  # for the default alone
    num_captured = runner.num_captured
    batches = mixed_batches(4, num_frames=16, most=2)
    assert serve(policy, batches) == serve(plain, batches)
    assert runner.num_captured == num_captured
    assert not runner.uncaptured


def test_a_head_that_sees_the_prompt_alone_is_captured_too() -> None:
    """Captured growth once read the lengths of the prompt that it had been captured with."""
    runner, captured = captured_policy(replace(RESERVE, rows=2), KeyMask.PREFIX_ONLY)
    batches = mixed_batches(2, num_frames=16, most=2)
    plain = policy_on(StepRunner(), KeyMask.PREFIX_ONLY)
    assert serve(captured, batches) == serve(plain, batches)
    assert not runner.uncaptured


def test_more_frames_than_the_reserve_has_rows_wait_and_capture_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        runner, policy = captured_policy(replace(RESERVE, rows=2, longest=40))
    assert f"capturing {len(passes_of(policy))} passes and prefills" in caplog.text
    assert "memory besides the weights: keys and values" in caplog.text
    num_captured = runner.num_captured
    batches = mixed_batches(1, num_frames=30)
    assert max(map(len, batches)) == 8
    assert serve(policy, batches) == serve(policy_on(StepRunner()), batches)
    assert runner.num_captured == num_captured
    # The towers look at all frames of a batch at once; of passes none runs uncaptured.
    assert all("see" in str(key) for key in runner.uncaptured)
    assert torch.is_inference_mode_enabled() is False


def passes_of(policy: VlaPolicy) -> list[Shape]:
    passes = policy.engine.captured
    assert passes is not None
    return shapes_of(passes.reserve, passes.widest, passes.keeps_hidden)


def test_a_prompt_that_the_reserve_does_not_hold_is_refused() -> None:
    runner, policy = captured_policy(replace(RESERVE, rows=1))
    most = RESERVE.lengths[-1] - tiny_config().num_patches
    model, number = policy.model, 1
    while len(model.encode("word " * (number + 1))) <= most:
        number += 1
    black, options = np.zeros((28, 28, 3), np.uint8), ActOptions(statistics_key="first")
    longest, longer = (Observation(black, "word " * one) for one in (number, number + 1))
    policy.check(longest, options)
    with pytest.raises(RequestError, match=f"at most {most} fit with the image"):
        policy.check(longer, options)
    request = PolicyRequest(longest, options=replace(options, want_trace=True))
    (found,), (plain,) = (one.act([request]) for one in (policy, policy_on(StepRunner())))
    assert found.chunk.trace is not None
    assert plain.chunk.trace is not None
    assert found.chunk.trace.tokens == plain.chunk.trace.tokens
    assert not runner.uncaptured
