"""Damaged messages, and requests drawn from the OpenAPI document: no 5xx, no hang, nothing left.

Some hundreds of each here; `tests/tools/fuzz_wire.py` sends ten thousand per protocol.
"""

import asyncio
import gc
import json
import logging
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from starlette.types import Message

from deft_core.types import ActOptions, Observation
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_core.wire.images import ImageEncoding, encode_image
from deft_core.wire.messages import ActMessage
from deft_server.app import DeftApp, create_app
from tests.core.peers.mutations import mutate
from tests.server.process import serving
from tests.standins.policies import FakePolicy, frame

NUM_MESSAGES = 1600
# Caches, counters and the dashboard's timeline may fill; each message may not leave anything.
KEPT_OBJECTS = 1000
BOUNDARY = "xyz"
FUZZ = settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)


def form() -> bytes:
    image = encode_image(frame(8).image, ImageEncoding.PNG)
    parts = [b'name="instruction"\r\n\r\nlift', b'name="state"\r\n\r\n[1, 2]']
    parts.append(b'name="image"; filename="x.png"\r\n\r\n' + image)
    start = f"--{BOUNDARY}\r\ncontent-disposition: form-data; ".encode()
    return b"\r\n".join(start + part for part in parts) + f"\r\n--{BOUNDARY}--\r\n".encode()


SEEN = Observation(frame(8).image, "lift the cup", {"wrist": frame(4).image})
ASKED = ActMessage(SEEN, ActOptions("a", None, "constant", "constant", 3, True))
BODIES = {
    WireFormat.MSGPACK.value: [codec.encode_request(ASKED, one) for one in ImageEncoding],
    WireFormat.JSON.value: [
        codec.encode_request(ASKED, one, wire_format=WireFormat.JSON) for one in ImageEncoding
    ],
    f"multipart/form-data; boundary={BOUNDARY}": [form()],
}


async def post(app: DeftApp, content_type: str, body: bytes) -> int:
    """Return the status of an answer, without the cost of a client."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/act",
        "raw_path": b"/v1/act",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", content_type.encode())],
        "client": ("127.0.0.1", 1),
    }
    to_come: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    said: list[Message] = []

    async def receive() -> Message:
        if to_come:
            return to_come.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        said.append(message)

    await app(scope, receive, send)
    return int(said[0]["status"])


async def num_objects() -> int:
    """What is kept once the clocks of what was answered in time have run out."""
    await asyncio.sleep(0.1)
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("content_type", BODIES)
def test_no_damaged_body_is_the_servers_fault(content_type: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.ERROR)  # kept log records would look like a leak
    rng = random.Random(0)

    async def fuzz() -> None:
        policy = FakePolicy()
        app = create_app(policy)
        app.service.start()
        await app.service.scheduler.settled()
        before = 0
        for number in range(NUM_MESSAGES):
            damaged = mutate(rng.choice(BODIES[content_type]), rng)
            status = await post(app, content_type, damaged)
            assert status < 500, damaged
            if number == NUM_MESSAGES // 4:
                app.service.reset_all()
                policy.batches.clear()
                before = await num_objects()
        app.service.reset_all()
        policy.batches.clear()
        assert await num_objects() < before + KEPT_OBJECTS
        assert await post(app, content_type, BODIES[content_type][0]) == 200
        await app.service.close()

    # One clock for all: those of single messages are kept for a while after they were cancelled.
    asyncio.run(asyncio.wait_for(fuzz(), 120))


def test_no_damaged_frame_is_the_streams_fault():
    rng = random.Random(0)
    statuses: list[int] = []

    async def fuzz() -> None:
        policy = FakePolicy()
        app = create_app(policy)
        app.service.start()
        await app.service.scheduler.settled()
        frames = iter(range(NUM_MESSAGES))

        async def receive() -> Message:
            number = next(frames, None)
            if number is None:
                return {"type": "websocket.disconnect", "code": 1000}
            if number == 0:
                return {"type": "websocket.connect"}
            body = mutate(rng.choice(BODIES[WireFormat.MSGPACK.value]), rng)
            return {"type": "websocket.receive", "bytes": body}

        async def send(message: Message) -> None:
            if "text" in message:
                statuses.append(json.loads(message["text"])["status"])
            elif message["type"] == "websocket.send":
                statuses.append(200)

        scope = {
            "type": "websocket",
            "path": "/v1/stream",
            "headers": [(b"host", b"localhost")],
            "query_string": b"",
        }
        await asyncio.wait_for(app(scope | {"client": ("127.0.0.1", 1)}, receive, send), 120)
        await app.service.close()

    asyncio.run(fuzz())
    assert len(statuses) == NUM_MESSAGES - 1
    assert max(statuses) < 500
    assert 200 in statuses


def test_the_server_does_what_its_document_says():
    # Imported here: it takes seconds, and only this test needs it.
    import schemathesis
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    checks = [
        CHECKS.get_one(name)
        for name in (
            "not_a_server_error",
            "status_code_conformance",
            "content_type_conformance",
            "response_schema_conformance",
        )
    ]
    with serving() as server:
        server.wait_until_ready()
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        paths = set()
        for found in document.get_all_operations():
            operation = found.ok()
            paths.add(operation.path)

            @FUZZ
            @given(case=operation.as_strategy())
            def conforms(case: schemathesis.Case) -> None:
                response = case.call()
                late = response.status_code == 504  # a drawn deadline may be a millisecond
                case.validate_response(response, checks=checks[late:])

            conforms()
    assert {"/v1/act", "/v1/reset", "/v1/info", "/readyz", "/metrics"} <= paths
