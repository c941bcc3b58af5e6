"""What all connections of a server share, and how much of it there is: how many of them may be
open, the bytes that their requests and messages take, and threads for what would hold the event
loop up.

Knows nothing of sockets or messages.
"""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Lock
from typing import TypeVar

from deft_server.errors import OverloadedError
from deft_server.settings import Settings

SPARE_CONNECTIONS = 64  # beyond `max_connections`, for answers that say so
BUSY_FOR_S = 1.0
NUM_THREADS = 2
MAX_PENDING = 64  # that are on a thread or wait for one
DECODING_FOR_S = 0.1

ResultT = TypeVar("ResultT")


class ByteBudget:
    """The bytes of all requests and messages in hand, and of the pictures decoded from them.

    Where they are too many, only callers that hold more than their share are refused.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.now = 0
        self.by_owner: Counter[str] = Counter()
        self.lock = Lock()

    def add(self, num_bytes: int, owner: str) -> bool:
        """Count more bytes of an owner, or fewer; tell whether it may hold so many.

        Call it with the lock held: pictures are decoded on threads.
        """
        self.now += num_bytes
        self.by_owner[owner] += num_bytes
        held = self.by_owner[owner]
        if not held:
            del self.by_owner[owner]
        return self.now <= self.most or held * len(self.by_owner) <= self.most


class Exchange:
    """One request or message, from its first byte until its answer has left.

    Its bytes count for its owner, and so do the pictures decoded from it. Any thread may use it.
    """

    def __init__(self, budget: ByteBudget, owner: str, num_bytes: int = 0) -> None:
        self._budget = budget
        self._owner = owner
        self._num_bytes = 0
        self._is_open = True
        self._count(num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Count more bytes, or raise `OverloadedError`; they are counted until it is closed."""
        if num_bytes and not self._count(num_bytes):
            raise OverloadedError(
                f"too many bytes of requests are in hand: over {self._budget.most}, see "
                "max_total_bytes",
                BUSY_FOR_S,
            )

    def release(self, num_bytes: int) -> None:
        """Count bytes as gone."""
        self._count(-num_bytes)

    def move_to(self, owner: str) -> None:
        """Count what it holds for somebody else: now it is known who calls."""
        num_bytes = self._num_bytes
        self._count(-num_bytes)
        self._owner = owner
        self._count(num_bytes)

    def close(self) -> None:
        """Let go of everything; nothing can be held any more."""
        with self._budget.lock:
            if self._is_open:
                self._budget.add(-self._num_bytes, self._owner)
            self._is_open = False

    def _count(self, num_bytes: int) -> bool:
        with self._budget.lock:
            if not self._is_open:
                return False  # a thread may go on for a caller that has left
            self._num_bytes += num_bytes
            return self._budget.add(num_bytes, self._owner)


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
        self.budget = ByteBudget(settings.max_total_bytes)
        self.num_open = 0  # connections
        self._open: Counter[str] = Counter()  # of each address
        self._in_hand: Counter[str] = Counter()  # requests and WebSockets of each caller's address
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

    @contextmanager
    def in_hand(self, address: str) -> Iterator[None]:
        """Count a request or a WebSocket of a caller whom a proxy may have named.

        Its connection counts for the proxy. Raises `OverloadedError` where there are enough.
        """
        most = self.settings.max_connections_per_address
        if self._in_hand[address] >= most:
            raise OverloadedError(
                f"{most} requests and WebSockets of this address are in hand; close some, see "
                "max_connections_per_address",
                BUSY_FOR_S,
            )
        self._in_hand[address] += 1
        try:
            yield
        finally:
            self._in_hand[address] -= 1
            if not self._in_hand[address]:
                del self._in_hand[address]

    def _is_proxy(self, address: str) -> bool:
        """Whether an address stands for many callers."""
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(ip in one for one in self._proxies)
