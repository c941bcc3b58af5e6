"""In bfloat16, too, drafts change no token of a session: compared with plain decoding's."""

import subprocess
import sys

import pytest
import torch

from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.families.loading import load_policy
from deft_policies.memory import SessionMemory
from deft_policies.model.formats import Precision
from tests.golden_qwenfast import VARIANTS, cameras, options_of, variant

METHODS = ("lossless", "pld", "token-recycling")  # the last answer, the text so far, the model


def check(name: str, num_threads: int, grammar: str) -> None:
    """The frames of a session, by plain decoding and by all that drafts."""
    options = options_of(
        name,
        precision=Precision.BFLOAT16,
        num_threads=num_threads,
        is_guarded=False,
        grammar=grammar,
    )
    policy = load_policy(options)
    assert torch.get_num_threads() == num_threads
    session, memories = variant(name)["sessions"][0], dict.fromkeys(METHODS, SessionMemory())
    num_saved = 0
    for frame in session["frames"][:4]:
        image, *wrists = cameras(frame)
        shown = Observation(
            image, session["instruction"], {f"wrist_{n}": w for n, w in enumerate(wrists)}
        )
        key = frame["statistics_key"]
        asked = ActOptions(statistics_key=key, decoding="autoregressive", want_log_probs=True)
        plain = policy.act([PolicyRequest(shown, options=asked)])[0].chunk
        assert plain.trace is not None
        for method in METHODS:
            asked = ActOptions(statistics_key=key, decoding=method, want_log_probs=True)
            answer = policy.act([PolicyRequest(shown, memories[method], asked)])[0]
            memories[method], trace = answer.memory, answer.chunk.trace
            assert trace is not None
            assert trace.tokens == plain.trace.tokens, (method, frame["images"])
            assert answer.chunk.actions.tolist() == plain.actions.tolist()
            assert answer.chunk.log_probs == plain.log_probs
            num_saved += len(trace.tokens) - trace.num_passes
    assert num_saved > 0


@pytest.mark.parametrize("grammar", ["on", "off"])
@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_change_no_token_in_bfloat16(name: str, grammar: str) -> None:
    check(name, 1, grammar)


def test_drafts_change_no_token_in_bfloat16_on_two_threads() -> None:
    """In a process of its own: other tests run on one thread."""
    command = f"from {__name__} import check; check('nora', 2, 'on')"
    subprocess.run([sys.executable, "-c", command], check=True)
