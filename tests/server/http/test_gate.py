"""The gate's bounds on what a request says, without sockets."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from starlette.types import Message

from deft_core.errors import UnsupportedMessageError
from deft_core.wire import codec
from deft_core.wire.images import ImageEncoding
from deft_core.wire.limits import ReadContext
from deft_core.wire.messages import ActMessage
from deft_policies.constant import ConstantPolicy
from deft_server.app import DeftApp, create_app
from deft_server.http.frame_bodies import decode_body
from deft_server.http.gate import SMALL_BODY_BYTES
from deft_server.serving.bounds import NUM_THREADS
from tests.server.running import client_of
from tests.server.serving.test_service import on_a_loop
from tests.standins.policies import PATIENCE_S, frame

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("/v1/acts", "did you mean /v1/act?"),
        ("/v1/act/", "did you mean /v1/act?"),
        ("/api/v1/act", "did you mean /v1/act?"),
        ("/v1/v1/act", "did you mean /v1/act?"),
        ("/act/", "did you mean /act?"),
        ("/predict", "did you mean /predict_base64?"),
        ("/answers", "POST /v1/act"),
    ],
)
def test_a_frame_at_a_wrong_path_is_told_the_right_one(wrong: str, right: str):
    with client_of(create_app(ConstantPolicy())) as client:
        response = client.post(wrong, content=b"x" * 200_000)
        assert response.status_code == 404
        assert right in response.json()["detail"]
        assert "takes POST" in client.get("/v1/act").json()["detail"]


@pytest.mark.parametrize("path", ["/v1/reset", "/v1/admin/reset_all", "/v1/info", "/nowhere"])
def test_a_request_that_is_no_frame_has_a_small_body(path: str):
    """Sixteen megabytes of a reset once were parsed on the event loop."""
    body = b'{"session_id": "' + b"a" * SMALL_BODY_BYTES + b'"}'
    with client_of(create_app(ConstantPolicy())) as client:
        by_length = client.post(path, content=body, headers=JSON)
        assert by_length.status_code in (403, 404, 405, 413)
        if path == "/v1/reset":
            in_parts = client.post(path, content=iter([body[:1000], body[1000:]]), headers=JSON)
            assert (by_length.status_code, in_parts.status_code) == (413, 413)


def test_the_longest_name_fits_a_reset_however_it_is_escaped():
    body = b'{"session_id": "' + b"\\ud83e\\uddbe" * 128 + b'"}'
    with client_of(create_app(ConstantPolicy())) as client:
        assert client.post("/v1/reset", content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize("length", ["9" * 5000, "0" * 5000 + "99999999999", "99999999999"])
def test_a_length_of_any_number_of_digits_is_too_large(length: str):
    headers = JSON | {"content-length": length}
    with client_of(create_app(ConstantPolicy())) as client:
        assert client.post("/v1/act", headers=headers).status_code == 413


def test_a_content_type_of_semicolons_is_refused_unread():
    """The standard library needs quadratic time for it: 14.6 s for 160 kB."""
    with client_of(create_app(ConstantPolicy())) as client:
        headers = {"content-type": "multipart/form-data" + ";" * 160_000}
        assert client.post("/v1/act", content=b"x", headers=headers).status_code == 415
    with pytest.raises(UnsupportedMessageError, match="application/msgpack"):
        decode_body("multipart/form-data" + ";" * 160_000, b"x", ReadContext())


@on_a_loop
async def test_a_caller_that_hangs_up_in_the_middle_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO)
    async with _started() as app:
        await _hang_up(app, {"type": "http.request", "body": b"\x80", "more_body": True})
    assert not [one for one in caplog.records if one.exc_info or one.levelname == "ERROR"]


@on_a_loop
async def test_a_picture_whose_caller_hung_up_is_not_decoded():
    """The policy answers at once, but the threads that decode may be busy with others for long."""
    gate = threading.Event()
    hold = partial(gate.wait, PATIENCE_S)
    body = codec.encode_request(ActMessage(frame()), ImageEncoding.PNG)
    async with _started() as app:
        threads = app.service.threads
        busy = [asyncio.ensure_future(threads.run(hold)) for _ in range(NUM_THREADS)]
        await asyncio.sleep(0)
        await _hang_up(app, {"type": "http.request", "body": body})
        gate.set()
        await asyncio.gather(*busy)


@asynccontextmanager
async def _started() -> AsyncIterator[DeftApp]:
    app = create_app(ConstantPolicy())
    app.service.start()
    await app.service.scheduler.settled()
    try:
        yield app
    finally:
        await app.service.close()


async def _hang_up(app: DeftApp, sent: Message) -> None:
    """Post a frame, or a part of it, and go away."""
    to_come: list[Message] = [{"type": "http.disconnect"}, sent]

    async def receive() -> Message:
        return to_come.pop()

    async def send(message: Message) -> None:
        raise AssertionError("nobody is left to be told")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/act",
        "raw_path": b"/v1/act",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/msgpack")],
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, send)


def test_the_dashboard_with_a_slash_sends_nobody_anywhere():
    with client_of(create_app(ConstantPolicy())) as client:
        assert client.get("/dashboard/", follow_redirects=False).status_code == 200
        assert client.get("/v1/info/", follow_redirects=False).status_code == 404
