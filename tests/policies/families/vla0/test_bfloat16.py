"""In bfloat16, too, drafts change no token of a session: compared with plain decoding's."""

import subprocess
import sys

import pytest
import torch

from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.memory import SessionMemory
from deft_policies.model.formats import Precision
from tests.golden_vla0 import GOLDEN, VARIANTS, cameras, variant

METHODS = ("lossless", "pld", "token-recycling")  # the last answer, the text so far, the model


def check(name: str, num_threads: int, max_tokens: int | None = None) -> None:
    """The first frames of a session, by plain decoding and by all that drafts."""
    options = ModelOptions(
        checkpoint=str(GOLDEN / name),
        precision=Precision.BFLOAT16,
        num_threads=num_threads,
        is_guarded=False,
        max_tokens=max_tokens,
    )
    policy = load_policy(options)
    assert torch.get_num_threads() == num_threads
    session, memories = variant(name)["sessions"][0], dict.fromkeys(METHODS, SessionMemory())
    num_saved = 0
    for frame in session["frames"][:3]:
        image, wrist = cameras(frame)
        shown = Observation(image, session["instruction"], {"wrist": wrist})
        plain = policy.act([PolicyRequest(shown, options=ActOptions(decoding="autoregressive"))])[0]
        assert plain.chunk.trace is not None
        for method in METHODS:
            request = PolicyRequest(shown, memories[method], ActOptions(decoding=method))
            answer = policy.act([request])[0]
            memories[method], trace = answer.memory, answer.chunk.trace
            assert trace is not None
            assert trace.tokens == plain.chunk.trace.tokens, (method, frame["images"])
            num_saved += len(trace.tokens) - trace.num_passes
    assert num_saved > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_change_no_token_in_bfloat16(name: str) -> None:
    check(name, num_threads=1)


def test_drafts_change_no_token_in_bfloat16_on_two_threads() -> None:
    """In a process of its own: other tests run on one thread."""
    command = f"from {__name__} import check; check({VARIANTS[0]!r}, num_threads=2, max_tokens=64)"
    subprocess.run([sys.executable, "-c", command], check=True)
