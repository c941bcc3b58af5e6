"""Threads for work that would hold the event loop up: pictures to decode, long bodies to read."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from deft_server.errors import OverloadedError

NUM_THREADS = 2
MAX_PENDING = 64  # that are on a thread or wait for one
BUSY_FOR_S = 0.1

ResultT = TypeVar("ResultT")


class DecodeThreads:
    """Runs calls on a few threads, in the order in which they come."""

    def __init__(self, num_threads: int = NUM_THREADS, max_pending: int = MAX_PENDING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        self._max_pending = max_pending
        self._num_pending = 0

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return what `work` returns; raise `OverloadedError` where too much of it waits.

        Cancelling gives up the place; work that has begun counts until it ends.
        """
        if self._num_pending >= self._max_pending:
            raise OverloadedError("too many pictures wait to be decoded", BUSY_FOR_S)
        self._num_pending += 1
        loop = asyncio.get_running_loop()

        def ended(_: "Future[ResultT]") -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody counts any more
                loop.call_soon_threadsafe(self._leave)

        submitted = self._threads.submit(work)
        submitted.add_done_callback(ended)
        return await asyncio.wrap_future(submitted)

    def stop(self) -> None:
        """Let the threads end; may be called on any of them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self) -> None:
        self._num_pending -= 1
