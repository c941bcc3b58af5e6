"""The same clients over one WebSocket, for the shortest round trips.

Frames alternate strictly: a binary request, then a binary answer, or a problem as text. Everything
but `act` still goes over HTTP, and so does the handshake: deadlines, TLS and proxies are the same.
A broken connection is made anew under the same rules of retrying, and so is one on which something
came that nobody had asked for: it must never be taken for the answer to the next observation.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Generator
from typing import TypeVar

import anyio
import httpcore
import httpx
from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from deft_client.calls import ACT_PATH, HttpReply, HttpRequest
from deft_client.client import SHORTEST_WAIT_S, AsyncPolicyClient, PolicyClient, transport_error
from deft_client.deadlines import READ_SHARE, ending_at
from deft_client.errors import (
    AnswerTimeoutError,
    MessageTooLargeError,
    ServerUnreachableError,
    TransportError,
    WireError,
)
from deft_client.settings import DEFAULT_URL, ClientSettings
from deft_client.wire.fields import Json, Kind, record, whole
from deft_client.wire.json_codec import decode

STREAM_PATH = "/v1/stream"
_STATUS: Kind[Json] = record(dict, {"status": whole(400, 599)}, is_open=True)
CLOSE_S = 0.1  # for saying goodbye; the other side's is not waited for
# More than a record of TLS, of which what is left would go unseen; little for the allocator.
READ_BYTES = READ_SHARE * 64 * 1024
SLICE_BYTES = 4096  # parsed between two looks at the clock
_WAITING_S = 0.05  # for bytes that are there already
_TIMEOUTS = (TimeoutError, httpcore.TimeoutException, httpx.TimeoutException)
_BREAKS = (OSError, httpcore.NetworkError, httpcore.ProtocolError, httpx.TransportError)

ResultT = TypeVar("ResultT")
# Yields bytes to send, or None to be sent what arrived (nothing, where the connection ended).
Exchange = Generator[bytes | None, bytes, ResultT]


class Frames:
    """The frames of one WebSocket, decided but not performed; knows no socket."""

    def __init__(self, url: str, max_bytes: int) -> None:
        self._opening = ClientProtocol(parse_uri(stream_url(url)))
        self._protocol = ClientProtocol(self._opening.uri, state=OPEN, max_size=max_bytes)
        self._opcode: Opcode | None = None  # of the message of which parts have come
        self._message = bytearray()

    @property
    def handshake(self) -> dict[str, str]:
        """Headers of the GET that opens the stream."""
        return dict(self._opening.connect().headers.raw_items())

    def check_handshake(self, response: httpx.Response) -> None:
        """Raise `InvalidHandshake` unless the server opened a WebSocket, for this request."""
        headers = Headers(response.headers.multi_items())
        self._opening.process_response(Response(response.status_code, "", headers))

    def ask(self, frame: bytes, gives_up_at: float) -> Exchange[bytes | str]:
        """Send a frame and return the one message that comes back."""
        self._protocol.send_binary(frame)
        yield from self._flush()
        while True:
            messages = yield from self._receive(gives_up_at)
            if len(messages) == 1:
                return messages[0]
            if messages:
                raise ConnectionError("the server sent more than one answer to one frame")

    def listen(self, gives_up_at: float) -> Exchange[bool]:
        """Take what is there already; was it nothing but pings and pongs?"""
        messages = yield from self._receive(gives_up_at)
        return not messages and self._opcode is None

    def goodbye(self) -> Exchange[None]:
        """Say that the stream ends."""
        if self._protocol.state is OPEN:
            self._protocol.send_close(1000)
            yield from self._flush()

    def _receive(self, gives_up_at: float) -> Exchange[list[bytes | str]]:
        received = memoryview((yield None))
        if not received:
            raise ConnectionError("the server closed the connection")
        messages: list[bytes | str] = []
        while received:
            if time.monotonic() > gives_up_at:
                raise TimeoutError("the time for the whole call is over")
            self._protocol.receive_data(bytes(received[:SLICE_BYTES]))
            received = received[SLICE_BYTES:]
            messages += self._messages()
            yield from self._flush()  # pongs
        if isinstance(self._protocol.parser_exc, PayloadTooBig):
            raise MessageTooLargeError("answer", str(self._protocol.parser_exc))
        if self._protocol.state is not OPEN:
            raise ConnectionError(
                f"the server closed the stream ({self._protocol.close_code}"
                f" {self._protocol.close_reason or 'without a reason'})"
            )
        return messages

    def _messages(self) -> list[bytes | str]:
        """Return the messages that are whole."""
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

    def _flush(self) -> Generator[bytes | None, bytes, None]:
        for data in self._protocol.data_to_send():
            if data:  # nothing stands for the end of the stream; closing it says as much
                yield data


class StreamClient(PolicyClient):
    """A policy behind a WebSocket. Threads take turns: one observation is on its way at a time."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        settings: ClientSettings | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, settings, transport)
        self._turn = threading.Lock()
        self._opened: httpx.Response | None = None
        self._frames = Frames(self.url, self.settings.limits.max_bytes)

    def close(self) -> None:
        """Close both connections."""
        with self._turn:
            if self._opened is not None:
                moment = time.monotonic() + CLOSE_S
                with contextlib.suppress(*_TIMEOUTS, *_BREAKS), ending_at(moment):
                    self._perform(self._frames.goodbye(), moment)
            self._drop()
        super().close()

    def __enter__(self) -> "StreamClient":
        return self

    def _send(self, request: HttpRequest) -> HttpReply | TransportError:
        if request.path != ACT_PATH:
            return super()._send(request)
        if not self._turn.acquire(timeout=max(request.gives_up_at - time.monotonic(), 0.0)):
            return too_slow(self.url)
        try:
            with ending_at(request.gives_up_at):
                return self._exchange(request)
        finally:
            self._turn.release()

    def _exchange(self, request: HttpRequest) -> HttpReply | TransportError:
        answered = False
        try:
            if self._opened is not None and not self._is_quiet(request.gives_up_at):
                self._drop()
            if self._opened is None:
                refusal = self._open(request)
                if refusal is not None:
                    return refusal
            asking = self._frames.ask(request.body, request.gives_up_at)
            answer = self._perform(asking, request.gives_up_at)
            answered = True
            return read_frame(answer)
        except (*_TIMEOUTS, *_BREAKS, InvalidHandshake) as error:
            return failed_exchange(error, self.url)
        finally:
            # Whatever interrupted us, a late answer must never be taken for that of the next
            # observation.
            if not answered:
                self._drop()

    def _open(self, request: HttpRequest) -> HttpReply | TransportError | None:
        """Open the stream, or return what the server answered instead."""
        self._frames = Frames(self.url, self.settings.limits.max_bytes)
        sent = self._prepared(opening(self._frames, request))
        response = self._transport.handle_request(sent)
        if response.status_code != httpx.codes.SWITCHING_PROTOCOLS:
            return self._reply(sent, response)
        self._opened = response
        self._frames.check_handshake(response)
        return None

    def _is_quiet(self, gives_up_at: float) -> bool:
        """Is the connection as the last answer left it, but for pings?"""
        stream = self._stream()
        if not stream.get_extra_info("is_readable"):
            return True
        soon = min(time.monotonic() + _WAITING_S, gives_up_at)
        try:
            is_quiet = self._perform(self._frames.listen(soon), soon)
        except (*_TIMEOUTS, *_BREAKS):
            return False
        return is_quiet and not stream.get_extra_info("is_readable")

    def _perform(self, exchange: Exchange[ResultT], gives_up_at: float) -> ResultT:
        stream = self._stream()
        try:
            step = next(exchange)
            while True:
                left_s = max(gives_up_at - time.monotonic(), SHORTEST_WAIT_S)
                if step is None:
                    step = exchange.send(stream.read(READ_BYTES, left_s))
                else:
                    stream.write(step, left_s)
                    step = next(exchange)
        except StopIteration as stop:
            result: ResultT = stop.value
            return result

    def _stream(self) -> httpcore.NetworkStream:
        assert self._opened is not None
        stream: httpcore.NetworkStream = self._opened.extensions["network_stream"]
        return stream

    def _drop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


