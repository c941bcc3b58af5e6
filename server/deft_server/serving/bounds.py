"""What all connections of a server share, and how much of it there is: how many of them may be
open, the bytes they hold, and threads for what would hold the event loop up.

Knows nothing of sockets or messages.
"""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TypeVar

from deft_server.errors import OverloadedError
from deft_server.settings import Settings

SPARE_CONNECTIONS = 64  # beyond `max_connections`, for answers that say so
BUSY_FOR_S = 1.0
NUM_THREADS = 2
MAX_PENDING = 64  # that are on a thread or wait for one
DECODING_FOR_S = 0.1

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class HeldBytes:
    """The bytes of all requests and messages that were received and not answered yet, and of the
    large pictures decoded from them.

    Where they are too many, only addresses that hold more than their share are refused.
    """

    most: int
    now: int = 0
    by_address: Counter[str] = field(default_factory=Counter)

    def hold(self, num_bytes: int, address: str) -> None:
        """Count bytes as held, or raise `OverloadedError`; they are counted in any case."""
        self.release(-num_bytes, address)
        held = self.by_address[address]
        if num_bytes > 0 and self.now > self.most < held * len(self.by_address):
            raise OverloadedError(
                f"too many bytes of requests are in hand: over {self.most}, see max_total_bytes",
                BUSY_FOR_S,
            )

    def release(self, num_bytes: int, address: str) -> None:
        """Count bytes as gone."""
        self.now -= num_bytes
        self.by_address[address] -= num_bytes
        if not self.by_address[address]:
            del self.by_address[address]


class DecodeThreads:
    """Runs what would hold the event loop up on a few threads, in the order in which it comes."""

    def __init__(self, num_threads: int = NUM_THREADS, max_pending: int = MAX_PENDING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        self._max_pending = max_pending
        self._num_pending = 0

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return what `work` returns; raise `OverloadedError` where too much of it waits.

        Cancelling gives up the place and what the work holds; work that has begun counts until it
        ends.
        """
        if self._num_pending >= self._max_pending:
            raise OverloadedError("too many pictures wait to be decoded", DECODING_FOR_S)
        self._num_pending += 1
        loop = asyncio.get_running_loop()

        def ended(_: "Future[ResultT]") -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody counts any more
                loop.call_soon_threadsafe(self._leave)

        waiting = [work]  # the executor keeps what was cancelled until its turn comes
        del work
        submitted = self._threads.submit(lambda: waiting.pop()())
        submitted.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(submitted)
        finally:
            waiting.clear()
            del submitted  # holds an error whose traceback holds this: nobody would free the body

    def start(self) -> None:
        """Load the image library before the first picture needs it."""
        for name in ("PIL.PngImagePlugin", "PIL.JpegImagePlugin"):
            self._threads.submit(import_module, name)

    def stop(self) -> None:
        """Let the threads end; may be called on any of them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self) -> None:
        self._num_pending -= 1


class ConnectionBounds:
    """The bounds of every connection, how many are open, and what they hold together."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.held = HeldBytes(settings.max_total_bytes)
        self.num_open = 0  # connections
        self._open: Counter[str] = Counter()  # of each address
        self._most = settings.max_connections + SPARE_CONNECTIONS
        self._proxies = [ipaddress.ip_network(one) for one in settings.trusted_proxies]

    def enter(self, address: str) -> bool:
        """Count one more connection, or return False: there are enough."""
        if self.num_open >= self._most:
            return False
        most = self.settings.max_connections_per_address
        if self._open[address] >= most and not self._is_proxy(address):
            return False
        self.num_open += 1
        self._open[address] += 1
        return True

    def leave(self, address: str) -> None:
        """Count one connection less."""
        self.num_open -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def _is_proxy(self, address: str) -> bool:
        """Whether an address stands for many callers."""
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(ip in one for one in self._proxies)
