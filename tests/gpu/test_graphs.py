"""Recorded passes against their eager twin, where there is a GPU."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.formats import Precision
from tests import golden

pytestmark = pytest.mark.gpu

EAGER = ModelOptions(
    checkpoint=str(golden.TINY_OPENVLA),
    statistics_key="libero_spatial",
    device="cuda",
    precision=Precision.FLOAT32,
    decoding="autoregressive",
    has_graphs=False,
)
RECORDED = replace(EAGER, has_graphs=True)


def requests_of(policy: VlaPolicy, count: int, decoding: str) -> list[PolicyRequest]:
    options = ActOptions(decoding=decoding)
    return [
        PolicyRequest(Observation(case.image(), case.instruction), options=options)
        for case in golden.cases_with_image()[:count]
    ]


def tokens_of(policy: VlaPolicy, requests: Sequence[PolicyRequest]) -> list[tuple[int, ...]]:
    chunks = [answer.chunk for answer in policy.act(list(requests))]
    return [chunk.trace.tokens for chunk in chunks if chunk.trace is not None]


@pytest.fixture(scope="module", autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def test_golden_tokens_on_the_gpu() -> None:
    for options in (EAGER, RECORDED):
        policy = load_policy(options)
        policy.warm_up()
        requests = requests_of(policy, 12, "autoregressive")
        expected = [case.tokens for case in golden.cases_with_image()]
        assert [tokens_of(policy, [one])[0] for one in requests] == expected


@pytest.mark.parametrize("decoding", ["lossless", "within-bins"])
@pytest.mark.parametrize("size", [1, 3])
def test_recorded_and_eager_methods_agree_over_several_frames(decoding: str, size: int) -> None:
    answers = []
    for options in (EAGER, RECORDED):
        policy = load_policy(replace(options, decoding=decoding, radius=None))
        policy.warm_up()
        requests = requests_of(policy, size, decoding)
        answers.append([tokens_of(policy, requests) for _ in range(3)])
    assert answers[0] == answers[1]


def test_a_session_of_many_prompt_lengths_records_few_passes() -> None:
    policy = load_policy(RECORDED)
    policy.warm_up()
    frame = np.zeros((224, 224, 3), np.uint8)
    for words in range(1, 12):
        observation = Observation(frame, "put the bowl on the plate " * words)
        chunk = policy.act([PolicyRequest(observation)])[0].chunk
        assert np.isfinite(chunk.actions).all()


def test_fused_and_plain_kernels_answer_the_same() -> None:
    for fuses_kernels in (True, False):
        policy = load_policy(replace(RECORDED, fuses_kernels=fuses_kernels))
        requests = requests_of(policy, 3, "autoregressive")
        expected = [case.tokens for case in golden.cases_with_image()[:3]]
        assert [tokens_of(policy, [one])[0] for one in requests] == expected
