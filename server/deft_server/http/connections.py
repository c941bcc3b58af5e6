"""uvicorn's protocols with the bounds that uvicorn lacks.

HTTP: connections per address, a clock on the headers, and the bytes and number of headers, trailers
and pipelined requests. WebSocket: the bytes that all connections hold, the time and fragments of a
message, pings and pongs. Slow TLS handshakes and floods of connections are the proxy's business.
"""

import asyncio
import logging
import socket
from collections import deque
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import CONNECTING

from deft_server.errors import OverloadedError
from deft_server.serving.bounds import ConnectionBounds, Exchange

MAX_HEADERS = 100
MAX_URL_BYTES = 8000  # the WebSocket library takes lines of 8192 at most
MAX_PIPELINED = 16  # requests that arrive before the one in hand is answered
# Extensions by which an app says that no more keep-alive pings are to be sent, and who calls.
STOP_PINGS = "deft.stop_pings"
COUNT_FOR = "deft.count_for"
MAX_FRAGMENTS = 4096  # of one message
IDLE_BEFORE_PROBES_S = 60  # of TCP, where there are no pings
MAX_CONTROLS = 1000  # pings and pongs, within the time that a message may take
PARSED_BYTES = 8192  # of WebSockets at a time: the smallest frames in it take 20 ms

logger = logging.getLogger(__name__)


class BeyondBoundsError(Exception):
    """What arrives is beyond the bounds; ends the connection."""


def build_http_protocol(bounds: ConnectionBounds) -> type[asyncio.Protocol]:
    """Return the fastest HTTP protocol there is, within bounds."""
    bases: tuple[type, ...]
    if find_spec("httptools") is not None:
        base = import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
        bases = (_CountedConnection, _BoundedHeaders, base)
    else:  # h11 bounds headers and trailers itself, and takes one request at a time
        base = import_module("uvicorn.protocols.http.h11_impl").H11Protocol
        bases = (_CountedConnection, base)
    return type("BoundedHttpProtocol", bases, {"bounds": bounds})


def build_websocket_protocol(bounds: ConnectionBounds) -> type[WebSocketsSansIOProtocol]:
    """Return the WebSocket protocol within bounds."""
    return type("BoundedWebSocketProtocol", (_BoundedWebSocket,), {"bounds": bounds})


def _peer_of(transport: asyncio.BaseTransport) -> str:
    """Return the address at the other end, which may be a proxy's."""
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) and name else ""


def _refusal(status: str, detail: str, may_retry: bool = True) -> bytes:
    """Return an answer to what never becomes a request."""
    body = f"{detail}\n".encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n"
    )
    return head.encode() + (b"retry-after: 1\r\n" if may_retry else b"") + b"\r\n" + body


_TOO_MANY_CONNECTIONS = _refusal(
    "503 Service Unavailable", "too many connections are open; close some, or keep one and reuse it"
)

_NO_HANDSHAKE = _refusal(
    "400 Bad Request",
    "this is no handshake of a WebSocket, which is a GET without a body",
    may_retry=False,
)


