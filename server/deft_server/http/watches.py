"""Ends work that nobody waits for: a caller went away, or its key was taken out of the file."""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.types import Message, Receive

from deft_server.errors import CallerGoneError, MissingKeyError
from deft_server.serving.access import RECHECK_S, Access, Caller

# A watch needs a task of its own; most answers are there before that pays.
WATCH_AFTER_S = 0.02
_GONE = ("http.disconnect", "websocket.disconnect")

ResultT = TypeVar("ResultT")


class Cancellation:
    """One task that may be cancelled by us; tells our cancellation from anybody else's."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._was_ours = False

    def cancel(self) -> None:
        """Cancel the task this was made on."""
        self._was_ours = True
        self._task.cancel()

    def was_ours(self) -> bool:
        """Is the `CancelledError` just caught of our making? If so the task lives on."""
        if self._was_ours:
            self._task.uncancel()
        return self._was_ours


class CallerWatch:
    """Watches one connection. What it receives early is in `early`, for whoever reads next."""

    def __init__(self, receive: Receive) -> None:
        self.early: Message | None = None
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None

    async def run(self, work: Awaitable[ResultT]) -> ResultT:
        """Await `work`; cancel it and raise `CallerGoneError` if the caller disconnects."""
        loop = asyncio.get_running_loop()
        cancellation = Cancellation()
        timer = loop.call_later(WATCH_AFTER_S, self._start, cancellation)
        try:
            return await work
        except asyncio.CancelledError:
            if cancellation.was_ours():
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

    def _start(self, cancellation: Cancellation) -> None:
        if self.early is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch(cancellation))

    async def _watch(self, cancellation: Cancellation) -> None:
        message = await self._receive()
        if message["type"] in _GONE:
            cancellation.cancel()
        else:
            self.early = message


class KeyWatch:
    """Looks at the key file once a second for as long as anything is open."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._open: dict[Cancellation, Caller] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self, caller: Caller) -> Iterator[None]:
        """Raise `MissingKeyError` out of the block as soon as the caller's key is gone.

        A caller without a key is on an open path: the dashboard's feed asks for its key itself.
        """
        if not self._access.needs_key or not caller.fingerprint:
            yield
            return
        cancellation = Cancellation()
        self._open[cancellation] = caller
        if self._timer is None:
            self._wait()
        try:
            yield
        except asyncio.CancelledError:
            if cancellation.was_ours():
                self._access.require_known(caller)
            raise
        finally:
            del self._open[cancellation]

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(RECHECK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        for cancellation, caller in list(self._open.items()):
            try:
                self._access.require_known(caller)
            except MissingKeyError:
                cancellation.cancel()
        if self._open:
            self._wait()
