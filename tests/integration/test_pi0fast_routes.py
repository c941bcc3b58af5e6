"""pi0-FAST behind our own protocol and openpi's: the actions are LeRobot's, whoever asks.

openpi's client sends a map of these keys and executes what comes back.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from deft_client import PolicyClient, StreamClient
from deft_client.errors import ProblemError
from deft_core.peers.arrays import pack, unpack
from deft_core.types import ActOptions
from deft_policies.families.loading import load_policy
from deft_policies.families.policy import VlaPolicy
from deft_server.app import create_app
from deft_server.settings import Settings
from tests.golden_pi0fast import case, observation, options_of, picture, variant
from tests.server.running import client_of, running

PEER = Settings(out_of_range="passthrough")


@cache
def policy_of(name: str, grammar: str = "on") -> VlaPolicy:
    return load_policy(options_of(name, grammar=grammar))


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(create_app(policy_of("quantile"), PEER)) as client:
        yield client


def pictures_of(frame: dict[str, Any]) -> list[Any]:
    return [picture(path) for path in frame["images"].values()]


def answer_of(client: TestClient, fields: dict[str, Any]) -> Any:
    with client.websocket_connect("/") as socket:
        socket.receive_bytes()
        socket.send_bytes(pack(fields))
        return unpack(socket.receive_bytes())


def check(actions: Any, frame: dict[str, Any]) -> None:
    """The gripper is not turned around: what such policies were taught closes at +1 already."""
    wanted = np.float32(frame["actions"])
    assert np.abs(np.float32(actions) - wanted).max() <= 2e-6 * np.abs(wanted).max()


def test_openpis_client_gets_the_chunk_for_liberos_keys(client: TestClient) -> None:
    frame = case("quantile", 0)
    image, wrist = pictures_of(frame)
    fields = {
        "observation/image": image,
        "observation/wrist_image": wrist,
        "observation/state": np.float64(frame["state"]),
        "prompt": frame["instruction"],
    }
    check(answer_of(client, fields)["actions"], frame)


def test_openpis_client_gets_the_chunk_for_droids_keys(client: TestClient) -> None:
    frame = case("quantile", 7)
    image, wrist = pictures_of(frame)
    fields = {
        "observation/exterior_image_1_left": image,
        "observation/wrist_image_left": wrist,
        "observation/joint_position": np.float64(frame["state"][:7]),
        "observation/gripper_position": np.float64(frame["state"][7:]),
        "prompt": frame["instruction"],
    }
    check(answer_of(client, fields)["actions"], frame)


def test_a_client_without_a_wrist_camera_is_answered(client: TestClient) -> None:
    frame = case("meanstd", 14)
    (image,) = pictures_of(frame)
    fields = {"observation/image": image, "observation/state": np.float32(frame["state"])}
    with client_of(create_app(policy_of("meanstd"), PEER)) as other:
        answer = answer_of(other, {**fields, "prompt": frame["instruction"]})
    check(answer["actions"], frame)


@pytest.mark.parametrize("kind", [PolicyClient, StreamClient])
def test_sessions_are_answered_over_our_own_protocol(kind: type[PolicyClient]) -> None:
    (session,) = variant("quantile")["sessions"]
    app = create_app(policy_of("quantile"), PEER)
    with running(app) as address, kind(f"http://{address}") as client:
        for frame in session["frames"][:3]:
            shown = observation({**frame, "instruction": session["instruction"]})
            chunk = client.act(shown, ActOptions(session_id="arm", want_trace=True))
            check(chunk.actions, frame)
            assert chunk.trace is not None
            assert list(chunk.trace.tokens) == frame["generated_ids"]


def test_without_the_grammar_no_action_is_an_error_with_its_text() -> None:
    frame = case("quantile", 14)
    app = create_app(policy_of("quantile", "off"), PEER)
    with (
        running(app) as address,
        PolicyClient(f"http://{address}") as client,
        pytest.raises(ProblemError, match="59 coefficients") as caught,
    ):
        client.act(observation(frame))
    assert caught.value.problem.type.endswith("no_action")
    assert caught.value.problem.reasoning == frame["answer_text"]


def test_a_frame_without_a_state_is_refused(client: TestClient) -> None:
    frame = case("quantile", 0)
    image, wrist = pictures_of(frame)
    fields = {"observation/image": image, "observation/wrist_image": wrist, "prompt": "go"}
    with client.websocket_connect("/") as socket:
        socket.receive_bytes()
        socket.send_bytes(pack(fields))
        assert "8 numbers" in socket.receive_text()
