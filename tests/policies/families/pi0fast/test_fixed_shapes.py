"""Passes of fixed shapes, as a GPU replays them, answer as a CPU's packed ones do."""

import numpy as np
import pytest
import torch

from deft_core.types import ActOptions
from deft_policies.base import PolicyRequest
from deft_policies.families.loading import open_model
from deft_policies.families.pi0fast.family import Pi0FastFamily
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.graphs import StepRunner
from tests.golden_pi0fast import VARIANTS, case, observation, options_of, variant


@pytest.mark.parametrize("grammar", ["on", "off"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_session_and_two_frames_at_a_time(name: str, grammar: str) -> None:
    """The beginning of an answer rides in the prefill; a missing camera makes a prompt shorter."""
    options = options_of(name, grammar=grammar, is_guarded=False, largest_batch=2)
    family = open_model(options)
    assert isinstance(family, Pi0FastFamily)
    runner = StepRunner(None, family.reserve)
    policy = VlaPolicy(family.load(torch.device("cpu"), torch.float32, runner), options)
    assert policy.engine.captured is not None
    (session,) = variant(name)["sessions"]
    memory = SessionMemory()
    for frame in session["frames"][:3]:
        shown = observation({**frame, "instruction": session["instruction"]})
        (answer,) = policy.act([PolicyRequest(shown, memory, ActOptions(want_trace=True))])
        memory, trace = answer.memory, answer.chunk.trace
        assert trace is not None
        assert list(trace.tokens) == frame["generated_ids"]
    both = [case(name, number) for number in (0, 14 if name == "meanstd" else 7)]
    for frame, answer in zip(
        both, policy.act([PolicyRequest(observation(one)) for one in both]), strict=True
    ):
        if frame["valid"]:
            np.testing.assert_allclose(answer.chunk.actions, frame["actions"], atol=1e-5)
