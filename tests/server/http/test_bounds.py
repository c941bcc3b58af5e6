"""What one connection may take of a server, over real sockets; here each bound is passed once.

`python -m tests.tools.attack` measures the same under floods.
"""

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from deft_server.http.connections import MAX_CONTROLS, MAX_FRAGMENTS, MAX_HEADERS, MAX_PIPELINED
from deft_server.serving.bounds import ConnectionBounds
from deft_server.settings import Settings
from tests.server.process import ServerProcess, serving
from tests.standins.policies import MSGPACK, packed

HELD = 400_000
CONNECTIONS = 20
SETTINGS = (
    f"max_total_bytes={HELD}, max_header_bytes=16384, body_timeout_s=3.0, "
    f"max_connections_per_address={CONNECTIONS}"
)
CHUNKED = (
    b"POST /v1/act HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/msgpack\r\n"
    b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
)
HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(settings=SETTINGS) as server:
        server.wait_until_ready()
        yield server


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=120)


def cut_off(server: ServerProcess, head: bytes, again: bytes = b"") -> tuple[bytes, int]:
    """Return what the server says, and the bytes it took of what never ends."""
    taken = 0
    with connect(server) as caller:
        caller.sendall(head)
        try:
            while again and taken < 100_000_000:
                taken += caller.send(again)
        except OSError:
            pass
        try:
            return caller.recv(65536), taken
        except OSError:
            return b"", taken


@pytest.mark.parametrize(
    ("head", "again"),
    [
        (b"GET /healthz HTTP/1.1\r\nx-big: ", b"a" * 65536),
        (b"GET /healthz HTTP/1.1\r\n", b"x-one: 1\r\n" * 6000),
        (b"GET /", b"a" * 65536),
        (CHUNKED + b"x-big: ", b"a" * 65536),
        (CHUNKED, b"x-one: 1\r\n" * 6000),
        (b"", b"GET /v1/info HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 1000),
        (CHUNKED[: -len(b"0\r\n")] + b"1;", b"a" * 65536),
    ],
    ids=["header", "headers", "URL", "trailer", "trailers", "pipelined", "chunk extension"],
)
def test_what_never_ends_is_cut_off(server: ServerProcess, head: bytes, again: bytes):
    """Each of these once took gigabytes, or seconds of everybody's time."""
    _, taken = cut_off(server, head, again)
    assert taken < 20_000_000  # what the system's own buffers take
    assert server.http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nx-big: " + b"a" * 20_000 + b"\r\n\r\n", b"431"),
        (b"GET /healthz HTTP/1.1\r\n" + b"x: 1\r\n" * (MAX_HEADERS + 1) + b"\r\n", b"431"),
        (b"GET /healthz?" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /healthz HTTP/1.1\r\n" + b"x: 1\r\n" * MAX_HEADERS + b"\r\n", b"200"),
        (HANDSHAKE + b"x-big: " + b"a" * 9000 + b"\r\n\r\n", b"431"),
        (HANDSHAKE + b"\r\n", b"101"),
    ],
    ids=["bytes", "count", "URL", "enough", "of a stream", "a stream"],
)
def test_headers_beyond_the_bounds_are_refused_with_a_reason(
    server: ServerProcess, head: bytes, status: bytes
):
    assert cut_off(server, head)[0].startswith(b"HTTP/1.1 " + status)


def test_a_few_requests_may_be_sent_ahead(server: ServerProcess):
    request = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    received = b""
    with connect(server) as caller:
        caller.sendall(request * MAX_PIPELINED)
        while received.count(b"HTTP/1.1 200 ") < MAX_PIPELINED:
            received += caller.recv(65536)


def test_a_message_in_very_many_fragments_is_refused(server: ServerProcess):
    """They come all at once: a message may take three seconds here."""
    with connect(server) as caller, suppress(ConnectionError):  # closed with more on its way
        caller.sendall(HANDSHAKE + b"\r\n")
        assert caller.recv(4096).startswith(b"HTTP/1.1 101 ")
        empty = b"\x80" + bytes(4)
        caller.sendall(b"\x02" + empty + (b"\x00" + empty) * MAX_FRAGMENTS)
        assert f"more than {MAX_FRAGMENTS} fragments".encode() in caller.recv(4096)


def test_a_message_that_never_ends_is_refused(server: ServerProcess):
    with connect(server) as caller:
        caller.sendall(HANDSHAKE + b"\r\n")
        assert caller.recv(4096).startswith(b"HTTP/1.1 101 ")
        caller.sendall(b"\x82\xfe\x10\x00" + bytes(100))
        assert b"a message did not arrive within 3 s" in caller.recv(4096)


@pytest.mark.parametrize("frame", [b"\x89\xfd" + bytes(4 + 125), b"\x8a\x80" + bytes(4)])
def test_a_flood_of_pings_or_pongs_ends_the_connection(server: ServerProcess, frame: bytes):
    with connect(server) as caller:
        caller.sendall(HANDSHAKE + b"\r\n")
        assert caller.recv(4096).startswith(b"HTTP/1.1 101 ")
        with pytest.raises(ConnectionError):  # noqa: PT012  as soon as the server has closed it
            for _ in range(1000):
                caller.sendall(frame * 1000)
        assert server.http.get("/healthz").status_code == 200


def test_as_many_pings_as_anybody_needs_are_answered(server: ServerProcess):
    pong = b"\x8a\x00"
    with connect(server) as caller:
        caller.sendall(HANDSHAKE + b"\r\n")
        assert caller.recv(4096).startswith(b"HTTP/1.1 101 ")
        caller.sendall((b"\x89\x80" + bytes(4)) * MAX_CONTROLS)
        heard = b""
        while heard.count(pong) < MAX_CONTROLS:
            heard += caller.recv(65536)


def test_streams_hold_no_more_bytes_than_all_may_together(server: ServerProcess):
    """Once 64 streams held 994 MB against a limit of 32."""
    half = b"\x82\xff" + (300_000).to_bytes(8, "big") + bytes(4 + 250_000)
    with connect(server) as one, connect(server) as two:
        for caller in (one, two):
            caller.sendall(HANDSHAKE + b"\r\n")
            assert caller.recv(4096).startswith(b"HTTP/1.1 101 ")
        one.sendall(half)
        two.sendall(half)
        heard = one if _hears_first(one, two) else two
        with suppress(ConnectionResetError):  # instead of the reason, as above
            assert b"too many bytes of requests are in hand" in heard.recv(4096)
    response = server.http.post("/v1/act", content=packed(), headers=MSGPACK)
    assert response.status_code == 200  # what they held is free again


def _hears_first(one: socket.socket, two: socket.socket) -> bool:
    ready, _, _ = select.select([one, two], [], [], 20)
    return one in ready


def test_one_address_has_so_many_connections_and_no_more(server: ServerProcess):
    with ExitStack() as held:
        callers = [held.enter_context(connect(server)) for _ in range(CONNECTIONS)]
        answered, _, _ = select.select(callers, [], [], 20)  # nobody else has asked anything
        assert answered
        assert all(b"too many connections" in caller.recv(4096) for caller in answered)
    assert server.http.get("/healthz").status_code == 200


def test_connections_are_counted_by_address_but_for_proxies():
    settings = Settings(max_connections_per_address=2, trusted_proxies=("10.0.0.0/8",))
    counts = ConnectionBounds(settings)
    assert [counts.enter("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert [counts.enter("10.0.0.7") for _ in range(3)] == [True, True, True]
    counts.leave("192.0.2.1")
    assert counts.enter("192.0.2.1")
    assert counts.num_open == 5
