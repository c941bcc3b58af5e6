"""The same clients over one WebSocket, for the shortest round trips.

Frames alternate strictly: a binary request, then a binary answer, or a problem as text. Everything
but `act` still goes over HTTP. A broken connection is made anew under the same rules of retrying.
"""

import asyncio
import threading
from contextlib import AsyncExitStack, ExitStack

import httpx
import websockets.asyncio.client
import websockets.sync.client
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from deft_client.calls import ACT_PATH, HttpReply, HttpRequest
from deft_client.client import AsyncPolicyClient, PolicyClient, authorization
from deft_client.errors import (
    AnswerTimeoutError,
    ServerUnreachableError,
    TransportError,
    WireError,
)
from deft_client.settings import DEFAULT_URL, ClientSettings
from deft_client.wire.fields import (
    Json,
    Kind,
    record,
    whole,
)
from deft_client.wire.json_codec import decode

STREAM_PATH = "/v1/stream"
CLOSE_TIMEOUT_S = 1.0
_STATUS: Kind[Json] = record(dict, {"status": whole(400, 599)}, is_open=True)
_FAILURES = (OSError, TimeoutError, asyncio.TimeoutError, ConnectionClosed, InvalidHandshake)


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
        self._opened = ExitStack()
        self._connection: websockets.sync.client.ClientConnection | None = None

    def close(self) -> None:
        """Close both connections."""
        with self._turn:
            self._drop()
        super().close()

    def __enter__(self) -> "StreamClient":
        return self

    def _send(self, request: HttpRequest) -> HttpReply | TransportError:
        if request.path != ACT_PATH:
            return super()._send(request)
        with self._turn:
            return self._exchange(request.body)

    def _exchange(self, frame: bytes) -> HttpReply | TransportError:
        answered = False
        try:
            if self._connection is None:
                self._connection = self._opened.enter_context(self._connect())
            self._connection.send(frame)
            answer = self._connection.recv(timeout=self.settings.timeouts.answer_s)
            answered = True
            return read_frame(answer)
        except _FAILURES as error:
            return failed_exchange(error, self._connection is not None, self.url)
        finally:
            # Whatever interrupted us, a late answer must never be taken for that of the next
            # observation.
            if not answered:
                self._drop()

    def _connect(self) -> websockets.sync.client.ClientConnection:
        return websockets.sync.client.connect(
            stream_url(self.url),
            ssl=self._ssl,
            proxy=self.settings.proxy,
            additional_headers=authorization(self.settings),
            open_timeout=self.settings.timeouts.connect_s,
            close_timeout=CLOSE_TIMEOUT_S,
            max_size=self.settings.limits.max_bytes,
            compression=None,  # pixels do not shrink, and the round trip is what counts
        )

    def _drop(self) -> None:
        self._connection = None
        self._opened.close()


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
        self._opened = AsyncExitStack()
        self._connection: websockets.asyncio.client.ClientConnection | None = None

    async def aclose(self) -> None:
        """Close both connections."""
        async with self._turn:
            await self._drop()
        await super().aclose()

    async def __aenter__(self) -> "AsyncStreamClient":
        return self

    async def _send(self, request: HttpRequest) -> HttpReply | TransportError:
        if request.path != ACT_PATH:
            return await super()._send(request)
        async with self._turn:
            return await self._exchange(request.body)

    async def _exchange(self, frame: bytes) -> HttpReply | TransportError:
        answered = False
        try:
            if self._connection is None:
                self._connection = await self._opened.enter_async_context(self._connect())
            await self._connection.send(frame)
            receiving = self._connection.recv()
            answer = await asyncio.wait_for(receiving, self.settings.timeouts.answer_s)
            answered = True
            return read_frame(answer)
        except _FAILURES as error:
            return failed_exchange(error, self._connection is not None, self.url)
        finally:
            if not answered:  # see StreamClient
                await self._drop()

    def _connect(self) -> websockets.asyncio.client.connect:
        return websockets.asyncio.client.connect(
            stream_url(self.url),
            ssl=self._ssl,
            proxy=self.settings.proxy,
            additional_headers=authorization(self.settings),
            open_timeout=self.settings.timeouts.connect_s,
            close_timeout=CLOSE_TIMEOUT_S,
            max_size=self.settings.limits.max_bytes,
            compression=None,
        )

    async def _drop(self) -> None:
        self._connection = None
        await self._opened.aclose()


def stream_url(url: str) -> str:
    """Return where the WebSocket of a server is."""
    return "ws" + url.removeprefix("http") + STREAM_PATH


def read_frame(frame: bytes | str) -> HttpReply:
    """Return a frame as the HTTP reply it stands for: text is a problem, which says its status."""
    if isinstance(frame, bytes):
        return HttpReply(200, frame)
    body = frame.encode()
    try:
        return HttpReply(decode(_STATUS, body)["status"], body)
    except WireError:
        return HttpReply(500, body)


def failed_exchange(error: Exception, connected: bool, url: str) -> HttpReply | TransportError:
    """Return what an exception of the WebSocket means to the call."""
    if isinstance(error, InvalidStatus):
        response = error.response
        headers = {name.lower(): value for name, value in response.headers.raw_items()}
        return HttpReply(response.status_code, bytes(response.body), headers)
    if connected and isinstance(error, TimeoutError | asyncio.TimeoutError):
        return AnswerTimeoutError(f"{url} took too long to answer on {STREAM_PATH}")
    reason = str(error) or type(error).__name__
    return ServerUnreachableError(f"cannot stream to {url}: {reason}; is the server running there?")
