"""The same client over one WebSocket, for the shortest round trips.

Frames alternate strictly: a binary request, then a binary answer, or a problem as text. Everything
but `act` still goes over HTTP, and so does the handshake: deadlines, TLS and proxies are the same.
A broken connection is made anew under the same rules of retrying. Each frame has an id that the
answer repeats, so that the answer to another frame is never executed.
"""

import contextlib
import threading
import time
import uuid
from typing import Annotated

import httpcore
from msgspec import Meta, Struct
from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from deft_client.calls import ACT_PATH, NETWORK_STREAM, HttpReply, HttpRequest
from deft_client.client import PolicyClient
from deft_client.deadlines import MAX_READ_BYTES, ending_at, remaining_s
from deft_client.errors import AnswerTimeoutError, ServerUnreachableError
from deft_client.settings import DEFAULT_URL, ClientSettings
from deft_client.unreachable import FAILURES, transport_error
from deft_core.errors import MessageTooLargeError, WireError
from deft_core.wire.codec import message_id
from deft_core.wire.formats import WireFormat, decode

STREAM_PATH = "/v1/stream"
SWITCHING_PROTOCOLS = 101
CLOSE_S = 0.1  # for saying goodbye; the other side's is not waited for
_WAITING_S = 0.05  # for bytes that are there already
_TIMEOUTS = (TimeoutError, httpcore.TimeoutException)
_BREAKS = (OSError, httpcore.NetworkError, httpcore.ProtocolError)


class Connection:
    """One WebSocket: websockets knows the protocol, httpcore has the connection below.

    Every wait ends with the call: see `ending_at`.
    """

    def __init__(self, url: str, max_bytes: int) -> None:
        self._protocol = ClientProtocol(parse_uri(stream_url(url)), max_size=max_bytes)
        self._handshake = self._protocol.connect()
        self._open = contextlib.ExitStack()  # the response that opened the stream
        self._socket: httpcore.NetworkStream | None = None
        self._opcode: Opcode | None = None  # of the message of which parts have come
        self._message = bytearray()

    @property
    def handshake(self) -> dict[str, str]:
        """Headers of the GET that opens the stream."""
        return dict(self._handshake.headers.raw_items())

    def open(self, opened: contextlib.ExitStack, response: httpcore.Response) -> None:
        """Take over a connection; `InvalidHandshake` unless it was opened for this request."""
        self._open, self._socket = opened, response.extensions[NETWORK_STREAM]
        self._protocol.send_request(self._handshake)
        self._protocol.data_to_send()  # httpcore has sent it, and has read the answer
        headers = Headers(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers
        )
        answer = Response(response.status, "Switching Protocols", headers)
        self._protocol.receive_data(answer.serialize())
        if self._protocol.handshake_exc is not None:
            raise self._protocol.handshake_exc

    def ask(self, frame: bytes) -> bytes | str:
        """Send a frame and return the one message that comes back."""
        self._protocol.send_binary(frame)
        self._flush()
        while True:
            messages = self._receive()
            if len(messages) == 1:
                return messages[0]
            if messages:
                raise ConnectionError("the server sent more than one answer to one frame")

    def is_quiet(self) -> bool:
        """Is the connection as the last answer left it, but for pings?"""
        if self._opcode is not None:  # a part of something
            return False
        if not self._has_bytes():
            return True
        try:
            with ending_at(time.monotonic() + (remaining_s(_WAITING_S) or 0.0)):
                messages = self._receive()
        except (*_TIMEOUTS, *_BREAKS):
            return False
        return not messages and self._opcode is None and not self._has_bytes()

    def say_goodbye(self) -> None:
        """Say that the stream ends."""
        with contextlib.suppress(*_TIMEOUTS, *_BREAKS), ending_at(time.monotonic() + CLOSE_S):
            if self._protocol.state is OPEN:
                self._protocol.send_close(1000)
                self._flush()

    def abandon(self) -> None:
        """Close our end of a socket that another process goes on using."""
        self._stream.close()

    def close(self) -> None:
        """Close the socket."""
        self._open.close()

    def _receive(self) -> list[bytes | str]:
        """Read what has come; return the messages that are whole with it."""
        received = self._stream.read(MAX_READ_BYTES)
        if not received:
            raise ConnectionError("the server closed the connection")
        self._protocol.receive_data(received)
        messages = self._whole_messages()
        self._flush()  # pongs
        if isinstance(self._protocol.parser_exc, PayloadTooBig):
            raise MessageTooLargeError("answer", str(self._protocol.parser_exc))
        if self._protocol.state is not OPEN:
            raise ConnectionError(
                f"the server closed the stream ({self._protocol.close_code}"
                f" {self._protocol.close_reason or 'without a reason'})"
            )
        return messages

    def _whole_messages(self) -> list[bytes | str]:
        whole: list[bytes | str] = []
        for event in self._protocol.events_received():
            if not isinstance(event, Frame):
                continue
            if event.opcode in (Opcode.TEXT, Opcode.BINARY):
                self._opcode, self._message = event.opcode, bytearray()
            elif event.opcode is not Opcode.CONT:
                continue
            self._message += event.data
            if event.fin:
                content = bytes(self._message)
                is_text = self._opcode is Opcode.TEXT
                whole.append(content.decode(errors="replace") if is_text else content)
                self._opcode = None
        return whole

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:  # nothing stands for the end of the stream; closing it says as much
                self._stream.write(data)

    def _has_bytes(self) -> bool:
        return bool(self._stream.get_extra_info("is_readable"))

    @property
    def _stream(self) -> httpcore.NetworkStream:
        assert self._socket is not None
        return self._socket


