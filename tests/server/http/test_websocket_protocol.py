"""What one connection may have parsed in a turn of the event loop, without sockets."""

import asyncio

import uvicorn
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from deft_server.http.bounds import build_bounds
from deft_server.http.websocket_protocol import (
    MAX_FRAMES_A_TURN,
    SLICE_BYTES,
    build_websocket_protocol,
)
from deft_server.settings import Settings


class _Wire(asyncio.Transport):
    """Keeps what is written, and reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 1) if name == "peername" else default

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass


async def _parsed(sizes: list[int]) -> tuple[list[int], list[bytes]]:
    """How many bytes each piece had that the parser was given, and the messages it found."""
    messages: list[bytes] = []
    done = asyncio.Event()

    async def app(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def]
        await receive()
        await send({"type": "websocket.accept"})
        while len(messages) < len(sizes):
            messages.append((await receive())["bytes"])
        done.set()

    config = uvicorn.Config(app, lifespan="off", ws="none")
    config.load()
    build = build_websocket_protocol(build_bounds(Settings()))
    protocol, wire = build(config, ServerState(), {}), _Wire()
    client = ClientProtocol(parse_uri("ws://127.0.0.1/"))
    protocol.connection_made(wire)
    client.send_request(client.connect())
    protocol.data_received(b"".join(client.data_to_send()))
    while b"\r\n\r\n" not in wire.written:
        await asyncio.sleep(0)
    client.receive_data(wire.written)
    pieces: list[int] = []
    receive_data = protocol.conn.receive_data

    def counted(data: bytes) -> None:
        pieces.append(len(data))
        receive_data(data)

    protocol.conn.receive_data = counted  # type: ignore[method-assign]
    for number, size in enumerate(sizes):
        client.send_binary(bytes([number % 256]) * size)
    protocol.data_received(b"".join(client.data_to_send()))
    await asyncio.wait_for(done.wait(), 30)
    return pieces, messages


def test_the_rest_of_a_large_frame_is_parsed_at_once_and_what_follows_it_is_not():
    sizes = [200_000] + [1] * 5000

    pieces, messages = asyncio.run(_parsed(sizes))

    assert [len(one) for one in messages] == sizes
    assert len(pieces) >= 2
    assert pieces[0] == SLICE_BYTES
    assert sum(pieces[:2]) == 200_000 + 14  # with its header, and not a byte of what follows
    assert max(pieces[2:]) <= SLICE_BYTES


def test_small_frames_are_parsed_slice_by_slice():
    pieces, messages = asyncio.run(_parsed([1] * 5000))

    assert len(messages) == 5000 > MAX_FRAMES_A_TURN
    assert max(pieces) <= SLICE_BYTES