class AsyncStreamClient(AsyncPolicyClient):
    """`StreamClient` for asyncio; tasks take turns."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        settings: ClientSettings | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, settings, transport)
        self._turn = asyncio.Lock()
        self._opened: httpx.Response | None = None
        self._frames = Frames(self.url, self.settings.limits.max_bytes)

    async def aclose(self) -> None:
        """Close both connections."""
        async with self._turn:
            if self._opened is not None:
                with contextlib.suppress(*_TIMEOUTS, *_BREAKS), anyio.move_on_after(CLOSE_S):
                    await self._perform(self._frames.goodbye(), None)
            await self._drop()
        await super().aclose()

    async def __aenter__(self) -> "AsyncStreamClient":
        return self

    async def _send(self, request: HttpRequest) -> HttpReply | TransportError:
        if request.path != ACT_PATH:
            return await super()._send(request)
        try:
            with anyio.fail_after(request.gives_up_at - time.monotonic()):
                async with self._turn:
                    return await self._exchange(request)
        except TimeoutError:
            return too_slow(self.url)

    async def _exchange(self, request: HttpRequest) -> HttpReply | TransportError:
        answered = False
        try:
            if self._opened is not None and not await self._is_quiet(request.gives_up_at):
                await self._drop()
            if self._opened is None:
                refusal = await self._open(request)
                if refusal is not None:
                    return refusal
            answer = await self._perform(self._frames.ask(request.body, request.gives_up_at))
            answered = True
            return read_frame(answer)
        except (*_TIMEOUTS, *_BREAKS, InvalidHandshake) as error:
            return failed_exchange(error, self.url)
        finally:
            if not answered:  # see StreamClient
                await self._drop()

    async def _open(self, request: HttpRequest) -> HttpReply | TransportError | None:
        self._frames = Frames(self.url, self.settings.limits.max_bytes)
        sent = self._prepared(opening(self._frames, request))
        response = await self._transport.handle_async_request(sent)
        if response.status_code != httpx.codes.SWITCHING_PROTOCOLS:
            return await self._reply(sent, response)
        self._opened = response
        self._frames.check_handshake(response)
        return None

    async def _is_quiet(self, gives_up_at: float) -> bool:
        stream = self._stream()
        if not stream.get_extra_info("is_readable"):
            return True
        soon = min(time.monotonic() + _WAITING_S, gives_up_at)
        try:
            is_quiet = await self._perform(self._frames.listen(soon), _WAITING_S)
        except (*_TIMEOUTS, *_BREAKS):
            return False
        return is_quiet and not stream.get_extra_info("is_readable")

    async def _perform(
        self, exchange: Exchange[ResultT], timeout_s: float | None = None
    ) -> ResultT:
        stream = self._stream()
        try:
            step = next(exchange)
            while True:
                if step is None:
                    step = exchange.send(await stream.read(READ_BYTES, timeout_s))
                else:
                    await stream.write(step, timeout_s)
                    step = next(exchange)
        except StopIteration as stop:
            result: ResultT = stop.value
            return result

    def _stream(self) -> httpcore.AsyncNetworkStream:
        assert self._opened is not None
        stream: httpcore.AsyncNetworkStream = self._opened.extensions["network_stream"]
        return stream

    async def _drop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with anyio.CancelScope(shield=True):
                await opened.aclose()


def stream_url(url: str) -> str:
    """Return where the WebSocket of a server is."""
    return "ws" + url.removeprefix("http") + STREAM_PATH


def opening(frames: Frames, request: HttpRequest) -> HttpRequest:
    """Return the request that opens a stream for another one."""
    return HttpRequest("GET", STREAM_PATH, request.gives_up_at, headers=frames.handshake)


def read_frame(frame: bytes | str) -> HttpReply:
    """Return a frame as the HTTP reply it stands for: text is a problem, which says its status."""
    if isinstance(frame, bytes):
        return HttpReply(200, frame)
    body = frame.encode()
    try:
        return HttpReply(decode(_STATUS, body)["status"], body)
    except WireError:
        return HttpReply(500, body)


def too_slow(url: str) -> TransportError:
    """Return what is said of an answer that did not come in time."""
    return AnswerTimeoutError(f"{url} took too long to answer on {STREAM_PATH}")


def failed_exchange(error: Exception, url: str) -> TransportError:
    """Return what an exception of the stream means to the call."""
    if isinstance(error, httpx.TransportError):
        return transport_error(error, url)
    if isinstance(error, _TIMEOUTS):
        return too_slow(url)
    reason = str(error) or type(error).__name__
    return ServerUnreachableError(f"cannot stream to {url}: {reason}; is the server running there?")
