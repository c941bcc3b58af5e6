"""The client a robot uses: `with PolicyClient(url) as policy: policy.act(observation)`.

All decisions are made in `calls`; this file performs them, once blocking and once with asyncio.
It uses httpx's transports without httpx's client around them: cookies, redirects and authentication
flows are of no use here, and took a third of the processor time of a call. Nor are bodies inflated:
nobody asks for compressed answers, and a small one can become gigabytes.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterable, Iterable
from types import TracebackType
from typing import TypeVar, cast

import anyio
import httpx

from deft_client.calls import (
    Call,
    HttpReply,
    HttpRequest,
    Outcome,
    Pause,
    act_call,
    info_call,
    ping_call,
    reset_call,
)
from deft_client.deadlines import AsyncDeadlineTransport, DeadlineTransport, ending_at
from deft_client.errors import (
    AnswerTimeoutError,
    MessageTooLargeError,
    ServerUnreachableError,
    TransportError,
)
from deft_client.settings import DEFAULT_URL, ClientSettings, check_url
from deft_client.types import ActionChunk, ActOptions, Observation, ServerInfo, altered

ResultT = TypeVar("ResultT")
REQUEST_ID = "x-request-id"
SHORTEST_WAIT_S = 0.001  # 0 would mean not to wait at all


class _Caller:
    """What both clients know: where the server is, how to talk to it, and who is talking."""

    def __init__(self, url: str = DEFAULT_URL, settings: ClientSettings | None = None) -> None:
        self.url = check_url(url)
        self.settings = settings or ClientSettings()
        self.session_id = uuid.uuid4().hex  # of acts and resets that name no other
        self._headers = {"user-agent": "deft-client", **authorization(self.settings)}
        tls = self.settings.tls
        self._urls: dict[str, httpx.URL] = {}
        self._action_dim: int | None = None  # what `info` promised, once it was asked
        self._ssl = tls.context() if tls is not None and self.url.startswith("https") else None

    def _act(self, observation: Observation, options: ActOptions | None) -> Call[ActionChunk]:
        given = options or ActOptions()
        options = altered(given, {"session_id": given.session_id or self.session_id})
        return act_call(observation, options, self.settings, self._action_dim)

    def _reset(self, session_id: str | None) -> Call[None]:
        return reset_call(session_id or self.session_id, self.settings)

    def _promised(self, info: ServerInfo) -> ServerInfo:
        """Remember how long an action of this server is: answers are held to it."""
        self._action_dim = info.action_dim
        return info

    def _prepared(self, request: HttpRequest) -> httpx.Request:
        """Return the request as the transport takes it."""
        left_s = max(request.gives_up_at - time.monotonic(), SHORTEST_WAIT_S)
        connect_s = min(self.settings.timeouts.connect_s, left_s)
        per_phase = {"connect": connect_s, "write": left_s, "read": left_s, "pool": left_s}
        url = self._urls.get(request.path)
        if url is None:
            url = self._urls[request.path] = httpx.URL(self.url + request.path)
        return httpx.Request(
            request.method,
            url,
            headers={REQUEST_ID: uuid.uuid4().hex, **self._headers, **request.headers},
            content=request.body,
            extensions={"timeout": per_phase},
        )


class PolicyClient(_Caller):
    """A policy behind HTTP, one connection kept open. May be shared by threads.

    Raises the exceptions of `deft_client.errors` and no others. Each client is one robot's
    session unless the options name another.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        settings: ClientSettings | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, settings)
        self._transport = transport or DeadlineTransport(self._ssl or True, self.settings.proxy)

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Return the actions that follow an observation; `round_trip_ms` is filled in."""
        started = time.perf_counter()
        return timed(self._run(self._act(observation, options)), started)

    def reset(self, session_id: str | None = None) -> None:
        """Tell the server that an episode starts: what it remembers of the last one is void."""
        self._run(self._reset(session_id))

    def info(self) -> ServerInfo:
        """Return what the server says about itself."""
        return self._promised(self._run(info_call(self.settings)))

    def ping(self) -> float:
        """Return the milliseconds of one round trip; raises where the server is not ready."""
        started = time.perf_counter()
        self._run(ping_call(self.settings))
        return 1000 * (time.perf_counter() - started)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def __enter__(self) -> "PolicyClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, call: Call[ResultT]) -> ResultT:
        outcome: Outcome = None
        while True:
            try:
                step = call.send(outcome)
            except StopIteration as stop:
                result: ResultT = stop.value
                return result
            outcome = None
            if isinstance(step, Pause):
                time.sleep(step.seconds)
            else:
                outcome = self._send(step)

    def _send(self, request: HttpRequest) -> HttpReply | TransportError:
        sent = self._prepared(request)
        try:
            with ending_at(request.gives_up_at):
                return self._reply(sent, self._transport.handle_request(sent))
        except httpx.TransportError as error:
            return transport_error(error, self.url)

    def _reply(self, sent: httpx.Request, response: httpx.Response) -> HttpReply | TransportError:
        body = bytearray()
        try:
            for part in cast(Iterable[bytes], response.stream):
                take_part(body, part, self.settings)
        finally:
            response.close()
        if is_answer(response, sent):
            return HttpReply(response.status_code, bytes(body), response.headers)
        response.extensions["network_stream"].close()
        return mixed_up(self.url)


class AsyncPolicyClient(_Caller):
    """`PolicyClient` for asyncio."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        settings: ClientSettings | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, settings)
        self._transport = transport or AsyncDeadlineTransport(
            self._ssl or True, self.settings.proxy
        )

    async def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Return the actions that follow an observation; `round_trip_ms` is filled in."""
        started = time.perf_counter()
        return timed(await self._run(self._act(observation, options)), started)

    async def reset(self, session_id: str | None = None) -> None:
        """Tell the server that an episode starts: what it remembers of the last one is void."""
        await self._run(self._reset(session_id))

    async def info(self) -> ServerInfo:
        """Return what the server says about itself."""
        return self._promised(await self._run(info_call(self.settings)))

    async def ping(self) -> float:
        """Return the milliseconds of one round trip; raises where the server is not ready."""
        started = time.perf_counter()
        await self._run(ping_call(self.settings))
        return 1000 * (time.perf_counter() - started)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._transport.aclose()

    async def __aenter__(self) -> "AsyncPolicyClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _run(self, call: Call[ResultT]) -> ResultT:
        outcome: Outcome = None
        while True:
            try:
                step = call.send(outcome)
            except StopIteration as stop:
                result: ResultT = stop.value
                return result
            outcome = None
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            else:
                outcome = await self._send(step)

    async def _send(self, request: HttpRequest) -> HttpReply | TransportError:
        sent = self._prepared(request)
        try:
            with anyio.fail_after(request.gives_up_at - time.monotonic()):
                return await self._reply(sent, await self._transport.handle_async_request(sent))
        except httpx.TransportError as error:
            return transport_error(error, self.url)
        except TimeoutError:
            return AnswerTimeoutError(f"{self.url} took too long to answer")

    async def _reply(
        self, sent: httpx.Request, response: httpx.Response
    ) -> HttpReply | TransportError:
        body = bytearray()
        try:
            async for part in cast(AsyncIterable[bytes], response.stream):
                take_part(body, part, self.settings)
        finally:
            await response.aclose()
        if is_answer(response, sent):
            return HttpReply(response.status_code, bytes(body), response.headers)
        await response.extensions["network_stream"].aclose()
        return mixed_up(self.url)


def authorization(settings: ClientSettings) -> dict[str, str]:
    """Return the header that carries the API key, if there is one."""
    return {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}


def take_part(body: bytearray, part: bytes, settings: ClientSettings) -> None:
    """Add a part to a body, or refuse a body that has become too long."""
    if len(body) + len(part) > settings.limits.max_bytes:
        raise MessageTooLargeError(
            "answer", f"is longer than the {settings.limits.max_bytes} bytes that are taken"
        )
    body += part


def is_answer(response: httpx.Response, sent: httpx.Request) -> bool:
    """Is this the answer to that request? A server that repeats no request id is believed."""
    own: str = sent.headers[REQUEST_ID]
    repeated: str = response.headers.get(REQUEST_ID, own)
    return repeated == own


def mixed_up(url: str) -> TransportError:
    """Return what is said of an answer that nobody asked for; its connection must be closed."""
    return ServerUnreachableError(f"{url} sent an answer to another request; it was not used")


def timed(chunk: ActionChunk, started: float) -> ActionChunk:
    """Return the chunk with the time since `started` as its round trip."""
    round_trip_ms = 1000 * (time.perf_counter() - started)
    timings = altered(chunk.timings, {"round_trip_ms": round_trip_ms})
    return altered(chunk, {"timings": timings})


def transport_error(error: httpx.TransportError, url: str) -> TransportError:
    """Return our exception for one of httpx's."""
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout | httpx.PoolTimeout):
        return AnswerTimeoutError(f"{url} took too long to answer ({type(error).__name__})")
    return ServerUnreachableError(
        f"cannot reach {url}: {error or type(error).__name__}; is the server running there?"
    )