class StreamClient(PolicyClient):
    """A policy behind a WebSocket. Threads take turns: one observation is on its way at a time."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        settings: ClientSettings | None = None,
        transport: httpcore.ConnectionPool | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._connection: Connection | None = None
        super().__init__(url, settings, transport, api_key=api_key, timeout=timeout)

    def _connect(self) -> None:
        super()._connect()
        self._turn = threading.Lock()
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None

    def _message_id(self) -> str | None:
        return uuid.uuid4().hex

    def close(self) -> None:
        """Close both connections."""
        self._leave_parents_connections()
        with self._turn:
            if self._connection is not None:
                self._connection.say_goodbye()
            self._drop()
        super().close()

    def __enter__(self) -> "StreamClient":
        return self

    def _send(self, request: HttpRequest) -> HttpReply:
        if request.path != ACT_PATH:
            return super()._send(request)
        self._leave_parents_connections()
        if not self._turn.acquire(timeout=max(request.gives_up_at - time.monotonic(), 0.0)):
            raise self._too_slow()
        try:
            with ending_at(request.gives_up_at):
                return self._exchange(request)
        finally:
            self._turn.release()

    def _exchange(self, request: HttpRequest) -> HttpReply:
        is_answered = False
        try:
            if self._connection is not None and not self._connection.is_quiet():
                self._drop()
            if self._connection is None:
                refusal = self._open(request)
                if refusal is not None:
                    return refusal
            assert self._connection is not None
            reply = read_frame(self._connection.ask(request.body))
            if reply.status == 200 and message_id(reply.body) != message_id(request.body):
                raise ConnectionError("the answer names another frame, or none")
            is_answered = True
        except _TIMEOUTS as error:
            raise self._too_slow() from error
        except (*_BREAKS, InvalidHandshake) as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise ServerUnreachableError(
                f"cannot stream to {self.url}: {reason}; is the server running there?"
            ) from error
        finally:
            # Whatever interrupted us, a late answer must never be taken for that of the next
            # observation.
            if not is_answered:
                self._drop()
        return reply

    def _open(self, request: HttpRequest) -> HttpReply | None:
        """Open the stream, or return what the server answered instead."""
        connection = Connection(self.url, self.settings.limits.max_bytes)
        opening = HttpRequest("GET", STREAM_PATH, request.gives_up_at, headers=connection.handshake)
        request_id = uuid.uuid4().hex
        sent = self._prepared(opening, request_id)
        with contextlib.ExitStack() as opened:
            try:
                response = opened.enter_context(self._transport.stream(**sent))
                if response.status != SWITCHING_PROTOCOLS:
                    return self._believed(request_id, self._read(response, request_id))
            except FAILURES as error:
                raise transport_error(error, self.url) from error
            self._connection = connection
            connection.open(opened.pop_all(), response)
        return None

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _too_slow(self) -> AnswerTimeoutError:
        return AnswerTimeoutError(f"{self.url} took too long to answer on {STREAM_PATH}")


class _Status(Struct):
    """What a problem that stands for an HTTP reply says of it."""

    status: Annotated[int, Meta(ge=400, le=599)]


def stream_url(url: str) -> str:
    """Return where the WebSocket of a server is."""
    return "ws" + url.removeprefix("http") + STREAM_PATH


def read_frame(frame: bytes | str) -> HttpReply:
    """Return a frame as the HTTP reply it stands for: text is a problem, which says its status."""
    if isinstance(frame, bytes):
        return HttpReply(200, frame)
    body = frame.encode()
    try:
        return HttpReply(decode(body, _Status, WireFormat.JSON).status, body)
    except WireError:
        return HttpReply(500, body)
