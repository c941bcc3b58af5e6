"""WebSocket messages and what a connection holds of them, without sockets."""

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from deft_server.http.connections import PARSED_BYTES, build_websocket_protocol
from deft_server.serving.bounds import ConnectionBounds
from deft_server.settings import Settings


class Wire(asyncio.Transport):
    """Keeps what is written, and whether it is read."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._protocol = protocol
        self.written = b""
        self.is_read = True
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 1) if name == "peername" else default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def close(self) -> None:
        self.is_closed = True


def bounds_of(most: int = 10**9) -> ConnectionBounds:
    return ConnectionBounds(Settings(max_total_bytes=most))


def _built(app: Any, bounds: ConnectionBounds) -> tuple[Any, Wire, ClientProtocol]:
    """A protocol, its connection, and who will ask for a handshake."""
    config = uvicorn.Config(app, lifespan="off", ws="none")
    config.load()
    protocol = build_websocket_protocol(bounds)(config, ServerState(), {})
    wire = Wire(protocol)
    client = ClientProtocol(parse_uri("ws://127.0.0.1/"))
    protocol.connection_made(wire)
    client.send_request(client.connect())
    return protocol, wire, client


async def _connected(app: Any) -> tuple[Any, Wire, ClientProtocol]:
    """A protocol, its connection, and who is at the other end of it."""
    protocol, wire, client = _built(app, bounds_of())
    protocol.data_received(b"".join(client.data_to_send()))
    while b"\r\n\r\n" not in wire.written:
        await asyncio.sleep(0)
    client.receive_data(wire.written)
    return protocol, wire, client


async def _received(sizes: list[int], cuts: Sequence[int] = ()) -> list[bytes]:
    """The messages that the app gets.

    They arrive cut into pieces at the places given, each as soon as the one before was taken in.
    """
    messages: list[bytes] = []
    done = asyncio.Event()

    async def app(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def]
        await receive()
        await send({"type": "websocket.accept"})
        while len(messages) < len(sizes):
            messages.append((await receive())["bytes"])
        done.set()

    protocol, wire, client = await _connected(app)
    for number, size in enumerate(sizes):
        client.send_binary(bytes([number % 256]) * size)
    sent = b"".join(client.data_to_send())
    for start, stop in pairwise((0, *cuts, len(sent))):
        while not wire.is_read:
            await asyncio.sleep(0)
        protocol.data_received(sent[start:stop])
    await asyncio.wait_for(done.wait(), 30)
    return messages


def test_messages_are_the_same_wherever_the_bytes_are_cut():
    sizes = [0, 1, 125, 126, 65_535, 65_536, 200_000, 0, 3]
    rng = random.Random(0)

    for _ in range(50):
        cuts = sorted(rng.sample(range(1, sum(sizes)), 40))
        messages = asyncio.run(_received(sizes, cuts))

        assert messages == [bytes([number]) * size for number, size in enumerate(sizes)]


def test_thousands_of_messages_at_once_are_handed_on_in_order():
    messages = asyncio.run(_received([1] * 5000 + [200_000] + [1] * 5000))
    assert [len(one) for one in messages] == [1] * 5000 + [200_000] + [1] * 5000


def test_a_frame_that_comes_byte_by_byte_is_the_same():
    messages = asyncio.run(_received([300, 2], range(1, 300)))

    assert messages == [bytes(300), b"\1\1"]


def test_a_connection_lost_within_a_message_holds_nothing():
    async def lose() -> tuple[int, int]:
        ended = asyncio.Event()

        async def app(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def]
            await receive()
            await send({"type": "websocket.accept"})
            assert (await receive())["type"] == "websocket.disconnect"
            ended.set()

        protocol, _, client = await _connected(app)
        client.send_binary(bytes(300_000))
        protocol.data_received(b"".join(client.data_to_send())[:-1])
        held_before = protocol.bounds.budget.now
        protocol.connection_lost(None)
        await asyncio.wait_for(ended.wait(), 30)
        return held_before, protocol.bounds.budget.now

    held_before, held_after = asyncio.run(lose())
    assert held_before >= 299_999
    assert held_after == 0


async def _accept(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def]
    await receive()
    await send({"type": "websocket.accept"})
    await receive()


def test_a_connection_that_fails_before_its_handshake_is_closed():
    async def send_too_much() -> bool:
        protocol, wire, client = _built(_accept, bounds_of(1))
        protocol.data_received(b"".join(client.data_to_send()) + b"\x82")
        return wire.is_closed

    assert asyncio.run(send_too_much())


@pytest.mark.parametrize(
    "extra", [b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"]
)
def test_a_handshake_with_a_body_is_answered(extra: bytes):
    """It was closed without a word."""

    async def send() -> tuple[bytes, bool]:
        protocol, wire, client = _built(_accept, bounds_of())
        protocol.data_received(b"".join(client.data_to_send()).removesuffix(b"\r\n") + extra)
        return wire.written, wire.is_closed

    written, is_closed = asyncio.run(send())
    head, _, body = written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"retry-after" not in head
    assert body == b"this is no handshake of a WebSocket, which is a GET without a body\n"
    assert is_closed


def test_text_that_is_not_utf8_closes_the_connection_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
):
    async def send_text() -> tuple[bytes, bool]:
        protocol, wire, client = await _connected(_accept)
        num_taken = len(wire.written)
        client.send_text(b"\xff\xfe")
        protocol.data_received(b"".join(client.data_to_send()))
        return wire.written[num_taken:], wire.is_closed

    answer, is_closed = asyncio.run(send_text())
    assert is_closed
    assert (1007).to_bytes(2, "big") in answer
    assert not caplog.records


async def _refuse(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def]
    await receive()
    await send({"type": "websocket.accept"})
    await receive()
    await send({"type": "websocket.close", "code": 1011})


@pytest.mark.parametrize("size", [2, 100_000])
def test_a_peer_that_sends_on_after_the_close_is_cut_off(size: int):
    """Once whatever came within ten seconds was read, and in the end kept: 4 s for everybody."""

    async def go_on() -> tuple[int, bool, int]:
        protocol, wire, client = await _connected(_refuse)
        client.send_binary(bytes(size))
        message = b"".join(client.data_to_send())
        protocol.data_received(message)
        while not protocol.close_sent:
            await asyncio.sleep(0)
        num_sent = 0
        while num_sent < 1_000_000 and not wire.is_closed:
            protocol.data_received(message)
            num_sent += len(message)
        is_closed = wire.is_closed
        protocol.connection_lost(None)
        await asyncio.sleep(0)
        return num_sent, is_closed, protocol.bounds.budget.now

    num_sent, is_closed, held = asyncio.run(go_on())
    assert is_closed
    assert num_sent <= size + 2 * PARSED_BYTES
    assert held == 0


def test_the_answer_to_our_close_is_read():
    async def close() -> bool:
        protocol, wire, client = await _connected(_refuse)
        client.send_binary(b"x")
        protocol.data_received(b"".join(client.data_to_send()))
        while not protocol.close_sent:
            await asyncio.sleep(0)
        client.send_binary(b"was on its way")
        client.send_close(1011)
        protocol.data_received(b"".join(client.data_to_send()))
        return protocol.conn.close_rcvd is not None

    assert asyncio.run(close())
