"""Threads for work that would hold the event loop up: pictures to decode, long bodies to read.

Owners take turns, so that who sends a thousand pictures delays nobody else by more than one. Knows
nothing of what the work is.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from deft_server.errors import OverloadedError
from deft_server.serving.turns import Turns

NUM_THREADS = 2
MAX_PENDING = 64  # that wait for a thread, of all owners
BUSY_FOR_S = 0.1

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class _Job:
    """One call that waits for a thread, or is on one."""

    work: Callable[[], Any]
    result: "asyncio.Future[Any]"


class FairThreads:
    """Runs calls on a few threads. The owner that had a thread last goes last."""

    def __init__(self, num_threads: int = NUM_THREADS, max_pending: int = MAX_PENDING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        self._num_free = num_threads
        self._max_pending = max_pending
        self._pending: Turns[_Job] = Turns()

    @property
    def are_busy(self) -> bool:
        """Would a call have to wait for a thread?"""
        return self._num_free == 0

    async def run(self, owner: str, work: Callable[[], ResultT]) -> ResultT:
        """Return what `work` returns; raise `OverloadedError` where too much of it waits.

        Then the owner with most of it loses its newest. Cancelling gives up the place, but waits
        for work that has begun: what that holds may not be forgotten before.
        """
        job = _Job(work, asyncio.get_running_loop().create_future())
        try:
            self._join(owner, job)
            self._start()
            result: ResultT = await asyncio.shield(job.result)
        except asyncio.CancelledError:
            if not self._pending.discard(owner, job):
                await asyncio.wait((job.result,))
            raise
        finally:
            del job  # an error in it leads back here, and would keep the whole body in a cycle
        return result

    def stop(self) -> None:
        """Let the threads end; may be called on any of them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _join(self, owner: str, job: _Job) -> None:
        if len(self._pending) >= self._max_pending:
            largest = self._pending.largest()
            if self._pending.count(largest) <= self._pending.count(owner) + 1:
                raise _too_many()
            self._pending.take_newest(largest).result.set_exception(_too_many())
        self._pending.add(owner, job)

    def _start(self) -> None:
        """Give every free thread the next job."""
        while self._num_free and self._pending:
            job = self._pending.take()
            self._num_free -= 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            running.add_done_callback(partial(self._end, job))

    def _end(self, job: _Job, running: "asyncio.Future[Any]") -> None:
        self._num_free += 1
        error = None if running.cancelled() else running.exception()
        if running.cancelled():
            job.result.cancel()
        elif job.result.done():
            pass  # nobody waits for it any more
        elif error is not None:
            job.result.set_exception(error)
        else:
            job.result.set_result(running.result())
        self._start()


def _too_many() -> OverloadedError:
    return OverloadedError("too many pictures wait to be decoded", BUSY_FOR_S)
