"""Serving from captured steps: nothing is captured while robots wait, whatever they send."""

import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from deft_client.image_chain import ImageChain
from deft_client.types import ActOptions, Observation
from deft_policies.base import ActRequest
from deft_policies.decoding.engine import DraftModels
from deft_policies.decoding.plan import KeyMask
from deft_policies.families.openvla import OpenVLA, VlaTarget
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.image import ImageProcessor
from deft_policies.model.random_weights import word_ids
from deft_policies.model.statistics import ActionStatistics
from scripts.scripted_drafts import random_head
from tests.recorder import RecordingCapturer
from tests.tiny_openvla import tiny_config, tiny_model

METHODS = ("autoregressive", "lossless", "spec-vla", "spec-vla-published")
PROMPT_LENGTHS = range(3, 15)  # words, each an id
NUM_FRAMES = 500
RESERVE = Reserve(rows=8, shortest=40, longest=48)


def policy_on(runner: StepRunner, key_mask: KeyMask = KeyMask.CAUSAL) -> VlaPolicy:
    model = tiny_model()
    target = VlaTarget(model, runner=runner)
    drafts = DraftModels(head=random_head(model), key_mask=key_mask)
    images = ImageProcessor(tiny_config().image, ImageChain.NONE)
    smaller = ActionStatistics(-np.ones(7) / 2, np.ones(7) / 2, np.arange(7) < 6)
    statistics = {"first": tiny_config().statistics["tiny"], "second": smaller}
    return VlaPolicy(OpenVLA(target, partial(word_ids, 300), images, statistics), drafts=drafts)


def mixed_batches(seed: int = 0) -> list[list[tuple[Observation, ActOptions, int]]]:
    """Frames of sixteen sessions, with methods, statistics and prompt lengths at random."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    batches, left = [], NUM_FRAMES
    while left:
        size = min(left, rng.randint(1, 8))
        method = rng.choice(METHODS)
        batches.append(
            [
                (
                    Observation(
                        numbers.integers(0, 256, (28, 28, 3), dtype=np.uint8),
                        " ".join(["word"] * rng.choice(PROMPT_LENGTHS)),
                    ),
                    ActOptions(decoding=method, statistics_key=rng.choice(("first", "second"))),
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
        requests = [ActRequest(frame, memories[who], options) for frame, options, who in batch]
        for (_, _, who), answer in zip(batch, policy.act(requests), strict=True):
            memories[who] = answer.memory
            tokens += [answer.chunk.trace.tokens] if answer.chunk.trace else []
    return tokens


@pytest.mark.long(seconds=58)
def test_500_mixed_frames_capture_nothing_after_the_warm_up() -> None:
    runner = StepRunner(RecordingCapturer().capture, RESERVE)
    policy = policy_on(runner)
    policy.warm_up(METHODS)
    num_captured = runner.num_captured
    batches = mixed_batches()
    tokens = serve(policy, batches)
    assert len(tokens) == NUM_FRAMES
    assert runner.num_captured == num_captured
    assert not runner.uncaptured
    assert tokens == serve(policy_on(StepRunner()), batches)


@pytest.mark.long(seconds=23)
def test_a_head_that_sees_the_prompt_alone_is_captured_too() -> None:
    """Captured growth once read the lengths of the prompt that it had been captured with."""
    runner = StepRunner(RecordingCapturer().capture, replace(RESERVE, rows=2, longest=48))
    captured = policy_on(runner, KeyMask.PREFIX_ONLY)
    captured.warm_up(METHODS)
    batches = [batch[:2] for batch in mixed_batches(2)[:8]]
    plain = policy_on(StepRunner(), KeyMask.PREFIX_ONLY)
    assert serve(captured, batches) == serve(plain, batches)


@pytest.mark.long(seconds=23)
def test_answers_beyond_the_reserve_capture_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = StepRunner(RecordingCapturer().capture, replace(RESERVE, rows=2, longest=40))
    policy = policy_on(runner)
    with caplog.at_level("INFO"):
        policy.warm_up(METHODS)
    assert "passes of up to 2 rows" in caplog.text
    assert "lossless (1 of 4)" in caplog.text
    assert re.search(r"spec-vla \(3 of 4\): about \d+ s to go", caplog.text)
    num_captured = runner.num_captured
    batches = mixed_batches(1)[:6]
    assert serve(policy, batches) == serve(policy_on(StepRunner()), batches)
    assert runner.num_captured == num_captured
    assert torch.is_inference_mode_enabled() is False