class _CountedConnection:
    """Counts a connection, and closes one whose headers do not come: uvicorn waits for ever."""

    bounds: ConnectionBounds
    # What uvicorn's protocols bring; none of it is typed there.
    loop: Any
    transport: Any
    cycle: Any

    _address: str | None = None  # of a connection that is counted
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        address = _peer_of(transport)
        if not self.bounds.enter(address):
            transport.write(_TOO_MANY_CONNECTIONS)
            transport.close()
            return
        self._address = address
        super().connection_made(transport)  # type: ignore[misc]
        self._start_clock()

    def connection_lost(self, error: Exception | None) -> None:
        if self._address is None:
            return
        self._stop_clock()
        super().connection_lost(error)  # type: ignore[misc]
        self.bounds.leave(self._address)

    def data_received(self, data: bytes) -> None:
        if self._address is None:
            return
        super().data_received(data)  # type: ignore[misc]
        if not self._is_reading_headers():
            self._stop_clock()
        elif self._timer is None:
            self._start_clock()

    def _is_reading_headers(self) -> bool:
        if self.transport.get_protocol() is not self or self.transport.is_closing():
            return False  # upgraded to a WebSocket, or on its way out
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_clock(self) -> None:
        self._timer = self.loop.call_later(
            self.bounds.settings.header_timeout_s, self.transport.close
        )

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _UpgradeIgnoringParser:
    """httptools' parser, to which an offer of another protocol than WebSocket is no reason to stop.

    On its own it takes what follows the head of such a request for the other protocol: it drops the
    body, or parses it as the next request. The head is parsed again without its `Upgrade`, and what
    follows as the rest of the same request.
    """

    def __init__(self, parser: Any, protocol: "_BoundedHeaders") -> None:
        self._parser = parser
        self._protocol = protocol
        self._stops: type[Exception] = import_module("httptools").HttpParserUpgrade

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """Parse what arrived; raise for what cannot be parsed, and at the end of a handshake."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except self._stops as stop:
                if not self._protocol.is_foreign_upgrade():
                    raise
                rest = rest[stop.args[0] :]
            self._parser.feed_data(self._protocol.head_without_upgrade())


class _BoundedHeaders:
    """Bounds what httptools does not. The parser's callbacks are called within `data_received`."""

    bounds: ConnectionBounds
    transport: Any
    parser: Any
    pipeline: Any
    url: bytes
    headers: list[tuple[bytes, bytes]]

    _num_headers = 0
    _num_header_bytes = 0
    _num_idle_bytes = 0  # since the last that was part of a body, or began a request
    _has_progressed = False
    _refusal: bytes | None = None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.parser = _UpgradeIgnoringParser(self.parser, self)

    def is_foreign_upgrade(self) -> bool:
        """Whether the request whose head was parsed offers another protocol than WebSocket."""
        return self.parser.should_upgrade() and not self._should_upgrade()  # type: ignore[attr-defined]

    def head_without_upgrade(self) -> bytes:
        """Return the head of the request whose headers were parsed, without its offer."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def data_received(self, data: bytes) -> None:
        self._has_progressed = False
        super().data_received(data)  # type: ignore[misc]
        self._num_idle_bytes = 0 if self._has_progressed else self._num_idle_bytes + len(data)
        # The parser tells of a header when it is complete, so one without an end is counted here.
        if (
            self._num_idle_bytes > self.bounds.settings.max_header_bytes
            and not self.transport.is_closing()
        ):
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
            self._refusal = _refusal(
                "414 URI Too Long", f"at most {MAX_URL_BYTES} bytes are allowed"
            )
            raise BeyondBoundsError
        super().on_url(url)  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer: both count."""
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or (
            self._num_header_bytes > self.bounds.settings.max_header_bytes
        ):
            self._refuse_headers()
        super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = _refusal(
                "429 Too Many Requests", f"at most {MAX_PIPELINED} requests may wait for an answer"
            )
            raise BeyondBoundsError
        if self.parser.get_method() == b"CONNECT":
            self._refusal = _refusal("405 Method Not Allowed", "this server opens no tunnels")
            raise BeyondBoundsError
        if not self.is_foreign_upgrade():  # or else the head comes once more
            super().on_headers_complete()  # type: ignore[misc]

    def on_message_complete(self) -> None:
        if not self.is_foreign_upgrade():
            super().on_message_complete()  # type: ignore[misc]

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
        most = self.bounds.settings.max_header_bytes
        self._refusal = _refusal(
            "431 Request Header Fields Too Large",
            f"at most {MAX_HEADERS} headers and {most} bytes of them are allowed",
        )
        raise BeyondBoundsError


