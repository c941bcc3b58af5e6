"""No byte that comes before, in or right behind a TLS handshake is lost, however busy the loop is.

The callers share the server's thread: while they speak, the loop stands still, and finds everything
they said at once. Once five of twelve handshakes lost their first bytes that way under uvloop.
"""

import asyncio
import select
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from deft_server.http.bounds import ConnectionBounds, build_bounds
from deft_server.http.http_protocol import build_http_protocol
from deft_server.serving.held_bytes import HeldBytes
from deft_server.settings import Settings
from tests.server.certificates import make_certificate, needs_openssl

pytestmark = needs_openssl
uvloop = pytest.importorskip("uvloop")
NUM_CALLERS = 12
MOST_TURNS = 20_000
REQUEST = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


class Caller:
    """A TLS client that never waits: it says what it can each time it is asked."""

    def __init__(self, port: int, context: ssl.SSLContext, prefix: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=5)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)
        self._prefix = prefix  # bytes of the greeting that come before all others
        self._has_asked = False
        self._heard = b""
        self.is_cut_off = False
        self.speak()

    def speak(self) -> None:
        """Go on with the handshake; the request comes in one packet with the end of it."""
        try:
            if not self._has_asked:
                self._tls.do_handshake()
                self._tls.write(REQUEST)
                self._has_asked = True
            self._heard += self._tls.read(65536)
        except ssl.SSLWantReadError:
            pass
        said = self._outgoing.read()
        if self._prefix and said:
            self._socket.sendall(said[: self._prefix])
            said, self._prefix = said[self._prefix :], 0
        self._socket.sendall(said)

    def listen(self) -> None:
        """Take what has come."""
        while select.select([self._socket], [], [], 0)[0]:
            received = self._socket.recv(65536)
            if not received:
                self.is_cut_off = True
                return
            self._incoming.write(received)

    @property
    def is_answered(self) -> bool:
        """Has it heard all that the app says?"""
        return self._heard.endswith(b"OK")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a server's context and that of a client that trusts it."""
    files = make_certificate(tmp_path_factory.mktemp("tls"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*files)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(files[0])
    return server, client


def answering(context: ssl.SSLContext, bounds: ConnectionBounds) -> Callable[[], asyncio.Protocol]:
    """Return what makes our protocol around an app that answers everything with `OK`."""
    protocol: Callable[..., asyncio.Protocol] = build_http_protocol(bounds, context)
    config = uvicorn.Config(PlainTextResponse("OK"), lifespan="off", log_config=None)
    config.load()
    return partial(protocol, config=config, server_state=ServerState(), app_state={})


async def num_answered(
    tls: tuple[ssl.SSLContext, ssl.SSLContext], prefix: int, turns_apart: int
) -> int:
    """Return how many callers hear `OK`, where the loop turns so often between two words."""
    bounds = build_bounds(Settings(), HeldBytes(10**9))
    serve = asyncio.get_running_loop().create_server
    listening = await serve(answering(tls[0], bounds), "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    with ExitStack() as held:
        callers = [Caller(port, tls[1], prefix) for _ in range(NUM_CALLERS)]
        for caller in callers:
            held.callback(caller.close)
        for _ in range(MOST_TURNS):
            for _ in range(turns_apart):
                await asyncio.sleep(0)
            for caller in callers:
                caller.listen()
                caller.speak()
            if all(caller.is_answered or caller.is_cut_off for caller in callers):
                break
    listening.close()
    for _ in range(MOST_TURNS):
        if bounds.connections.total == 0:  # all are closed, and counted so
            return sum(caller.is_answered for caller in callers)
        await asyncio.sleep(0)
    raise AssertionError(f"{bounds.connections.total} connections are counted for ever")


@pytest.mark.parametrize("turns_apart", [1, 7])
@pytest.mark.parametrize("prefix", [0, 1, 100])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_every_handshake_ends_well_and_its_request_is_answered(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    prefix: int,
    turns_apart: int,
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    loop = new_loop()
    try:
        answered = loop.run_until_complete(num_answered(tls, prefix, turns_apart))
    finally:
        loop.close()
    assert answered == NUM_CALLERS
