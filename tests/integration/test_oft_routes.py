"""An OFT fine-tune behind the protocols of OFT, openpi and vla-eval: its own server's answers.

Golden answers were computed by OFT's own code around the same checkpoint, in float32.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketTestSession

from deft_core.image_chain import ImageChain
from deft_core.peers import openpi
from deft_core.peers.arrays import pack, unpack
from deft_core.peers.conventions import OPENPI
from deft_core.peers.openvla import decode_json, encode_array, encode_reply, oft_fields, read_answer
from deft_core.types import ActOptions, Image, Intervention
from deft_core.wire.codec import decode_answer, encode_request
from deft_core.wire.formats import WireFormat
from deft_core.wire.messages import ActMessage
from deft_policies.families.loading import load_policy
from deft_policies.families.oft.policy import OftPolicy
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from deft_server.app import create_app
from deft_server.compat.act_route import REASON_HEADER
from deft_server.compat.vla_eval import Message, MessageType, read_message
from deft_server.settings import Settings
from tests import golden_oft
from tests.golden_oft import OFT, OftCase
from tests.server.running import client_of

TOLERANCE = 1e-4
JSON = {"content-type": "application/json"}
CASES = [
    case
    for case in golden_oft.cases()
    if case.variant.name == "l1_2img_proprio"
    and case.fields["center_crop"]
    and case.statistics_key == "libero_spatial_no_noops"
]
CASE = CASES[0]
Fields = dict[str, object]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OftPolicy:
    directory = CASE.variant.write(tmp_path_factory.mktemp("oft") / "checkpoint")
    return load_policy(
        ModelOptions(
            checkpoint=str(directory),
            num_pictures=CASE.variant.num_pictures,
            num_steps=CASE.variant.chunk,
            statistics_key=CASE.statistics_key,
            image_chain=ImageChain.OFT,
            precision=Precision.FLOAT32,
            device="cpu",
        )
    )


@pytest.fixture(scope="module")
def client(policy: OftPolicy) -> Iterator[TestClient]:
    settings = Settings(profile="oft", out_of_range="passthrough")
    with client_of(create_app(policy, settings)) as client:
        yield client


def without(name: str) -> Fields:
    fields = request_of(CASE)
    del fields[name]
    return fields


def request_of(case: OftCase, **changed: object) -> Fields:
    return {**oft_fields(case.observation()), **changed}


def picture(image: Image) -> Mapping[str, object]:
    return encode_array(image)


FRAME = CASE.observation().image
assert CASE.state is not None
ANSWERED = {
    "plain": request_of(CASE),
    "state_list": request_of(CASE, state=CASE.state.tolist()),
    "unnorm_key_ignored": request_of(CASE, unnorm_key="no_such_data_set"),
    "unknown_key_ignored": request_of(CASE, something="else"),
    "encoded": {"encoded": json.dumps(request_of(CASE))},
}
REFUSED = {
    "missing_wrist": without("wrist_0_image"),
    "extra_wrist": request_of(CASE, wrist_1_image=picture(FRAME)),
    "missing_state": without("state"),
    "missing_instruction": without("instruction"),
    "float_image": request_of(CASE, full_image=encode_array(FRAME.astype(np.float32))),
    "grey_image": request_of(CASE, full_image=encode_array(FRAME[:, :, 0])),
    "rgba_image": request_of(CASE, full_image=encode_array(np.dstack([FRAME, FRAME[:, :, :1]]))),
    "image_key_of_openvla": {**without("full_image"), "image": picture(FRAME)},
    "encoded_plus_other": {"encoded": "{}", "more": 1},
    "short_state": request_of(CASE, state=encode_array(CASE.state[:7])),
}


@pytest.mark.parametrize("name", ["plain", "encoded"])
def test_a_list_of_actions_is_framed_to_the_byte_as_by_the_peer(name: str) -> None:
    captured = (OFT / "wire" / f"{name}.response.bin").read_bytes()
    told = decode_json(captured)
    actions = read_answer(decode_json(told) if isinstance(told, str) else told)
    assert encode_reply(list(actions), is_encoded=name == "encoded") == captured


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_peers_own_requests_get_the_peers_own_numbers(
    client: TestClient, case: OftCase
) -> None:
    response = client.post("/act", content=json.dumps(request_of(case)), headers=JSON)
    actions = read_answer(decode_json(response.content))
    np.testing.assert_allclose(actions, case.actions, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ANSWERED)
def test_every_form_of_a_request_gets_one_answer(client: TestClient, name: str) -> None:
    response = client.post("/act", content=json.dumps(ANSWERED[name]), headers=JSON)
    told = response.json()
    assert isinstance(told, str) == (name == "encoded")
    found = read_answer(decode_json(told if isinstance(told, str) else response.content))
    np.testing.assert_allclose(found, CASE.actions, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_peers_server_cannot_answer_is_an_error_with_status_200(
    client: TestClient, name: str
) -> None:
    response = client.post("/act", content=json.dumps(REFUSED[name]), headers=JSON)
    assert (response.status_code, response.content) == (200, b'"error"')
    assert response.headers[REASON_HEADER].startswith("4")


def hello_of(socket: WebSocketTestSession) -> Mapping[str, object]:
    return read_message(unpack(socket.receive_bytes())).payload


def test_openpi_sends_wrist_and_state_and_gets_the_chunk(client: TestClient) -> None:
    seen = CASE.observation()
    (wrist,) = seen.cameras.values()
    fields = openpi.observation_fields(replace(seen, cameras={"wrist": wrist}))
    with client.websocket_connect("/") as socket:
        socket.receive_bytes()
        socket.send_bytes(pack(fields))
        chunk = openpi.read_answer(unpack(socket.receive_bytes()))
    expected = OPENPI.from_policy(CASE.actions)
    np.testing.assert_allclose(chunk.actions, expected, rtol=0, atol=TOLERANCE)


def test_vla_eval_is_asked_for_wrist_and_state_and_gets_every_action(client: TestClient) -> None:
    seen = CASE.observation()
    (wrist,) = seen.cameras.values()
    payload = {
        "images": {"agentview": seen.image, "wrist": wrist},
        "task_description": seen.instruction,
        "states": seen.state,
    }
    with client.websocket_connect("/") as socket:
        wanted = hello_of(socket)["observation_params"]
        assert wanted == {
            "send_wrist_image": True,
            "send_state": True,
            "env_seed": 0,
            "quat_no_antipodal": True,
        }
        actions = []
        for seq in range(len(CASE.actions)):
            socket.send_bytes(Message(MessageType.OBSERVATION, payload, seq, 0.0).encode())
            actions.append(read_message(unpack(socket.receive_bytes())).payload["actions"])
    expected = OPENPI.from_policy(CASE.actions)
    np.testing.assert_allclose(np.array(actions), expected, rtol=0, atol=TOLERANCE)


def test_answers_beyond_the_statistics_are_clamped_and_say_so(policy: OftPolicy) -> None:
    limits = policy.action_limits(None)
    clamped = [np.clip(case.actions, limits.low, limits.high) for case in CASES]
    exceeding = [
        not np.array_equal(inside, case.actions)
        for inside, case in zip(clamped, CASES, strict=True)
    ]
    assert any(exceeding)
    with client_of(create_app(policy)) as client:
        for case, expected, exceeds in zip(CASES, clamped, exceeding, strict=True):
            message = ActMessage(case.observation(), ActOptions())
            body = encode_request(message, wire_format=WireFormat.JSON)
            response = client.post("/v1/act", content=body, headers=JSON)
            chunk = decode_answer(response.content, WireFormat.JSON)
            np.testing.assert_allclose(chunk.actions, expected, rtol=0, atol=TOLERANCE)
            assert chunk.intervention is (Intervention.CLAMP if exceeds else None)


def test_info_says_which_pictures_and_state_an_oft_policy_looks_at(client: TestClient) -> None:
    info = client.get("/v1/info").json()
    assert (info["num_pictures"], info["state_dim"]) == (2, 8)