class _BoundedWebSocket(WebSocketsSansIOProtocol):
    """Counts what a connection holds; uvicorn stops reading once a message waits for the app."""

    bounds: ConnectionBounds

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._address = ""
        self._unparsed = memoryview(b"")
        self._arriving_bytes = 0  # parsed, and of no whole message
        self._waiting_bytes: deque[int] = deque()  # of each message that waits for the app
        self._bytes_after_close = 0
        self._num_controls = 0
        self._controls_until_s = 0.0
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._address = _peer_of(transport)
        self._held = Exchange(self.bounds.budget, self._address)  # until the app has the message
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_clock()
        self._held.release(len(self._unparsed) + self._arriving_bytes)  # the app has the rest
        self._unparsed = memoryview(b"")
        self._arriving_bytes = 0
        self.bounds.leave(self._address)
        super().connection_lost(error)

    async def run_asgi(self) -> None:
        extensions: dict[str, Any] = cast(Any, self.scope["extensions"])
        extensions[STOP_PINGS] = self._stop_pings
        extensions[COUNT_FOR] = self._held.move_to
        try:
            await super().run_asgi()
        finally:
            self._held.release(sum(self._waiting_bytes))  # of messages that nobody asked for
            self._waiting_bytes.clear()

    def _stop_pings(self) -> None:
        """Let the other side be silent for as long as it lives, which TCP finds out."""
        if self.ping_interval is None:
            return
        self.stop_keepalive()
        self.ping_interval = None
        opened = self.transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_BEFORE_PROBES_S)

    def keepalive_timeout(self) -> None:
        logger.info("a WebSocket of %s is closed: no answer to a ping", self._address)
        super().keepalive_timeout()

    def data_received(self, data: bytes) -> None:
        self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
        try:
            self._held.hold(len(data))
        except OverloadedError as error:
            self._fail(CloseCode.TRY_AGAIN_LATER, str(error))
            return
        self._parse()

    async def receive(self) -> Any:
        """Return the next message, which counts as the app's from here on.

        Where many are here already, everybody else has a turn before each.
        """
        if not self.queue.empty():
            await asyncio.sleep(0)
        message: Any = await self.queue.get()
        if message["type"] == "websocket.receive" and self._waiting_bytes:
            self._held.release(self._waiting_bytes.popleft())
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._parse()
            if not self.read_paused and self.writable.is_set() and not self.transport.is_closing():
                self.transport.resume_reading()
        return message

    def _parse(self) -> None:
        """Parse what is here, up to the first whole message; a few frames at a time."""
        while self._unparsed and not (self.read_paused or self.transport.is_closing()):
            is_large = len(self.conn.reader.buffer) >= PARSED_BYTES  # a frame that goes on for long
            size = len(self._unparsed) if is_large else PARSED_BYTES
            part, self._unparsed = self._unparsed[:size], self._unparsed[size:]
            self._arriving_bytes += len(part)
            if self.close_sent:
                self._bytes_after_close += len(part)
                if self._bytes_after_close > PARSED_BYTES:  # that is no answer to our close
                    self.transport.close()
                    return
            super().data_received(part)  # type: ignore[arg-type]
        if self.conn.handshake_exc is not None:  # uvicorn would leave it without an answer
            answer = b"".join(self.conn.data_to_send())  # none where it could not be parsed
            self.transport.write(answer or _NO_HANDSHAKE)
            self.transport.close()
        self._watch()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # uvicorn would log a traceback
                self._fail(CloseCode.INVALID_DATA, "the text is not UTF-8")
                return
        if not self.close_sent:  # more than this message may have arrived with its last byte
            size = min(sum(map(len, self.frames)), self._arriving_bytes)
            self._waiting_bytes.append(size)
            self._arriving_bytes -= size
        super().send_receive_event_to_app()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()  # who reads no pongs may send no pings

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            return
        super().handle_cont(event)

    def handle_ping(self) -> None:
        super().handle_ping()
        self._count_control()

    def handle_pong(self, event: Frame) -> None:
        super().handle_pong(event)
        self._count_control()

    def _count_control(self) -> None:
        now_s = self.loop.time()
        if now_s > self._controls_until_s:
            self._num_controls = 0
            self._controls_until_s = now_s + self.bounds.settings.body_timeout_s
        self._num_controls += 1
        if self._num_controls > MAX_CONTROLS:
            self._fail(CloseCode.POLICY_VIOLATION, f"more than {MAX_CONTROLS} pings and pongs")

    def _watch(self) -> None:
        """Have the clock run while part of a message is here, and we would read the rest."""
        is_partial = bool(self.frames or self.conn.reader.buffer)
        if not (is_partial or self.disconnected):  # what came were pings, or the handshake
            self._held.release(self._arriving_bytes)
            self._arriving_bytes = 0
        if not is_partial or self.read_paused:
            self._stop_clock()
        elif self._clock is None:
            self._clock = self.loop.call_later(self.bounds.settings.body_timeout_s, self._time_out)

    def _time_out(self) -> None:
        self._fail(
            CloseCode.POLICY_VIOLATION,
            f"a message did not arrive within {self.bounds.settings.body_timeout_s:g} s",
        )

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _fail(self, code: CloseCode, reason: str) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        logger.info("a WebSocket of %s is closed: %s", self._address, reason)
        if self.conn.state is CONNECTING:  # nothing can be sent yet
            self.transport.close()
            return
        self.conn.fail(code, reason)
        self.handle_parser_exception()
