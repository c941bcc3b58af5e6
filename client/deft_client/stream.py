"""The same client over one WebSocket, for the shortest round trips.

Frames alternate strictly: a binary request, then a binary answer, or a problem as text. Everything
but `act` still goes over HTTP, and so does the handshake: deadlines, TLS and proxies are the same.
A broken connection is made anew under the same rules of retrying, and so is one on which something
came that nobody had asked for: it must never be taken for the answer to the next observation. Each
frame has an id that the answer repeats; servers of earlier versions refuse it, and get none.
"""

import contextlib
import threading
import time
import uuid
from dataclasses import replace
from typing import Annotated

import httpcore
import httpx
from msgspec import Meta, Struct
from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from deft_client.calls import ACT_PATH, HttpReply, HttpRequest
from deft_client.client import PolicyClient
from deft_client.deadlines import READ_SHARE, ending_at, remaining_s
from deft_client.errors import AnswerTimeoutError, ServerUnreachableError
from deft_client.settings import DEFAULT_URL, ClientSettings
from deft_client.unreachable import transport_error
from deft_core.errors import MessageTooLargeError, WireError
from deft_core.wire.codec import decode_problem, message_id, without_id
from deft_core.wire.formats import WireFormat, decode

STREAM_PATH = "/v1/stream"
CLOSE_S = 0.1  # for saying goodbye; the other side's is not waited for
# More than a record of TLS, of which what is left would go unseen; little for the allocator.
READ_BYTES = READ_SHARE * 64 * 1024
SLICE_BYTES = 4096  # parsed between two looks at the clock
_WAITING_S = 0.05  # for bytes that are there already
_TIMEOUTS = (TimeoutError, httpcore.TimeoutException, httpx.TimeoutException)
_BREAKS = (OSError, httpcore.NetworkError, httpcore.ProtocolError, httpx.TransportError)


class Connection:
    """One WebSocket: the response that opened it, its frames, and the socket below.

    Every wait ends with the call: see `ending_at`.
    """

    def __init__(self, url: str, max_bytes: int) -> None:
        self._opening = ClientProtocol(parse_uri(stream_url(url)))
        self._protocol = ClientProtocol(self._opening.uri, state=OPEN, max_size=max_bytes)
        self._response: httpx.Response | None = None
        self._opcode: Opcode | None = None  # of the message of which parts have come
        self._message = bytearray()

    @property
    def handshake(self) -> dict[str, str]:
        """Headers of the GET that opens the stream."""
        return dict(self._opening.connect().headers.raw_items())

    def open(self, response: httpx.Response) -> None:
        """Take over a connection; `InvalidHandshake` unless it was opened for this request."""
        self._response = response
        headers = Headers(response.headers.multi_items())
        self._opening.process_response(Response(response.status_code, "", headers))

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
        if self._opcode is not None or self._protocol.reader.buffer:  # a part of something
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
        self._socket.close()

    def close(self) -> None:
        """Close the socket."""
        if self._response is not None:
            self._response.close()

    def _receive(self) -> list[bytes | str]:
        received = memoryview(self._socket.read(READ_BYTES))
        if not received:
            raise ConnectionError("the server closed the connection")
        messages: list[bytes | str] = []
        while received:
            remaining_s(None)  # raises where the time of the call is over
            self._protocol.receive_data(bytes(received[:SLICE_BYTES]))
            received = received[SLICE_BYTES:]
            messages += self._whole_messages()
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
                self._socket.write(data)

    def _has_bytes(self) -> bool:
        return bool(self._socket.get_extra_info("is_readable"))

    @property
    def _socket(self) -> httpcore.NetworkStream:
        assert self._response is not None
        stream: httpcore.NetworkStream = self._response.extensions["network_stream"]
        return stream


class StreamClient(PolicyClient):
    """A policy behind a WebSocket. Threads take turns: one observation is on its way at a time."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        settings: ClientSettings | None = None,
        transport: httpx.BaseTransport | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._connection: Connection | None = None
        self._repeats_ids: bool | None = None  # None until the server has shown whether it does
        super().__init__(url, settings, transport, api_key=api_key, timeout=timeout)

    def _connect(self) -> None:
        super()._connect()
        self._turn = threading.Lock()
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None

    def _message_id(self) -> str | None:
        return None if self._repeats_ids is False else uuid.uuid4().hex

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
            asked = message_id(request.body)
            answer = self._connection.ask(request.body)
            reply = read_frame(answer)
            if reply.status == 200:
                self._check_id(asked, message_id(reply.body))
            is_answered = True
        except httpx.TransportError as error:
            raise transport_error(error, self.url) from error
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
        if reply.status == 400 and decode_problem(400, reply.body).field == "id":
            self._repeats_ids = False
            return self._exchange(replace(request, body=without_id(request.body)))
        return reply

    def _check_id(self, asked: object, repeated: object) -> None:
        """Refuse the answer to another frame, and one without an id from a server that has them."""
        if repeated != asked and (repeated is not None or self._repeats_ids):
            raise ConnectionError("the server answered another frame")
        if repeated is not None:
            self._repeats_ids = True

    def _open(self, request: HttpRequest) -> HttpReply | None:
        """Open the stream, or return what the server answered instead."""
        connection = Connection(self.url, self.settings.limits.max_bytes)
        opening = HttpRequest("GET", STREAM_PATH, request.gives_up_at, headers=connection.handshake)
        sent = self._prepared(opening)
        response = self._transport.handle_request(sent)
        if response.status_code != httpx.codes.SWITCHING_PROTOCOLS:
            return self._reply(sent, response)
        self._connection = connection
        self._repeats_ids = self._repeats_ids or None  # it may be another server now
        connection.open(response)
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
