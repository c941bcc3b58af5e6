"""VlaPolicy as a server uses it: golden answers, batches, refusals, sessions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from deft_core.image_chain import ImageChain
from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_policies.checkpoint.config import load_encoder
from deft_policies.decoding.target import PassRow, Scores
from deft_policies.errors import (
    DeviceError,
    NotFiniteError,
    RequestError,
    UnknownDecodingError,
    UnknownStatisticsKeyError,
)
from deft_policies.families.openvla import OpenVLA, VlaTarget
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.image import ImageProcessor
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.random_weights import word_ids
from deft_policies.model.vla import OpenVLAModel
from tests import golden
from tests.fake_graphs import RecordingCapturer
from tests.tiny_openvla import golden_model, tiny_model

PLAIN = ModelOptions(decoding="autoregressive")


def golden_policy(
    options: ModelOptions | None = None, runner: StepRunner | None = None
) -> VlaPolicy:
    model = golden_model()
    config = model.config
    encoder = load_encoder(
        golden.TINY_OPENVLA, config.prompt_template, config.action_tokens.last + 1
    )
    images = ImageProcessor(config.image, ImageChain.NONE)
    target = VlaTarget(model, runner=runner)
    ours = OpenVLA(target, encoder.encode, images, config.statistics)
    return VlaPolicy(ours, options or PLAIN)


def tiny_policy(
    options: ModelOptions | None = None, model: OpenVLAModel | None = None
) -> VlaPolicy:
    model = model or tiny_model()
    images = ImageProcessor(model.config.image, ImageChain.NONE)
    ours = OpenVLA(VlaTarget(model), partial(word_ids, 300), images, model.config.statistics)
    return VlaPolicy(ours, options or PLAIN)


def request_for(
    seed: int = 0, options: ActOptions | None = None, text: str = "lift it"
) -> PolicyRequest:
    image = np.random.default_rng(seed).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    return PolicyRequest(Observation(image, text), options=options or ActOptions())


def tokens_of(answers: list[PolicyAnswer]) -> list[tuple[int, ...]]:
    return [one.chunk.trace.tokens for one in answers if one.chunk.trace is not None]


def golden_requests() -> list[PolicyRequest]:
    return [
        PolicyRequest(
            Observation(case.image(), case.instruction),
            options=ActOptions(statistics_key=case.statistics_key, want_trace=True),
        )
        for case in golden.cases_with_image()
    ]


@pytest.mark.promise
@pytest.mark.parametrize("method", ["autoregressive", "lossless"])
def test_golden_tokens_and_actions_are_equal_to_the_bit(method: str) -> None:
    policy = golden_policy(ModelOptions(decoding=method))
    requests = golden_requests()
    assert len(requests) >= 12
    for case, request in zip(golden.cases_with_image(), requests, strict=True):
        answer = policy.act([request])[0]
        chunk = answer.chunk
        assert tokens_of([answer]) == [case.tokens]
        assert chunk.actions.tobytes() == case.action.tobytes()
        assert chunk.trace is not None
        np.testing.assert_allclose(chunk.trace.margins, case.margins, atol=1e-3)


def test_recorded_passes_answer_the_same_and_warming_up_records_them_all() -> None:
    runner = StepRunner(RecordingCapturer().capture, Reserve(1, 272, 304))
    policy = golden_policy(replace(PLAIN, statistics_key="libero_spatial"), runner)
    policy.warm_up()
    num_captured = runner.num_captured
    requests = golden_requests()
    for case, request in zip(golden.cases_with_image(), requests, strict=True):
        assert tokens_of(policy.act([request])) == [case.tokens]
    assert runner.num_captured == num_captured
    assert not runner.uncaptured
    three = [case.tokens for case in golden.cases_with_image()[:3]]
    assert tokens_of(policy.act(golden_requests()[:3])) == three


@pytest.mark.promise
def test_golden_cases_answered_in_batches_are_the_same() -> None:
    policy = golden_policy()
    cases = golden.cases_with_image()
    for size in (2, 3, 4):
        requests = golden_requests()
        for start in range(0, len(cases), size):
            answers = policy.act(requests[start : start + size])
            expected = [case.tokens for case in cases[start : start + size]]
            assert tokens_of(answers) == expected


@pytest.mark.promise
def test_rows_of_one_batch_may_use_different_methods() -> None:
    policy = tiny_policy()
    options = [ActOptions(decoding=name) for name in ("autoregressive", "lossless", "fly")]
    requests = [request_for(seed, one) for seed, one in enumerate(options)]
    answers = policy.act(requests)
    methods = [one.chunk.trace.method for one in answers if one.chunk.trace is not None]
    assert methods == ["autoregressive", "lossless", "fly"]
    alone = [policy.act([request_for(seed)])[0] for seed in range(2)]
    assert tokens_of(answers)[:2] == tokens_of(alone)


def test_the_second_frame_of_a_session_is_drafted_from_the_first() -> None:
    policy = tiny_policy(ModelOptions(decoding="within-bins", radius=0))
    request = request_for()
    found = policy.act([request])[0]
    again = policy.act([replace(request, memory=found.memory)])[0]
    assert tokens_of([found]) == tokens_of([again])
    first, second = found.chunk, again.chunk
    assert first.trace is not None
    assert second.trace is not None
    assert second.trace.num_passes == 1 < first.trace.num_passes
    assert second.timings.prefill_ms > 0.0


def test_timings_cover_every_stage_and_add_up() -> None:
    policy = tiny_policy()
    timings = policy.act([request_for()])[0].chunk.timings
    parts = [timings.prepare_ms, timings.vision_ms, timings.prefill_ms, timings.verify_ms]
    assert all(part > 0.0 for part in parts)
    assert timings.total_ms == pytest.approx(
        sum(parts) + timings.draft_ms + timings.judge_ms + timings.commit_ms + timings.finish_ms
    )


LVSPEC = ActOptions(decoding="lvspec:plan=memory", want_trace=True)


def test_judging_is_timed_apart_from_the_passes_it_judges() -> None:
    policy, memory = tiny_policy(), SessionMemory()
    for _ in range(2):
        request = replace(request_for(options=LVSPEC), memory=memory)
        (answer,) = policy.act([request])
        memory, timings, trace = answer.memory, answer.chunk.timings, answer.chunk.trace
    assert trace is not None
    assert all(one.judge_ms > 0.0 for one in trace.passes)
    assert timings.judge_ms == pytest.approx(sum(one.judge_ms for one in trace.passes))
    later = sum(one.pass_ms for one in trace.passes if not one.is_prefill)
    assert timings.verify_ms == pytest.approx(later)


def test_sampling_repeats_across_sessions_and_moves_on_within_one() -> None:
    policy = tiny_policy(replace(PLAIN, temperature=2.0, seed=5))
    episodes = []
    for _ in range(2):
        draws, memory = [], SessionMemory()
        for _ in range(3):
            answer = policy.act([replace(request_for(), memory=memory)])[0]
            draws += tokens_of([answer])
            memory = answer.memory
        episodes.append(draws)
    assert episodes[0] == episodes[1]
    assert len(set(episodes[0])) > 1


@pytest.mark.promise
def test_bad_keys_methods_and_radii_are_refused_before_the_model_runs() -> None:
    policy = golden_policy()
    observation = golden_requests()[0].observation
    with pytest.raises(UnknownStatisticsKeyError, match="libero_spatial, bridge_orig"):
        policy.check(observation, ActOptions())
    with pytest.raises(UnknownStatisticsKeyError, match="unknown statistics_key 'nowhere'"):
        policy.check(observation, ActOptions(statistics_key="nowhere"))
    key = "libero_spatial"
    with pytest.raises(UnknownDecodingError, match="unknown decoding 'fast'; known: ") as caught:
        policy.check(observation, ActOptions(statistics_key=key, decoding="fast"))
    told = str(caught.value).partition("known: ")[2].split(", ")
    assert told == list(policy.info.decoding_methods)  # those without their draft head are not
    with pytest.raises(RequestError, match="--draft-head"):
        policy.check(observation, ActOptions(statistics_key=key, decoding="spec-vla"))
    with pytest.raises(RequestError, match="radius"):
        policy.check(observation, ActOptions(statistics_key=key, decoding="deft", radius=-1))
    policy.check(observation, ActOptions(statistics_key="lab_arm"))


def test_an_instruction_that_does_not_fit_is_refused_with_its_length() -> None:
    policy = tiny_policy()
    request = request_for(text="stack the cups " * 700)
    with pytest.raises(RequestError, match="264. tokens.* 2028"):
        policy.check(request.observation, request.options)


def test_info_tells_keys_chain_size_and_methods_that_can_be_had() -> None:
    info = golden_policy().info
    assert info.statistics_keys == ("libero_spatial", "bridge_orig", "lab_arm_no_noops")
    assert info.default_statistics_key is None
    assert (info.image_height, info.image_width, info.action_dim) == (224, 224, 7)
    assert info.image_chain == "none"
    assert "libero" in info.image_chains
    assert info.decoding == "autoregressive"
    assert "lossless" in info.decoding_methods
    assert "spec-vla" not in info.decoding_methods  # needs a draft head
    chosen = golden_policy(replace(PLAIN, statistics_key="bridge_orig")).info
    assert chosen.default_statistics_key == "bridge_orig"


@pytest.mark.promise
def test_answers_stay_inside_the_limits_the_policy_names() -> None:
    policy = tiny_policy()
    limits = policy.action_limits(None)
    actions = policy.act([request_for()])[0].chunk.actions[0]
    assert ((limits.low <= actions) & (actions <= limits.high)).all()


def test_lack_of_memory_is_a_device_error_and_may_be_retried() -> None:
    class Exhausted(VlaTarget):
        is_full = False

        def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
            if self.is_full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(cache, rows)

    policy = tiny_policy()
    target = Exhausted(tiny_model())
    images = ImageProcessor(target.model.config.image, ImageChain.NONE)
    ours = OpenVLA(target, partial(word_ids, 300), images, target.model.config.statistics)
    policy = VlaPolicy(ours, ModelOptions(decoding="lossless"))
    memory = policy.act([request_for()])[0].memory
    target.is_full = True
    other = replace(request_for(seed=9), memory=memory)
    with pytest.raises(DeviceError, match="memory .* batch of 1"):
        policy.act([other])
    target.is_full = False
    assert policy.act([other])[0].memory.num_steps == 2


def test_methods_that_callers_make_up_push_out_no_others_costs() -> None:
    """What plans have cost is kept by a method's text, of at most so many methods."""
    policy = tiny_policy(ModelOptions(decoding="lossless"))
    policy.warm_up()
    asked = request_for(options=ActOptions(want_trace=True))
    (before,) = policy.act([asked])
    for number in range(150):
        made_up = ActOptions(decoding=f"lossless:temperature={(number + 1) / 100}")
        policy.act([request_for(options=made_up)])
    assert len(policy.engine.planner.guards) == 128
    (after,) = policy.act([asked])
    assert before.chunk.trace is not None
    assert after.chunk.trace is not None
    assert "expects" in before.chunk.trace.guard
    assert after.chunk.trace.guard == before.chunk.trace.guard


def test_warming_up_leaves_no_trace() -> None:
    policy = tiny_policy(ModelOptions(decoding="lossless"))
    fresh = tokens_of(policy.act([request_for()]))
    policy.warm_up()
    assert tokens_of(policy.act([request_for()])) == fresh


def test_a_policy_whose_model_is_broken_does_not_warm_up() -> None:
    """A weight went bad after it was read, or the device computes wrongly."""
    model = tiny_model()
    with torch.no_grad():
        model.decoder.head.weight[3, 3] = float("nan")
    with pytest.raises(NotFiniteError):
        tiny_policy(model=model).warm_up()
