"""POST /act answers OpenVLA's and OpenVLA-OFT's clients as their own servers do."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from fastapi.testclient import TestClient

from deft_core.image_chain import ImageChain
from deft_core.peers.conventions import Gripper
from deft_core.peers.openvla import ActBody, decode_act_body
from deft_core.wire.limits import WireLimits
from deft_policies.constant import ConstantPolicy
from deft_server.compat import act_route
from deft_server.compat.act_route import ERRORS_HEADER, REASON_HEADER
from deft_server.compat.profiles import conventions
from deft_server.errors import OverloadedError
from deft_server.serving.events import Event, FinishedAction
from deft_server.settings import Settings
from tests.core.peers.captures import ActCapture, act_capture, act_captures
from tests.server.running import client_of
from tests.standins.peers import ThreeDatasets, build_app

JSON = {"content-type": "application/json"}
PROBLEM = {**JSON, ERRORS_HEADER: "problem"}


def action_in(response: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    fields = json.loads(response)
    if isinstance(fields, str):
        fields = json.loads(fields)
    return np.frombuffer(base64.b64decode(fields["__numpy__"]), fields["dtype"])


@pytest.fixture
def client() -> Iterator[TestClient]:
    actions = {
        "libero_spatial": action_in(act_capture("plain").response),
        "lab_arm_no_noops": action_in(act_capture("encoded").response),
    }
    with client_of(build_app(ThreeDatasets(actions))) as client:
        yield client


@pytest.mark.parametrize("capture", act_captures(), ids=lambda one: one.name)
def test_every_captured_request_gets_the_captured_reply(
    client: TestClient, capture: ActCapture
) -> None:
    headers = {"content-type": capture.content_type} if capture.content_type else {}
    response = client.request(capture.method, "/act", content=capture.request, headers=headers)
    assert response.status_code == capture.status
    if capture.method == "POST":
        assert response.content == capture.response
        assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("name", "status", "field"),
    [
        ("error_missing_image", 400, "image"),
        ("error_missing_instruction", 400, "instruction"),
        ("error_list_image", 422, "image"),
        ("error_float_image", 422, "image"),
        ("error_number_instruction", 422, "instruction"),
        ("error_bad_unnorm_key", 422, "statistics_key"),
        ("error_no_unnorm_key", 422, "statistics_key"),
        ("error_encoded_plus_extra", 400, "encoded"),
        ("status_invalid_json", 400, "body"),
        ("status_not_an_object", 400, "body"),
        ("status_empty_body", 400, "body"),
    ],
)
def test_a_client_that_asks_for_problems_gets_a_status_and_the_field(
    client: TestClient, name: str, status: int, field: str
) -> None:
    response = client.post("/act", content=act_capture(name).request, headers=PROBLEM)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["field"] == field


def test_a_legacy_error_carries_its_reason_in_a_header(client: TestClient) -> None:
    response = client.post(
        "/act", content=act_capture("error_bad_unnorm_key").request, headers=JSON
    )
    assert response.content == b'"error"'
    assert "no_such_dataset" in response.headers[REASON_HEADER]
    assert "libero_spatial" in response.headers[REASON_HEADER]


def test_a_reason_with_foreign_letters_is_a_legal_header(client: TestClient) -> None:
    body = json.dumps({"image": 1, "instruction": "x", "unnorm_key": "naïve\r\nx: y"})
    response = client.post("/act", content=body, headers=JSON)
    assert response.content == b'"error"'
    assert response.headers[REASON_HEADER].isascii()


def test_a_raising_policy_is_an_error_to_every_client(
    client: TestClient,
) -> None:
    fields = json.loads(act_capture("plain").request)
    body = json.dumps({**fields, "instruction": "fail"})
    assert client.post("/act", content=body, headers=JSON).content == b'"error"'
    response = client.post("/act", content=body, headers=PROBLEM)
    assert response.status_code == 500
    assert "deliberate" not in response.text


def test_frames_of_one_session_header_share_a_session() -> None:
    policy = ThreeDatasets(default_key="bridge")
    body = act_capture("plain").request
    with client_of(build_app(policy)) as client:
        for session in ("a", "a", "b"):
            headers = {**JSON, "x-deft-session": session}
            assert client.post("/act", content=body, headers=headers).content != b'"error"'
    assert policy.num_sessions == 2


def test_a_legacy_frame_waits_where_others_are_told_to_try_again() -> None:
    """Every frame without a session is a newcomer's, and `"error"` would stop such a robot.

    Each was once offered to the service again and again, and every refusal counted and published.
    """
    policy = ThreeDatasets(default_key="bridge", gate=threading.Event())
    body = act_capture("plain").request
    app = build_app(policy, Settings(max_batch=1, max_waiting=1))
    published: list[Event] = []
    app.service.events.listen(published.append)
    with client_of(app) as client, ThreadPoolExecutor() as robots:
        waiting = [robots.submit(client.post, "/act", content=body, headers=JSON) for _ in range(4)]
        while app.service.num_in_hand < 4 or not app.service.scheduler.num_waiting:
            time.sleep(0.001)
        assert client.post("/act", content=body, headers=PROBLEM).status_code == 429
        assert policy.gate is not None
        policy.gate.set()
        answers = [one.result(120).content for one in waiting]
    assert len(policy.seen) == 4
    assert b'"error"' not in answers
    finished = [one for one in published if isinstance(one, FinishedAction)]
    assert [type(one.error) for one in finished if one.error is not None] == [OverloadedError]
    assert (
        b'deft_unanswered_frames_total{reason="OverloadedError"} 1.0' in app.service.metrics.page()
    )


def test_the_oft_profile_takes_its_fields_and_replies_with_a_list() -> None:
    policy = ThreeDatasets(default_key="bridge", steps=8)
    image = json.loads(act_capture("plain").request)["image"]
    fields = {"full_image": image, "left_wrist_image": image, "instruction": "x"}
    with client_of(build_app(policy, Settings(profile="oft"))) as client:
        plain = client.post("/act", json=fields)
        encoded = client.post("/act", json={"encoded": json.dumps(fields)})
    actions = [np.frombuffer(base64.b64decode(one["__numpy__"])) for one in plain.json()]
    assert len(actions) == 8
    np.testing.assert_array_equal(actions[3], policy.actions["bridge"] + 0.003)
    assert json.loads(encoded.json()) == plain.json()
    assert list(policy.seen[0].cameras) == ["left_wrist_image"]


def test_a_body_beyond_the_limit_is_refused() -> None:
    app = build_app(ThreeDatasets(), Settings(max_body_bytes=10_000))
    with client_of(app) as client:
        response = client.post("/act", content=act_capture("plain").request, headers=JSON)
    assert response.status_code == 413


def test_what_is_echoed_of_a_wrong_body_is_short(client: TestClient) -> None:
    response = client.post("/act", content=json.dumps(["x" * 50_000]), headers=JSON)
    assert response.status_code == 422
    assert len(response.content) < 1000


def test_config_shows_batching_and_says_why_it_cannot_be_changed(client: TestClient) -> None:
    assert client.get("/config").json()["config"] == {"max_batch_size": 8, "max_wait_time": 0.0}
    response = client.get("/config?max_batch_size=4&nonsense=1")
    assert response.status_code == 422
    assert response.json()["errors"] == [
        "max_batch_size is set when the server starts (--max-batch)",
        "unknown key: nonsense",
    ]


def test_frames_are_prepared_where_the_settings_say_so() -> None:
    policy = ThreeDatasets(default_key="bridge")
    body = act_capture("plain_extra_key").request
    with client_of(build_app(policy, Settings(act_image_chain=ImageChain.LIBERO))) as client:
        assert client.post("/act", content=body, headers=JSON).content != b'"error"'
        info = client.get("/v1/info").json()["details"]
    sent = decode_act_body(body).fields["image"]
    assert isinstance(sent, np.ndarray)
    np.testing.assert_array_equal(policy.seen[0].image, ImageChain.LIBERO.apply(sent, 224))
    assert "'none' by the policy" in info["POST /act (openvla)"]
    assert "'none' by this protocol" in info["WebSocket / (openpi)"]
    assert "+1 closes" in info["WebSocket / (vla-eval)"]


@pytest.mark.parametrize(
    ("details", "ours", "openvlas"),
    [
        ({}, "for OpenVLA 0 closes and 1 opens", "for OpenVLA 0 closes and 1 opens"),
        ({"gripper": Gripper.ROBOSUITE.meaning}, "+1 closes, -1 opens", "+1 closes, -1 opens"),
        ({"gripper": "0 or 1"}, "0 or 1", "0 or 1"),
    ],
)
def test_info_says_which_sign_closes_the_gripper_in_our_own_protocol_too(
    details: dict[str, str], ours: str, openvlas: str
) -> None:
    info = replace(ConstantPolicy().info, details=details)
    told = conventions(Settings(), info)
    assert f"{ours}; reply" in told["POST /v1/act, WebSocket /v1/stream (deft)"]
    assert f"{openvlas}; reply" in told["POST /act (openvla)"]
    assert "gripper: +1 closes, -1 opens;" in told["WebSocket / (openpi)"]


@pytest.mark.parametrize(("more", "on_a_thread"), [("", False), (f', "x": [{"0," * 2000}0]', True)])
def test_a_body_of_very_many_values_is_read_on_a_thread(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, more: str, on_a_thread: bool
) -> None:
    """A megabyte of numbers took 200 ms, in which nobody else was answered."""
    readers: list[str] = []

    def noting(body: bytes, limits: WireLimits) -> ActBody:
        readers.append(threading.current_thread().name)
        return decode_act_body(body, limits)

    monkeypatch.setattr(act_route, "decode_act_body", noting)
    capture = act_captures()[0]
    body = capture.request.rstrip().removesuffix(b"}") + more.encode() + b"}"
    client.request(
        capture.method, "/act", content=body, headers={"content-type": "application/json"}
    )
    assert [name.startswith("decode") for name in readers] == [on_a_thread]
