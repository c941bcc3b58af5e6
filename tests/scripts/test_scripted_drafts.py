"""Scripted drafts: as often right as asked for, and never changing an answer."""

from functools import partial

import numpy as np
import pytest
import torch

from deft_core.image_chain import ImageChain
from deft_core.types import ActOptions, DecodeTrace, Observation
from deft_policies.base import PolicyRequest
from deft_policies.benchmark.replay import Contender, ReplayFrame, replay
from deft_policies.families.openvla import OpenVLA, VlaTarget
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.image import ImageProcessor
from deft_policies.model.random_weights import unit_statistics, word_ids
from deft_policies.model.sizes import TokenRange
from scripts.bench.decoding import scripted
from scripts.reproduce.published import RELAXED_GOAL
from scripts.scripted_drafts import Dice, Script, ScriptedPolicy, find_answers, spoil
from tests.tiny_openvla import tiny_model


def make_policy(num_tokens: int = 7) -> VlaPolicy:
    """Answers with so many tokens, action tokens alone, as a trained model does."""
    model = tiny_model()
    bins = model.config.action_tokens
    model.decoder.head.weight[: bins.first] = 0.0
    model.decoder.head.weight[bins.last + 1 :] = 0.0
    ours = OpenVLA(
        VlaTarget(model),
        partial(word_ids, 64),
        ImageProcessor(model.config.image, ImageChain.NONE),
        {"made-up": unit_statistics(num_tokens)},
    )
    return VlaPolicy(ours, ModelOptions(decoding="autoregressive"))


def make_frames(count: int) -> list[ReplayFrame]:
    rng = np.random.default_rng(0)
    return [
        ReplayFrame(
            Observation(rng.integers(0, 256, (28, 28, 3), dtype=np.uint8), "go"), str(index)
        )
        for index in range(count)
    ]


def run_script(script: Script, count: int) -> list[DecodeTrace]:
    policy, frames = make_policy(), make_frames(count)
    answers = find_answers(policy, frames)
    scripted = ScriptedPolicy(policy, [script], answers)
    runs = replay([Contender(script.name, scripted)], frames, 0)
    traces = [one.chunk.trace for one in runs[0].answers if one.chunk.trace is not None]
    for frame, trace in zip(frames, traces, strict=True):
        assert trace.tokens == answers[id(frame.observation)]
    return traces


@pytest.mark.parametrize(("right", "chains"), [(1.0, 1), (1.0, 3), (0.0, 1)])
def test_right_drafts_cost_one_pass_and_useless_ones_none(right: float, chains: int) -> None:
    traces = run_script(Script("drafts", right, chains), 5)
    assert {trace.num_passes for trace in traces} == {1 if right else 7}


def test_every_scripted_draft_answers_as_plain_decoding() -> None:
    policy, frames = make_policy(), make_frames(6)
    answers = find_answers(policy, frames)
    contenders = scripted(policy, frames, [0.0, 0.5, 1.0])
    passes = {}
    for run in replay(contenders, frames, 0):
        traces = [one.chunk.trace for one in run.answers]
        assert [one and one.tokens for one in traces] == list(answers.values())
        assert all(one is not None and one.checked_passes for one in traces)
        passes[run.contender.name] = [one.num_passes for one in traces if one is not None]
    assert passes["prefill drafts 100% right"] == [1] * 6
    assert passes["head drafts 100% right"] == [2] * 6  # the prefill's token, then six
    assert passes["prefill drafts 0% right"] == [7] * 6
    assert np.mean(passes["head drafts 0% right"]) > 6  # but for what the tree has beside its path
    assert 1 < np.mean(passes["prefill drafts 50% right"]) < 7
    assert 2 < np.mean(passes["head drafts 50% right"]) < 7


def test_a_share_of_right_tokens_saves_as_many_passes() -> None:
    """An action takes 1 + 6 (1 - p) passes: one for every wrong token but the last."""
    traces = run_script(Script("drafts", 0.8, 1), 60)
    assert np.mean([trace.num_passes for trace in traces]) == pytest.approx(2.2, abs=0.4)


def test_the_head_really_runs_and_its_passes_accept_what_the_paper_says() -> None:
    """The published loop with the shares of Table 2, which are not cut a second time."""
    traces = run_script(Script.of_published("head", RELAXED_GOAL), 150)
    checked = [one for trace in traces for one in trace.checked_passes]
    assert max(len(one.tokens) for one in checked) > 40
    lengths = [one.accepted_length for one in checked]
    found = [lengths.count(length) / len(lengths) for length in range(6)]
    assert found == pytest.approx(RELAXED_GOAL, abs=0.07)
    expected = sum((length + 1) * share for length, share in enumerate(RELAXED_GOAL))
    assert np.mean(lengths) + 1 == pytest.approx(expected, abs=0.15)


def test_scripts_that_share_an_engine_answer_mixed_batches_as_they_do_alone() -> None:
    policy, frames = make_policy(), make_frames(6)
    answers = find_answers(policy, frames)
    scripts = [
        Script("plain"),
        Script("all right", 1.0, num_chains=1),
        Script("all wrong", 0.0, num_chains=1),
        Script("only the prefill's are right", (1.0, 1.0, *[0.0] * 5), 1, goes_on=False),
        Script.of_head("a head that is right", 1.0),
    ]
    shared = ScriptedPolicy(policy, scripts, answers)
    expected = {"plain": 7, "all right": 1, "all wrong": 7, "a head that is right": 2}
    for first in range(len(scripts)):
        batch = [
            PolicyRequest(frame.observation, options=ActOptions(decoding=scripts[number % 5].name))
            for number, frame in enumerate(frames, first)
        ]
        for request, answer in zip(batch, shared.act(batch), strict=True):
            trace = answer.chunk.trace
            assert trace is not None
            assert trace.tokens == answers[id(request.observation)]
            assert trace.num_passes == expected.get(trace.method, 5)


def test_spoilt_tokens_stay_in_range_and_far_away() -> None:
    actions = TokenRange(100, 355)
    tokens = torch.arange(100, 356)
    spoilt = spoil(tokens, actions)
    assert actions.contains(spoilt).all()
    assert ((spoilt - tokens).abs() >= 64).all()


def test_dice_follow_their_odds() -> None:
    dice = Dice(torch.tensor([[0.25], [0.0], [1.0]]))
    coins = torch.stack([dice.roll() for _ in range(2000)]).float()
    assert coins.mean(dim=(0, 2)).tolist() == pytest.approx([0.25, 0.0, 1.0], abs=0.03)


def test_drafts_reach_to_the_end_of_an_answer_of_any_length() -> None:
    policy, frames = make_policy(20), make_frames(1)
    answers = find_answers(policy, frames)
    script = Script("all right", 1.0, num_chains=1)
    answer = ScriptedPolicy(policy, [script], answers).act([PolicyRequest(frames[0].observation)])[
        0
    ]
    assert answer.chunk.trace is not None
    assert answer.chunk.trace.tokens == answers[id(frames[0].observation)]
    assert answer.chunk.trace.num_passes == 1
