"""The client for asyncio: `async with AsyncPolicyClient(url) as policy: await policy.act(frame)`.

It uses httpx's public transport; one time limit around each try ends all that it waits for.
"""

import asyncio
import time
from collections.abc import AsyncIterable, Mapping
from dataclasses import replace
from typing import cast

import httpx

from deft_client.calls import (
    REQUEST_ID,
    SHORTEST_WAIT_S,
    Attempts,
    ClientCalls,
    HttpReply,
    HttpRequest,
    Readiness,
)
from deft_client.deadlines import KEPT_OPEN
from deft_client.errors import AnswerTimeoutError, TransportError
from deft_client.settings import DEFAULT_URL, LOADING_S, ClientSettings
from deft_client.unreachable import transport_error
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
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(url, settings, api_key, timeout)
        self._transport = transport or httpx.AsyncHTTPTransport(
            verify=self._context, limits=KEPT_OPEN, proxy=self.settings.proxy
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
        readiness = Readiness(timeout)
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
        tries = Attempts(request, retries)
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
            return await asyncio.wait_for(self._exchange(self._prepared(request)), left_s)
        except httpx.TransportError as error:
            raise transport_error(error, self.url) from error
        except TimeoutError as error:
            raise AnswerTimeoutError(f"{self.url} took too long to answer") from error

    async def _exchange(self, sent: httpx.Request) -> HttpReply:
        """Read an answer, or refuse one that is too long or that another request asked for.

        A connection is kept only where answers say which request they are to: on any other, what
        came unasked would be the next answer.
        """
        response = await self._transport.handle_async_request(sent)
        body, is_ours = bytearray(), self._is_ours(sent, response)
        try:
            async for part in cast(AsyncIterable[bytes], response.stream):
                self._take(body, part)
            if not is_ours or REQUEST_ID not in response.headers:
                await _hang_up(response)
        finally:
            await response.aclose()
        return self._reply_of(response, body, is_ours)


async def _hang_up(response: httpx.Response) -> None:
    stream = response.extensions.get("network_stream")
    if stream is not None:
        await stream.aclose()
