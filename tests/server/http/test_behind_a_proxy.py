"""Behind a trusted proxy bounds are those of the caller whom it names, and not of the proxy."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import msgpack
import pytest
import websockets.sync.client
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from tests.server.process import ServerProcess, serving
from tests.standins.policies import MSGPACK, PATIENCE_S, frame, packed

HELD = 100_000
CONNECTIONS = 3
SETTINGS = (
    f"trusted_proxies=('127.0.0.1',), max_total_bytes={HELD}, "
    f"max_connections_per_address={CONNECTIONS}"
)
GREEDY, ROBOT = "192.0.2.1", "192.0.2.2"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(settings=SETTINGS) as server:
        server.wait_until_ready()
        yield server


def stream(server: ServerProcess, caller: str) -> ClientConnection:
    """A stream that the proxy opens for somebody."""
    return websockets.sync.client.connect(
        f"ws://127.0.0.1:{server.port}/v1/stream",
        additional_headers={"x-forwarded-for": caller},
        compression=None,
        close_timeout=0.1,
    )


def act(server: ServerProcess, caller: str) -> int:
    """The status of a frame that the proxy hands on for somebody."""
    headers = {**MSGPACK, "x-forwarded-for": caller}
    return httpx.post(f"{server.url}/v1/act", content=packed(), headers=headers).status_code


def refusal(server: ServerProcess, caller: str) -> int:
    with pytest.raises(InvalidStatus) as refused:
        stream(server, caller).__enter__()
    return refused.value.response.status_code


def begin_message(opened: ClientConnection, size: int, part: int) -> None:
    """Send a part of a message."""
    head = b"\x82\xff" + size.to_bytes(8, "big") + bytes(4)
    opened.socket.sendall(head + bytes(part))


def first_refusal(streams: list[ClientConnection]) -> str:
    """Why one of them was closed; which one depends on what was read when."""
    while True:
        for opened in streams:
            try:
                opened.recv(0.01)
            except TimeoutError:
                continue
            except ConnectionClosed as closed:
                return str(closed)


def test_who_leaves_messages_unfinished_closes_no_stream_of_others(server: ServerProcess):
    """Once three unfinished messages of one client closed the streams of all: 54 of 54."""
    body = packed(observation=frame(40))
    with ExitStack() as held, stream(server, ROBOT) as robot:
        greedy = [held.enter_context(stream(server, GREEDY)) for _ in range(CONNECTIONS)]
        for opened in greedy[:2]:
            begin_message(opened, 300_000, HELD // 2 - 1000)
        for _ in range(100):
            robot.send(body)
            assert "actions" in msgpack.unpackb(robot.recv(PATIENCE_S))
        assert act(server, ROBOT) == 200
        begin_message(greedy[2], 300_000, 30_000)
        assert "too many bytes" in first_refusal(greedy)


def test_a_caller_has_so_many_connections_and_others_have_theirs(server: ServerProcess):
    with ExitStack() as held:
        streams = [held.enter_context(stream(server, GREEDY)) for _ in range(CONNECTIONS)]
        assert refusal(server, GREEDY) == 429
        assert act(server, GREEDY) == 429
        with stream(server, ROBOT) as robot:
            robot.send(packed())
            assert "actions" in msgpack.unpackb(robot.recv(PATIENCE_S))
        assert act(server, ROBOT) == 200
        streams[0].close()
        for _ in range(1000):  # until the server has noticed
            if act(server, GREEDY) == 200:
                break
        held.enter_context(stream(server, GREEDY))


def test_requests_whose_bodies_do_not_come_are_connections_too(server: ServerProcess):
    head = (
        b"POST /v1/act HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/msgpack\r\n"
        b"x-forwarded-for: 192.0.2.1\r\ncontent-length: 1000\r\n\r\nx"
    )
    with ExitStack() as held:
        for _ in range(CONNECTIONS):
            caller = socket.create_connection(("127.0.0.1", server.port), timeout=120)
            held.enter_context(caller).sendall(head)
        # Until the first refusal: a hundred may take longer than bodies may take to come.
        statuses: list[int] = []
        while len(statuses) < 100 and 429 not in statuses:
            statuses.append(act(server, GREEDY))
        assert statuses[-1] == 429
        assert set(statuses) <= {200, 429}
        assert act(server, ROBOT) == 200
