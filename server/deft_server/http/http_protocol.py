"""uvicorn's HTTP protocol with bounds that uvicorn lacks: connections per address, TLS handshakes,
a clock on the headers, and the bytes and number of headers, trailers and pipelined requests.
"""

import asyncio
import logging
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from deft_server.errors import OverloadedError
from deft_server.http.bounds import MAX_HEADERS, MAX_PIPELINED, MAX_URL_BYTES, ConnectionBounds

logger = logging.getLogger(__name__)


class BeyondBoundsError(Exception):
    """What arrives is beyond the bounds; ends the connection."""


def build_http_protocol(
    bounds: ConnectionBounds, tls: ssl.SSLContext | None = None
) -> type[asyncio.Protocol]:
    """Return the fastest HTTP protocol there is, within bounds; with `tls`, it shakes hands."""
    bases: tuple[type, ...]
    if find_spec("httptools") is not None:
        base = import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
        bases = (_CountedConnection, _HeaderClock, _BoundedHeaders, _FairStart, base)
    else:  # h11 bounds headers and trailers itself, and takes one request at a time
        base = import_module("uvicorn.protocols.http.h11_impl").H11Protocol
        bases = (_CountedConnection, _HeaderClock, base)
    return type("BoundedHttpProtocol", bases, {"bounds": bounds, "tls": tls})


def peer_of(transport: asyncio.BaseTransport) -> str:
    """Return the address at the other end, which may be a proxy's."""
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) and name else ""


def _refusal(status: str, detail: str) -> bytes:
    """Return an answer to what never becomes a request."""
    body = f"{detail}\n".encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\nretry-after: 1\r\n\r\n"
    )
    return head.encode() + body


_TOO_MANY_CONNECTIONS = _refusal(
    "503 Service Unavailable", "too many connections are open; close some, or keep one and reuse it"
)


class _Secure(SSLProtocol):
    """asyncio's, with less to hold for a connection that may never say a word."""

    max_size = 16 * 1024  # read at a time, kept from the first moment; 256 kB there
    make_call: Callable[[Callable[[], None]], None]  # when it is the address's turn
    _state: Any

    def _do_handshake(self) -> None:
        """Go on shaking hands, which is a millisecond's work each time."""
        self.make_call(self._shake_hands)

    def _shake_hands(self) -> None:
        if self._state.name == "DO_HANDSHAKE":  # and not given up meanwhile
            super()._do_handshake()  # type: ignore[misc]


