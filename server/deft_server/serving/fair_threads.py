"""Threads for work that would hold the event loop up: pictures to decode, long bodies to read.

Owners take turns, so that who sends a thousand pictures delays nobody else by more than one. Knows
nothing of what the work is.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from deft_server.errors import OverloadedError

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
        self._num_pending = 0
        self._pending: OrderedDict[str, deque[_Job]] = OrderedDict()  # whose turn it is first

    async def run(self, owner: str, work: Callable[[], ResultT]) -> ResultT:
        """Return what `work` returns; raise `OverloadedError` where too much of it waits.

        Then the owner with most of it loses its newest. Cancelling gives up the place.
        """
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._join(owner, job)
        self._start()
        try:
            result: ResultT = await job.result
        except asyncio.CancelledError:
            self._give_up(owner, job)
            raise
        return result

    def stop(self) -> None:
        """Let the threads end; may be called on any of them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _join(self, owner: str, job: _Job) -> None:
        if self._num_pending >= self._max_pending:
            largest = max(self._pending, key=lambda one: len(self._pending[one]))
            error = OverloadedError("too many pictures wait to be decoded", BUSY_FOR_S)
            if len(self._pending[largest]) <= len(self._pending.get(owner, ())) + 1:
                raise error
            loser = self._pending[largest].pop()
            self._num_pending -= 1
            loser.result.set_exception(error)
        self._pending.setdefault(owner, deque()).append(job)
        self._num_pending += 1

    def _give_up(self, owner: str, job: _Job) -> None:
        own = self._pending.get(owner, ())
        if job in own:
            self._pending[owner].remove(job)
            self._num_pending -= 1
            if not self._pending[owner]:
                del self._pending[owner]

    def _start(self) -> None:
        """Give every free thread the first job of the owner whose turn it is."""
        while self._num_free and self._pending:
            owner, own = self._pending.popitem(last=False)
            job = own.popleft()
            if own:
                self._pending[owner] = own
            self._num_pending -= 1
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
