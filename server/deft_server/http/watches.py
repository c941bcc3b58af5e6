"""Ends work that nobody waits for: a caller went away, or its key was taken out of the file."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.types import Message, Receive

from deft_server.errors import CallerGoneError, MissingKeyError
from deft_server.serving.access import RECHECK_S, Access, Caller

# A watch needs a task of its own; most answers are there before that pays.
WATCH_AFTER_S = 0.02
_GONE = ("http.disconnect", "websocket.disconnect")

ResultT = TypeVar("ResultT")


def _end(timeout: asyncio.Timeout) -> None:
    """Have the block of a timeout end now; what became of it may be over already."""
    if not timeout.expired():
        timeout.reschedule(asyncio.get_running_loop().time())


class CallerWatch:
    """Watches one connection. What it receives early is in `early`, for whoever reads next."""

    def __init__(self, receive: Receive) -> None:
        self.early: Message | None = None
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None

    async def run(self, work: Awaitable[ResultT]) -> ResultT:
        """Await `work`; cancel it and raise `CallerGoneError` if the caller disconnects."""
        loop = asyncio.get_running_loop()
        until_gone = asyncio.timeout(None)
        timer = loop.call_later(WATCH_AFTER_S, self._start, until_gone)
        try:
            async with until_gone:
                return await work
        except TimeoutError:
            if until_gone.expired():
                raise CallerGoneError("the caller went away") from None
            raise
        finally:
            timer.cancel()
            if self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None

    async def next_message(self) -> Message:
        """Return what arrived while we watched, or wait for it."""
        message, self.early = self.early, None
        return await self._receive() if message is None else message

    def _start(self, until_gone: asyncio.Timeout) -> None:
        if self.early is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch(until_gone))

    async def _watch(self, until_gone: asyncio.Timeout) -> None:
        message = await self._receive()
        if message["type"] in _GONE:
            _end(until_gone)
        else:
            self.early = message


class KeyWatch:
    """Looks at the key file once a second for as long as anything is open."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._open: dict[asyncio.Timeout, Caller] = {}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def watching(self, caller: Caller) -> AsyncIterator[None]:
        """Raise `MissingKeyError` out of the block as soon as the caller's key is gone.

        A caller without a key is on an open path: the dashboard's feed asks for its key itself.
        """
        if not self._access.needs_key or not caller.fingerprint:
            yield
            return
        until_revoked = asyncio.timeout(None)
        self._open[until_revoked] = caller
        if self._timer is None:
            self._wait()
        try:
            async with until_revoked:
                yield
        except TimeoutError:
            if until_revoked.expired():
                self._access.require_known(caller)
            raise
        finally:
            del self._open[until_revoked]

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(RECHECK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        for until_revoked, caller in list(self._open.items()):
            try:
                self._access.require_known(caller)
            except MissingKeyError:
                _end(until_revoked)
        if self._open:
            self._wait()
