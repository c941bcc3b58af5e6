"""Servers that hold their callers up in every way a socket allows, over real sockets.

Each manner is a function that is given one connection and goes on until the server lets go.
"""

import base64
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

LONGEST_S = 20.0  # a client that is still waiting then was not protected
DRIP_S = 0.01
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\n"
_ACCEPT = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3


@dataclass(eq=False)
class HostileServer:
    """One server, one manner; `let_go` is set when it stops holding its callers up."""

    url: str
    num_connections: int = 0
    let_go: threading.Event = field(default_factory=threading.Event)


Manner = Callable[[socket.socket, HostileServer], None]


def frozen(connection: socket.socket, server: HostileServer) -> None:
    """Accept, and never read a byte."""
    server.let_go.wait(LONGEST_S)


def silent(connection: socket.socket, server: HostileServer) -> None:
    """Read the request, and never answer."""
    _read_head(connection)
    server.let_go.wait(LONGEST_S)


def dripping(connection: socket.socket, server: HostileServer) -> None:
    """Answer with a body of one byte now and then."""
    _read_head(connection)
    connection.sendall(_HEAD + b"Content-Length: 100000\r\n\r\n")
    _drip(connection, server, b"x")


def header_dripping(connection: socket.socket, server: HostileServer) -> None:
    """Answer with a header of one byte now and then."""
    _read_head(connection)
    connection.sendall(_HEAD + b"X-Long: ")
    _drip(connection, server, b"x")


def continuing(connection: socket.socket, server: HostileServer) -> None:
    """Say `100 Continue` for ever, as fast as it can."""
    _read_head(connection)
    while not server.let_go.is_set():
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


def refusing(connection: socket.socket, server: HostileServer) -> None:
    """Answer every request with 503 and a Retry-After of a few milliseconds."""
    _read_head(connection)
    connection.sendall(
        b"HTTP/1.1 503 No\r\nRetry-After: 0.01\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )


def withholding(connection: socket.socket, server: HostileServer) -> None:
    """Answer every request with 500: the policy's answer was unsafe."""
    _read_head(connection)
    connection.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def stream_silent(connection: socket.socket, server: HostileServer) -> None:
    """Open the stream, and never answer a frame."""
    open_stream(connection)
    server.let_go.wait(LONGEST_S)


def stream_dripping(connection: socket.socket, server: HostileServer) -> None:
    """Answer a frame with one byte now and then."""
    open_stream(connection)
    connection.sendall(b"\x82\x7e\xff\xff")  # a binary message of 65,535 bytes
    _drip(connection, server, b"x")


def ping_flooding(connection: socket.socket, server: HostileServer) -> None:
    """Open the stream, and ping as fast as it can, reading no pong."""
    open_stream(connection)
    while not server.let_go.is_set():
        connection.sendall(b"\x89\x00" * 8192)


def fragmenting(connection: socket.socket, server: HostileServer) -> None:
    """Open the stream, and answer with empty fragments of a message that never ends."""
    open_stream(connection)
    connection.sendall(b"\x02\x00")
    while not server.let_go.is_set():
        connection.sendall(b"\x00\x00" * 8192)


HTTP_MANNERS: tuple[Manner, ...] = (
    *(frozen, silent, dripping, header_dripping, continuing, refusing),
)
STREAM_MANNERS: tuple[Manner, ...] = (
    *HTTP_MANNERS,
    *(stream_silent, stream_dripping, ping_flooding, fragmenting),
)


@contextmanager
def holding_up(manner: Manner) -> Iterator[HostileServer]:
    """Run a server of one manner on a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        server = HostileServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        accepting = threading.Thread(target=_accept, args=(listening, server, manner))
        accepting.start()
        try:
            yield server
        finally:
            server.let_go.set()
            accepting.join()


def _accept(listening: socket.socket, server: HostileServer, manner: Manner) -> None:
    serving: list[threading.Thread] = []
    while not server.let_go.is_set():
        with suppress(TimeoutError):
            connection, _ = listening.accept()
            server.num_connections += 1
            serving.append(threading.Thread(target=_serve, args=(connection, server, manner)))
            serving[-1].start()
    for one in serving:
        one.join()


def _serve(connection: socket.socket, server: HostileServer, manner: Manner) -> None:
    with connection, suppress(OSError):  # the client hung up, or does not read
        connection.settimeout(LONGEST_S)
        manner(connection, server)


def _drip(connection: socket.socket, server: HostileServer, drop: bytes) -> None:
    while not server.let_go.wait(DRIP_S):
        connection.sendall(drop)


def _read_head(connection: socket.socket) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head:
        received = connection.recv(65536)
        if not received:
            raise ConnectionError("the client hung up")
        head += received
    return head


def open_stream(connection: socket.socket) -> None:
    found = re.search(rb"(?i)sec-websocket-key: *(\S+)", _read_head(connection))
    if found is None:
        raise ConnectionError("the client did not ask for a WebSocket")
    digest = hashlib.sha1(found[1] + _ACCEPT.encode()).digest()
    connection.sendall(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n\r\n"
    )