class _CountedConnection:
    """Counts a connection from its first moment, and shakes hands where there is TLS.

    Handshakes are ours, because uvicorn's begin before anybody could count them, and may take long.
    """

    bounds: ConnectionBounds
    tls: ssl.SSLContext | None
    # What uvicorn's protocols bring; none of it is typed there.
    loop: Any
    transport: Any

    _raw: asyncio.Transport | None = None
    _address: str
    _is_open = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        if self._raw is not None:  # the second time, by TLS: the handshake ended well
            self._open(transport)
            return
        self._address = peer_of(transport)
        if not self.bounds.connections.enter(self._address):
            if self.tls is None:
                transport.write(_TOO_MANY_CONNECTIONS)
            transport.close()
            return
        self._raw = transport
        if self.tls is None:
            self._open(transport)
        else:
            self._shake_hands(transport, self.tls)

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_open:
            super().connection_lost(error)  # type: ignore[misc]
        self._leave()

    def _open(self, transport: asyncio.Transport) -> None:
        self._is_open = True
        super().connection_made(transport)  # type: ignore[misc]

    def _leave(self) -> None:
        if self._raw is not None:
            self._raw = None
            self.bounds.connections.leave(self._address)

    def _shake_hands(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        """Begin at once: under uvloop, what comes before a later `start_tls` would be lost."""
        ended = self.loop.create_future()
        ended.add_done_callback(self._handshake_ended)
        secure = _Secure(
            self.loop,
            cast(asyncio.Protocol, self),
            tls,
            ended,
            server_side=True,
            ssl_handshake_timeout=self.bounds.header_timeout_s,  # type: ignore[arg-type]
        )
        secure.make_call = partial(self.bounds.calls.make, self._address)
        transport.set_protocol(secure)
        secure.connection_made(transport)

    def _handshake_ended(self, ended: "asyncio.Future[None]") -> None:
        error = ended.exception()
        if not self._is_open and self._raw is not None:
            logger.debug("a TLS handshake failed: %r", error)
            self._raw.abort()
            self._leave()


class _HeaderClock:
    """Closes a connection whose headers do not come, which uvicorn lets wait for ever."""

    bounds: ConnectionBounds
    transport: Any
    loop: Any
    cycle: Any

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]
        if not self._is_reading_headers():
            self._stop_clock()
        elif self._timer is None:
            self._start_clock()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(error)  # type: ignore[misc]

    def _is_reading_headers(self) -> bool:
        if self.transport.get_protocol() is not self or self.transport.is_closing():
            return False  # upgraded to a WebSocket, or on its way out
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_clock(self) -> None:
        self._timer = self.loop.call_later(self.bounds.header_timeout_s, self.transport.close)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _FairStart:
    """Begins with a request when it is its address's turn; what came of its body is held."""

    bounds: ConnectionBounds
    cycle: Any
    pipeline: Any
    _address: str

    _awaits_turn = False
    _begun: Any = None
    _refusal: bytes | None

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)  # type: ignore[misc]
        for cycle, _ in self.pipeline:  # which have no turn any more
            self._let_go(cycle)
        if self._begun is not None:  # uvicorn tells the newest alone
            self._begun.disconnected = True
            self._begun.message_event.set()

    def on_body(self, body: bytes) -> None:
        if not (self._awaits_turn or self.pipeline):  # its app counts it
            super().on_body(body)  # type: ignore[misc]
            return
        num_before = len(self.cycle.body)
        super().on_body(body)  # type: ignore[misc]
        try:
            self.bounds.held.hold(len(self.cycle.body) - num_before, self._address)
        except OverloadedError as error:
            self._let_go(self.cycle)
            self._refusal = _refusal("503 Service Unavailable", str(error))
            raise BeyondBoundsError from None

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._awaits_turn = True
        self.bounds.calls.make(self._address, partial(self._begin, cycle, app))

    def _begin(self, cycle: Any, app: Any) -> None:
        self._awaits_turn = False
        self._begun = cycle
        self.bounds.held.release(len(cycle.body), self._address)
        super()._start_asgi_task(cycle, app)  # type: ignore[misc]

    def _let_go(self, cycle: Any) -> None:
        self.bounds.held.release(len(cycle.body), self._address)
        cycle.body.clear()


class _BoundedHeaders:
    """Bounds what httptools does not. The parser's callbacks are called within `data_received`."""

    bounds: ConnectionBounds
    transport: Any
    pipeline: Any
    url: bytes

    _num_headers = 0
    _num_header_bytes = 0
    _num_idle_bytes = 0  # since the last that was part of a body, or began a request
    _has_progressed = False
    _refusal: bytes | None = None

    def data_received(self, data: bytes) -> None:
        self._has_progressed = False
        super().data_received(data)  # type: ignore[misc]
        self._num_idle_bytes = 0 if self._has_progressed else self._num_idle_bytes + len(data)
        # The parser tells of a header when it is complete, so one without an end is counted here.
        if self._num_idle_bytes > self.bounds.max_header_bytes and not self.transport.is_closing():
            try:
                self._refuse_headers()
            except BeyondBoundsError as error:
                self.send_400_response(str(error))

    def on_message_begin(self) -> None:
        self._has_progressed = True
        self._num_headers = self._num_header_bytes = 0
        super().on_message_begin()  # type: ignore[misc]

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > MAX_URL_BYTES:
            self._refusal = _refusal("414 URI Too Long", f"at most {MAX_URL_BYTES} bytes are taken")
            raise BeyondBoundsError
        super().on_url(url)  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer: both count."""
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or (
            self._num_header_bytes > self.bounds.max_header_bytes
        ):
            self._refuse_headers()
        super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = _refusal(
                "429 Too Many Requests", f"at most {MAX_PIPELINED} requests may wait for an answer"
            )
            raise BeyondBoundsError
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        super().on_body(body)  # type: ignore[misc]

    def send_400_response(self, message: str) -> None:
        """Refuse what cannot be parsed; called by uvicorn, for what our callbacks raise too."""
        if self._refusal is None:
            super().send_400_response(message)  # type: ignore[misc]
            return
        self.transport.write(self._refusal)
        self.transport.close()

    def _refuse_headers(self) -> None:
        most = self.bounds.max_header_bytes
        self._refusal = _refusal(
            "431 Request Header Fields Too Large",
            f"at most {MAX_HEADERS} headers and {most} bytes of them are taken",
        )
        raise BeyondBoundsError
