"""How likely the model was to write its tokens, whatever method found them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deft_core.types import ActionChunk, ActOptions, LogProbs, Observation
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_policies import tiny_libero as bundle
from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_policies.commands.act import load_image
from deft_policies.decoding.clock import StageClock
from deft_policies.families.loading import load_policy
from deft_policies.families.model import TokenModel
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.formats import Precision
from tests.repository import ROOT

INSTRUCTION = "pick up the butter and place it in the basket"


def shipped(precision: Precision, temperature: float = 0.0) -> VlaPolicy:
    """The policy that ships, which acts at once and thinks aloud."""
    options = ModelOptions(
        device="cpu", precision=precision, is_guarded=False, temperature=temperature
    )
    return load_policy(bundle.complete(options))


def ask(
    policy: VlaPolicy, decoding: str, memory: SessionMemory, thinks: bool = False
) -> tuple[PolicyAnswer, Sequence[int]]:
    image = load_image(ROOT / "examples/frame.png")
    options = ActOptions(
        decoding=decoding,
        want_log_probs=True,
        want_trace=True,
        want_reasoning=thinks,
        max_tokens=40 if thinks else None,
    )
    (answer,) = policy.act([PolicyRequest(Observation(image, INSTRUCTION), memory, options)])
    assert answer.chunk.trace is not None
    return answer, answer.chunk.trace.tokens


def by_hand(
    policy: VlaPolicy, tokens: Sequence[int], temperature: float, thinks: bool
) -> NDArray[np.float64]:
    """Of a pass for every token, led along the answer."""
    model = policy.model_for(ActOptions(want_reasoning=thinks))
    assert isinstance(model, TokenModel)
    image = load_image(ROOT / "examples/frame.png")
    with torch.inference_mode():
        (prompt,) = model.see([Observation(image, INSTRUCTION)], StageClock(model.device))
        logits = model.target.logits_along(prompt, len(tokens), list(tokens))
        odds = [(one / temperature).log_softmax(dim=0) for one in logits]
    return np.array([float(one[token]) for one, token in zip(odds, tokens, strict=True)])


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("precision", list(Precision))
def test_log_probabilities_are_the_models_whatever_drafted(
    precision: Precision, thinks: bool
) -> None:
    policy = shipped(precision)
    plain, tokens = ask(policy, "autoregressive", SessionMemory(), thinks)
    wanted = plain.chunk.log_probs
    assert wanted is not None
    assert (wanted.over, wanted.temperature) == ("vocabulary", 1.0)
    assert len(wanted.values) == len(tokens)
    assert np.allclose(wanted.values, by_hand(policy, tokens, 1.0, thinks), atol=1e-5)
    # The session's memory makes drafts; the second answer accepts them.
    drafted, same = ask(policy, "lossless", plain.memory, thinks)
    assert same == tokens
    assert len(drafted.chunk.trace.passes) < len(plain.chunk.trace.passes)
    if precision is Precision.BFLOAT16:
        assert drafted.chunk.log_probs == wanted
    else:
        assert np.allclose(drafted.chunk.log_probs.values, wanted.values, atol=1e-5)


@pytest.mark.parametrize(
    ("decoding", "temperature"),
    [("autoregressive", 0.7), ("lossless", 0.7), ("ratio-test", 0.7), ("deft", 0.0)],
)
def test_drawn_and_relaxed_tokens_have_the_log_probabilities_of_the_target(
    decoding: str, temperature: float
) -> None:
    policy, memory = shipped(Precision.FLOAT32, temperature), SessionMemory(noise=3)
    for _ in range(3):
        answer, tokens = ask(policy, decoding, memory)
        memory, found = answer.memory, answer.chunk.log_probs
        assert found is not None
        assert found.temperature == (temperature or 1.0)
        wanted = by_hand(policy, tokens, found.temperature, False)
        assert np.allclose(found.values, wanted, atol=1e-5)


def test_log_probabilities_are_absent_where_nobody_asks() -> None:
    policy = shipped(Precision.FLOAT32)
    image = load_image(ROOT / "examples/frame.png")
    (answer,) = policy.act([PolicyRequest(Observation(image, INSTRUCTION))])
    assert answer.chunk.log_probs is None


@pytest.mark.parametrize("wire_format", WireFormat)
def test_log_probabilities_reach_the_client(wire_format: WireFormat) -> None:
    chunk = ActionChunk(np.zeros((1, 7)), log_probs=LogProbs((-0.5, -2.25), 0.7, "vocabulary"))
    data = codec.encode_answer(chunk, wire_format=wire_format)
    assert codec.decode_answer(data, wire_format).log_probs == chunk.log_probs
