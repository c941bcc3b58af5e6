"""What one connection may have parsed in a turn of the event loop, without sockets."""

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import uvicorn
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.uri import parse_uri

from deft_server.http.bounds import ConnectionBounds, build_bounds
from deft_server.http.websocket_protocol import MAX_FRAMES_A_TURN, build_websocket_protocol
from deft_server.serving.held_bytes import HeldBytes
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
    protocol, wire, client = _built(app, build_bounds(Settings(), HeldBytes(10**9)))
    protocol.data_received(b"".join(client.data_to_send()))
    while b"\r\n\r\n" not in wire.written:
        await asyncio.sleep(0)
    client.receive_data(wire.written)
    return protocol, wire, client


async def _parsed(sizes: list[int], cuts: Sequence[int] = ()) -> tuple[list[int], list[bytes]]:
    """How many frames every turn of the event loop had parsed, and the messages.

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
    counts: list[int] = []
    handle_events = protocol.handle_events

    def counted() -> None:
        counts.append(len(protocol.conn.events))
        handle_events()

    protocol.handle_events = counted
    for start, stop in pairwise((0, *cuts, len(sent))):
        while not wire.is_read:
            await asyncio.sleep(0)
        protocol.data_received(sent[start:stop])
    await asyncio.wait_for(done.wait(), 30)
    return counts, messages


def test_a_turn_of_the_loop_has_few_frames_parsed_however_many_arrived():
    counts, messages = asyncio.run(_parsed([200_000] + [1] * 5000))

    assert [len(one) for one in messages] == [200_000] + [1] * 5000
    assert sum(counts) == 5001
    assert max(counts) <= MAX_FRAMES_A_TURN


def test_messages_are_the_same_wherever_the_bytes_are_cut():
    sizes = [0, 1, 125, 126, 65_535, 65_536, 200_000, 0, 3]
    rng = random.Random(0)

    for _ in range(50):
        cuts = sorted(rng.sample(range(1, sum(sizes)), 40))
        _, messages = asyncio.run(_parsed(sizes, cuts))

        assert messages == [bytes([number]) * size for number, size in enumerate(sizes)]


def test_a_frame_that_comes_byte_by_byte_is_the_same():
    _, messages = asyncio.run(_parsed([300, 2], range(1, 300)))

    assert messages == [bytes(300), b"\1\1"]


def test_answers_of_every_length_are_what_the_library_reads():
    answers = [bytes(size) for size in (0, 1, 125, 126, 255, 256, 65_535, 65_536)]

    async def send_all() -> list[bytes]:
        ended = asyncio.Event()

        async def app(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def]
            await receive()
            await send({"type": "websocket.accept"})
            for answer in answers:
                await send({"type": "websocket.send", "bytes": answer})
            ended.set()

        _, wire, client = await _connected(app)
        num_taken = len(wire.written)
        await asyncio.wait_for(ended.wait(), 30)
        client.receive_data(wire.written[num_taken:])
        return [bytes(one.data) for one in client.events_received() if isinstance(one, Frame)]

    assert asyncio.run(send_all()) == answers


def test_a_connection_lost_in_the_middle_of_a_message_holds_nothing_any_more():
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
        held_before = protocol.bounds.held.now
        protocol.connection_lost(None)
        await asyncio.wait_for(ended.wait(), 30)
        return held_before, protocol.bounds.held.now

    assert asyncio.run(lose()) == (299_999, 0)


async def _accept(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def]
    await receive()
    await send({"type": "websocket.accept"})
    await receive()


def test_who_has_sent_everything_is_not_late_when_our_turns_take_long():
    async def wait_long() -> tuple[bytes, bool]:
        bounds = build_bounds(Settings(body_timeout_s=0.01), HeldBytes(10**9))
        protocol, wire, client = _built(_accept, bounds)
        waiting: list[Callable[[], None]] = []
        bounds.calls.make = lambda _, call: waiting.append(call)  # type: ignore[method-assign]
        protocol.data_received(b"".join(client.data_to_send()))
        while len(waiting) < 2:  # until the time is up, too
            await asyncio.sleep(0.01)
        for call in waiting:
            call()
        while not wire.written:
            await asyncio.sleep(0)
        return wire.written, wire.is_closed

    answer, is_closed = asyncio.run(asyncio.wait_for(wait_long(), 30))

    assert answer.startswith(b"HTTP/1.1 101 ")
    assert not is_closed


def test_a_connection_that_fails_before_its_handshake_is_closed():
    async def send_too_much() -> bool:
        protocol, wire, client = _built(_accept, build_bounds(Settings(), HeldBytes(0)))
        protocol.data_received(b"".join(client.data_to_send()) + b"\x82")
        return wire.is_closed

    assert asyncio.run(send_too_much())
