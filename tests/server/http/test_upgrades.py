"""Offers to go on with another protocol than WebSocket: the request is answered as any other.

Whatever follows such a request once was parsed as the next one, so that a body could hold a request
of which the proxy before the server knew nothing. Its answer went to whoever was next.
"""

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from deft_server.http import connections
from deft_server.http.connections import build_http_protocol
from deft_server.serving.bounds import ConnectionBounds
from deft_server.settings import Settings

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
OFFERS = {
    "plain": b"connection: Upgrade\r\nupgrade: foo\r\n",
    "h2c": b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nConnection: Upgrade, HTTP2-Settings\r\n",
    "several": b"upgrade: foo, websocket\r\nconnection: keep-alive, upgrade\r\n",
    "twice": b"upgrade: websocket\r\nupgrade: foo\r\nconnection: upgrade\r\n",
    "elsewhere": b"upgrade: websocket\r\nconnection: upgrade\r\nconnection: keep-alive\r\n",
}
BOUNDS = ConnectionBounds(Settings())
Heard = list[tuple[str, bytes]]


@pytest.fixture(params=["httptools", "h11"])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """What reads HTTP, where httptools is at hand and where it is not."""
    if request.param == "h11":
        monkeypatch.setattr(connections, "find_spec", lambda name: None)
    return build_http_protocol(BOUNDS)


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.BaseProtocol
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 1) if name == "peername" else default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        """Nothing is read here."""

    def resume_reading(self) -> None:
        """Nothing is read here."""

    def close(self) -> None:
        self.is_closed = True


def heard_of(make_protocol: type[Any], parts: Sequence[bytes]) -> tuple[Heard, Wire]:
    """The requests that the app gets of what arrives in parts, and the connection."""
    heard: Heard = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, is_whole = b"", False
        while not is_whole:
            message = await receive()
            assert message["type"] == "http.request"
            body, is_whole = body + message["body"], not message["more_body"]
        heard.append((scope["path"], body))
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async def feed() -> Wire:
        config = uvicorn.Config(app, lifespan="off", ws="websockets-sansio")
        config.load()
        wire = Wire()
        wire.protocol = protocol = make_protocol(config, ServerState(), {})
        protocol.connection_made(wire)
        for part in parts:
            if not wire.is_closed:
                protocol.data_received(part)
            for _ in range(200):  # more turns than the answers take
                await asyncio.sleep(0)
        protocol.connection_lost(None)
        return wire

    return heard, asyncio.run(feed())


def posted(path: str, body: bytes, offer: bytes, is_chunked: bool = False) -> bytes:
    framing, content = b"content-length: %d\r\n" % len(body), body
    if is_chunked:
        framing, content = b"transfer-encoding: chunked\r\n", b"%x\r\n%b\r\n" % (len(body), body)
        content += b"0\r\n\r\n"
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n".encode() + offer + framing + b"\r\n"
    return head + content


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_a_body_behind_a_foreign_upgrade_is_a_body_and_no_request(
    protocol: type[Any], offer: bytes, is_chunked: bool
):
    sent = posted("/act", SMUGGLED, offer, is_chunked)
    after_head = sent.index(b"\r\n\r\n") + 4
    for parts in ([sent], [sent[:after_head], sent[after_head:]]):
        heard, wire = heard_of(protocol, parts)

        assert heard == [("/act", SMUGGLED)]
        assert wire.written.count(b"HTTP/1.1 ") == 1


def test_requests_with_offers_are_read_alike_wherever_the_bytes_are_cut(protocol: type[Any]):
    requests = [
        (f"/{name}", SMUGGLED * number, offer, is_chunked)
        for number, (name, offer) in enumerate([*OFFERS.items(), ("none", b"")], start=1)
        for is_chunked in (False, True)
    ]
    sent = b"".join(posted(*one) for one in requests)
    rng = random.Random(0)
    for _ in range(30):
        cuts = sorted(rng.sample(range(1, len(sent)), 25))
        heard, wire = heard_of(
            protocol, [sent[start:end] for start, end in pairwise((0, *cuts, len(sent)))]
        )

        assert heard == [(path, body) for path, body, _, _ in requests]
        assert wire.written.count(b"HTTP/1.1 200 ") == len(requests)


def test_an_offer_without_a_body_is_answered_and_so_is_what_comes_after_it(protocol: type[Any]):
    offer = b"GET /one HTTP/1.1\r\nhost: 127.0.0.1\r\n" + OFFERS["h2c"] + b"\r\n"

    heard, _ = heard_of(protocol, [offer + SMUGGLED, SMUGGLED])

    assert [path for path, _ in heard] == ["/one", "/smuggled", "/smuggled"]


def test_a_tunnel_is_refused_and_nothing_behind_it_is_read():
    tunnel = b"CONNECT example.com:80 HTTP/1.1\r\nhost: example.com\r\n\r\n"

    heard, wire = heard_of(build_http_protocol(BOUNDS), [tunnel + SMUGGLED, SMUGGLED])

    assert heard == []
    assert wire.is_closed
    assert wire.written.startswith(b"HTTP/1.1 4")
