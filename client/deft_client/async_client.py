"""The client for asyncio: `async with AsyncPolicyClient(url) as policy: await policy.act(frame)`.

One time limit around each try ends all that it waits for.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace

import httpcore

from deft_client.calls import (
    NETWORK_STREAM,
    REQUEST_ID,
    SHORTEST_WAIT_S,
    Attempts,
    ClientCalls,
    HttpReply,
    HttpRequest,
    Readiness,
    headers_of,
)
from deft_client.deadlines import KEPT_OPEN_S, MAX_CONNECTIONS
from deft_client.errors import AnswerTimeoutError, TransportError
from deft_client.settings import DEFAULT_URL, LOADING_S, ClientSettings
from deft_client.unreachable import FAILURES, transport_error
from deft_core.errors import DeftError
from deft_core.types import ActionChunk, ActOptions, Observation, ServerInfo


class AsyncPolicyClient(ClientCalls):
    """A policy behind HTTP, for asyncio. The calls of one event loop may share it.

    Arguments, methods, deadlines and exceptions are those of `PolicyClient`. Calls that are on
    their way at the same time have a connection each, and need a session each, by their options:
    of one session, the newest frame supersedes the others.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        settings: ClientSettings | None = None,
        transport: httpcore.AsyncConnectionPool | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(url, settings, api_key, timeout)
        self._transport = transport or httpcore.AsyncConnectionPool(
            self._context, self._proxy, MAX_CONNECTIONS, keepalive_expiry=KEPT_OPEN_S
        )

    async def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Return the actions that follow an observation; `round_trip_ms` is filled in."""
        started = time.perf_counter()
        return self._answer(await self.ask(self._act_request(observation, options)), started)

    async def act_all(
        self, observations: Mapping[str, Observation], options: ActOptions | None = None
    ) -> dict[str, ActionChunk | DeftError]:
        """Return the actions of several robots or environments: see `PolicyClient.act_all`."""
        started = time.perf_counter()
        reply = await self.ask(self._act_all_request(observations, options))
        return self._answers(reply, observations, started)

    async def reset(self, session_id: str | None = None) -> None:
        """Tell the server that an episode starts: what it remembers of the last one is void."""
        await self.ask(self._reset_request(session_id))

    async def info(self) -> ServerInfo:
        """Return what the server says about itself; later answers are held to it."""
        return self._server_info(await self.ask(self._info_request()))

    async def ping(self) -> float:
        """Return the milliseconds of one round trip; raises where the server is not ready."""
        started = time.perf_counter()
        await self.ask(self._ready_request(), attempts=1)
        return 1000 * (time.perf_counter() - started)

    async def wait_ready(self, timeout: float = LOADING_S) -> None:
        """Wait until the server is ready; raises why it is not once `timeout` seconds are over."""
        readiness = Readiness(timeout, self._waits)
        while True:
            try:
                await self.ask(self._ready_request(readiness.until), attempts=1)
            except DeftError as failure:
                await asyncio.sleep(readiness.pause_s(failure))
            else:
                return

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def __aenter__(self) -> "AsyncPolicyClient":
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def ask(self, request: HttpRequest, attempts: int | None = None) -> HttpReply:
        """Send a request until it is answered, or it is no use asking again."""
        retries = self.settings.retries
        if attempts is not None:
            retries = replace(retries, attempts=attempts)
        tries = Attempts(request, retries, self._waits)
        while True:
            failure: DeftError
            try:
                reply = await self._send(tries.request)
                if reply.status < 300:
                    return reply
                failure = self._failure(reply)
            except TransportError as error:
                failure = error
            await asyncio.sleep(tries.pause_s(failure))

    async def _send(self, request: HttpRequest) -> HttpReply:
        """Send a request once."""
        left_s = max(request.gives_up_at - time.monotonic(), SHORTEST_WAIT_S)
        try:
            return await asyncio.wait_for(self._exchange(request), left_s)
        except FAILURES as error:
            raise transport_error(error, self.url) from error
        except TimeoutError as error:
            raise AnswerTimeoutError(f"{self.url} took too long to answer") from error

    async def _exchange(self, request: HttpRequest) -> HttpReply:
        """Ask, and read the answer as `PolicyClient` does."""
        request_id, body = uuid.uuid4().hex, bytearray()
        async with self._transport.stream(**self._prepared(request, request_id)) as response:
            async for part in response.aiter_stream():
                self._take(body, part)
            reply = HttpReply(response.status, bytes(body), headers_of(response))
            is_kept = reply.headers.get(REQUEST_ID) == request_id
            if not is_kept and NETWORK_STREAM in response.extensions:
                await response.extensions[NETWORK_STREAM].aclose()
        return self._believed(request_id, reply)
