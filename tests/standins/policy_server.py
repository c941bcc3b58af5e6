"""Servers that answer from a script, in memory or over a real WebSocket, and remember."""

import threading
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import contextmanager

import httpcore
import httpx
import websockets.sync.server
from websockets.exceptions import ConnectionClosed

from deft_core.errors import Problem
from deft_core.types import ServerInfo
from deft_core.wire import codec
from deft_core.wire.codec import decode_request
from tests.core.samples import full_answer

INFO = ServerInfo(
    policy="fake",
    action_dim=3,
    chunk_length=2,
    statistics_keys=("libero_goal", "libero_object"),
    default_statistics_key="libero_goal",
    image_height=224,
    image_width=224,
    image_chain="none",
    image_chains=("none",),
    decoding="lossless",
    decoding_methods=("lossless",),
    versions={"deft-vla": "0.1.0"},
)
ANSWER = codec.encode_answer(full_answer())

Reaction = httpx.Response | Exception


def refusal(status: int, detail: str = "because", **headers: str) -> httpx.Response:
    problem = Problem(status, "No", detail, field="state", request_id="r-1")
    return httpx.Response(
        status,
        content=codec.encode_problem(problem),
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


class ScriptedPool(httpcore.ConnectionPool):
    """Connections to nowhere: a function answers, and it reads and writes what httpx calls so."""

    def __init__(self, react: Callable[[httpx.Request], httpx.Response]) -> None:
        super().__init__()
        self._react = react

    def handle_request(self, request: httpcore.Request) -> httpcore.Response:
        assert isinstance(request.stream, Iterable)
        return answered(self._react, request, b"".join(request.stream))


class AsyncScriptedPool(httpcore.AsyncConnectionPool):
    """The same for asyncio."""

    def __init__(self, react: Callable[[httpx.Request], httpx.Response]) -> None:
        super().__init__()
        self._react = react

    async def handle_async_request(self, request: httpcore.Request) -> httpcore.Response:
        assert isinstance(request.stream, AsyncIterable)
        return answered(self._react, request, b"".join([part async for part in request.stream]))


def answered(
    react: Callable[[httpx.Request], httpx.Response], request: httpcore.Request, content: bytes
) -> httpcore.Response:
    url = bytes(request.url).decode()
    response = react(
        httpx.Request(request.method.decode(), url, headers=request.headers, content=content)
    )
    assert isinstance(response.stream, httpx.ByteStream)
    return httpcore.Response(
        response.status_code,
        headers=response.headers.raw,
        content=b"".join(response.stream),
        extensions=response.extensions,
    )


class FakeServer:
    """Reacts to each request with the next entry of a script, then as a sound server would."""

    def __init__(self, *script: Reaction) -> None:
        self._script = list(script)
        self.react = self._sound  # once the script is at its end
        self.requests: list[httpx.Request] = []

    @property
    def transport(self) -> ScriptedPool:
        return ScriptedPool(self._react)

    @property
    def async_transport(self) -> AsyncScriptedPool:
        return AsyncScriptedPool(self._react)

    def _react(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self._script:
            reaction = self._script.pop(0)
            if isinstance(reaction, Exception):
                raise reaction
            return reaction
        return self.react(request)

    def script(self, *reactions: Reaction) -> None:
        """Put off the sound answers once more."""
        self._script += reactions

    def _sound(self, request: httpx.Request) -> httpx.Response:
        match (request.method, request.url.path):
            case ("POST", "/v1/act"):
                return httpx.Response(200, content=ANSWER)
            case ("POST", "/v1/reset"):
                return httpx.Response(204)
            case ("GET", "/v1/info"):
                return httpx.Response(200, content=codec.encode_info(INFO))
            case ("GET", "/readyz"):
                return httpx.Response(200)
        return refusal(404)


PING = "ping"
# What is answered to one frame.
Answers = bytes | str | tuple[bytes | str, ...] | None | Callable[[bytes], "Answers"]


def repeating_id(frame: bytes) -> bytes:
    """Answer as Deft's servers do."""
    return codec.encode_answer(full_answer(), decode_request(frame).id)


class FakeStream:
    """What one scripted WebSocket server saw, and where it is."""

    def __init__(self, script: list[Answers]) -> None:
        self.otherwise: Answers = repeating_id  # once the script is at its end
        self.script = script  # None closes the connection instead of answering
        self.all_sent = threading.Event()  # all that belongs to one frame
        self.pongs: list[threading.Event] = []
        self.frames: list[bytes | str] = []
        self.connections = 0
        self.headers: list[str | None] = []
        self.url = ""

    def serve(self, connection: websockets.sync.server.ServerConnection) -> None:
        self.connections += 1
        self.headers.append(connection.request and connection.request.headers.get("authorization"))
        try:
            for frame in connection:
                self.frames.append(frame)
                answer = self.script.pop(0) if self.script else self.otherwise
                answer = answer(frame) if callable(answer) else answer
                if answer is None:
                    return
                for one in answer if isinstance(answer, tuple) else (answer,):
                    if one == PING:
                        self.pongs.append(connection.ping())
                    elif one:  # an empty answer is none at all: the client waits in vain
                        connection.send(one)
                self.all_sent.set()
        except ConnectionClosed:
            return


@contextmanager
def streaming(*script: Answers) -> Iterator[FakeStream]:
    """Serve a script on a WebSocket of this machine."""
    stream = FakeStream(list(script))
    with websockets.sync.server.serve(stream.serve, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stream.url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        try:
            yield stream
        finally:
            server.shutdown()
            thread.join()
