"""Answers in FAST codes over HTTP: what the grammar has changed, what is no action, and replays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deft_client import PolicyClient, StreamClient
from deft_client.errors import ProblemError
from deft_core.types import ActOptions, Intervention, Observation
from deft_policies.families.loading import load_policy
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.formats import Precision
from deft_server.app import create_app
from deft_server.commands.replay import read_steps, replay
from deft_server.settings import Settings
from tests.golden_qwenfast import cameras, options_of, variant
from tests.server.running import running

NAME = "libero"
CASES = variant(NAME)["cases"]
SESSION = variant(NAME)["sessions"][0]


def policy_of(grammar: str) -> VlaPolicy:
    return load_policy(options_of(NAME, precision=Precision.FLOAT32, grammar=grammar))


def observe(frame: dict[str, Any], instruction: str) -> Observation:
    image, wrist = cameras(frame)
    return Observation(image, instruction, {"wrist": wrist})


def client_at(address: str, kind: type[PolicyClient] = PolicyClient) -> PolicyClient:
    return kind(f"http://{address}")


def test_chunks_are_answered_streamed_recorded_and_replayed(tmp_path: Path) -> None:
    policy = policy_of("on")
    settings = Settings(record=tmp_path, record_min_free_bytes=0, out_of_range="passthrough")
    with running(create_app(policy, settings)) as address:
        for kind in (PolicyClient, StreamClient):
            with client_at(address, kind) as client:
                for frame in SESSION["frames"][:3]:
                    shown = observe(frame, SESSION["instruction"])
                    chunk = client.act(shown, ActOptions(want_trace=True))
                    np.testing.assert_allclose(chunk.actions, frame["actions"], rtol=0, atol=1e-6)
                    assert chunk.intervention is None
                changed = next(one for one in CASES if "no action" in one["why"])
                chunk = client.act(observe(changed, changed["instruction"]))
                assert chunk.intervention is Intervention.GRAMMAR
                wanted = changed["masked"]["actions"]
                np.testing.assert_allclose(chunk.actions, wanted, rtol=0, atol=1e-6)
    replayed = list(replay(policy, read_steps(tmp_path), with_recorded_options=True))
    assert len(replayed) == 8
    assert all(max(one.differences) == 0.0 and one.same_tokens is not False for one in replayed)


def test_without_the_grammar_no_action_is_an_error_with_its_text() -> None:
    frame = next(one for one in CASES if "a broken character" in one["why"])
    with (
        running(create_app(policy_of("off"))) as address,
        client_at(address) as client,
        pytest.raises(ProblemError, match="coefficient") as caught,
    ):
        client.act(observe(frame, frame["instruction"]))
    assert caught.value.problem.type.endswith("no_action")
    assert caught.value.problem.reasoning == frame["text"]
