"""WebSocket /v1/stream: strictly alternating, and an error does not end it."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from starlette.testclient import WebSocketTestSession

from deft_core.types import ActOptions
from deft_core.wire import codec
from deft_core.wire.images import ImageEncoding
from deft_core.wire.messages import ActMessage
from deft_policies.errors import DeviceError
from deft_server.app import create_app
from tests.server.running import client_of
from tests.standins.policies import FakePolicy, RaisingPolicy, dislikes, frame, packed

pytestmark = pytest.mark.promise

IN_SESSION = packed(ActOptions(session_id="a"))


@pytest.fixture
def socket() -> Iterator[WebSocketTestSession]:
    with (
        client_of(create_app(FakePolicy())) as client,
        client.websocket_connect("/v1/stream") as socket,
    ):
        yield socket


def count(socket: WebSocketTestSession) -> float:
    return float(codec.decode_answer(socket.receive_bytes()).actions[0, 0])


def test_frames_are_answered_one_after_the_other(socket: WebSocketTestSession):
    for expected in (1, 2, 3):
        socket.send_bytes(IN_SESSION)
        assert count(socket) == expected


def test_the_answer_repeats_the_id_of_its_frame(socket: WebSocketTestSession):
    for sent in ("one", None, "three"):
        socket.send_bytes(codec.encode_request(ActMessage(frame(), id=sent)))
        assert codec.message_id(socket.receive_bytes()) == sent


def test_frames_sent_early_are_answered_in_order(socket: WebSocketTestSession):
    for _ in range(3):
        socket.send_bytes(IN_SESSION)
    assert [count(socket) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("bad", "status", "field"),
    [
        (b"", 400, "body"),
        (b"\xc1", 400, "body"),
        (packed(ActOptions(statistics_key="nope")), 422, "statistics_key"),
    ],
)
def test_a_bad_frame_gets_a_problem_as_text_and_the_stream_goes_on(
    socket: WebSocketTestSession, bad: bytes, status: int, field: str
):
    socket.send_bytes(bad)
    problem = json.loads(socket.receive_text())
    assert (problem["status"], problem["field"]) == (status, field)
    socket.send_bytes(IN_SESSION)
    assert count(socket) == 1


def test_text_frames_are_refused(socket: WebSocketTestSession):
    socket.send_text("hello")
    assert "binary" in json.loads(socket.receive_text())["detail"]
    socket.send_bytes(IN_SESSION)
    assert count(socket) == 1


def test_pictures_are_taken_as_well_as_raw_pixels(socket: WebSocketTestSession):
    socket.send_bytes(codec.encode_request(ActMessage(frame(32)), ImageEncoding.JPEG))
    assert count(socket) == 1


def test_a_policy_that_breaks_ends_neither_the_stream_nor_the_server():
    policy = RaisingPolicy(error=dislikes("break", ValueError("secret detail")))
    with (
        client_of(create_app(policy)) as client,
        client.websocket_connect("/v1/stream") as socket,
    ):
        socket.send_bytes(packed(observation=frame(instruction="break")))
        problem = json.loads(socket.receive_text())
        assert problem["status"] == 500
        assert "secret detail" not in json.dumps(problem)
        socket.send_bytes(IN_SESSION)
        assert count(socket) == 1


def test_a_device_that_gives_up_is_a_reason_to_come_back_later():
    policy = RaisingPolicy(error=lambda _: DeviceError("CUDA out of memory"))
    with (
        client_of(create_app(policy)) as client,
        client.websocket_connect("/v1/stream") as socket,
    ):
        socket.send_bytes(IN_SESSION)
        assert json.loads(socket.receive_text())["status"] == 503


def test_many_streams_share_the_policy():
    with client_of(create_app(FakePolicy())) as client:
        sockets = [client.websocket_connect("/v1/stream").__enter__() for _ in range(8)]
        for number, socket in enumerate(sockets):
            socket.send_bytes(packed(ActOptions(session_id=f"s{number}")))
        np.testing.assert_array_equal([count(socket) for socket in sockets], np.ones(8))
        for socket in sockets:
            socket.__exit__(None, None, None)


def test_accepted_streams_are_counted_like_other_requests():
    with client_of(create_app(FakePolicy())) as client:
        with client.websocket_connect("/v1/stream"):
            pass
        assert 'deft_requests_total{route="/v1/stream",status="101"} 1.0' in (
            client.get("/metrics").text
        )
