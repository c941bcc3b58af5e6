"""In bfloat16, too, drafts change no token of a session: compared with plain decoding's."""

import numpy as np
import pytest
import torch

from deft_core.types import ActOptions
from deft_policies.base import PolicyRequest
from deft_policies.families.loading import load_policy
from deft_policies.memory import SessionMemory
from deft_policies.model.formats import Precision
from tests.golden_pi0fast import VARIANTS, observation, options_of, variant

METHODS = ("lossless", "pld", "token-recycling")  # the last answer, the text so far, the model


@pytest.mark.parametrize("grammar", ["on", "off"])
@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_change_no_token_in_bfloat16(name: str, grammar: str) -> None:
    more = {"precision": Precision.BFLOAT16, "grammar": grammar, "is_guarded": False}
    policy = load_policy(options_of(name, num_threads=1, **more))
    assert policy.model.network.decoder.embedding.weight.dtype == torch.bfloat16
    (session,) = variant(name)["sessions"]
    memories, num_saved = dict.fromkeys(METHODS, SessionMemory()), 0
    for frame in session["frames"][:3]:
        shown = observation({**frame, "instruction": session["instruction"]})
        plain = policy.act([PolicyRequest(shown, options=ActOptions(decoding="autoregressive"))])[0]
        assert plain.chunk.trace is not None
        for method in METHODS:
            request = PolicyRequest(shown, memories[method], ActOptions(decoding=method))
            answer = policy.act([request])[0]
            memories[method], trace = answer.memory, answer.chunk.trace
            assert trace is not None
            assert trace.tokens == plain.chunk.trace.tokens, (method, frame["images"])
            assert np.array_equal(answer.chunk.actions, plain.chunk.actions)
            num_saved += plain.chunk.trace.num_passes - trace.num_passes
    assert num_saved > 0
