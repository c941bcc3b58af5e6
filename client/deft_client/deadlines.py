"""Connections that end at a moment, whatever the other side does.

httpcore bounds each phase of a call, and within a phase each wait for a byte: a server that sends
one now and then holds its caller for ever. Here every wait of a call ends at the same moment:
finding the address, connecting, TLS, sending, reading. Knows nothing of HTTP.
"""

import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from ipaddress import ip_address

import httpcore

# httpcore asks for 64 KiB, and parses all that it got before it looks at the clock again: of many
# tiny messages that is a tenth of a second.
MAX_READ_BYTES = 4096
MAX_CONNECTIONS = 100
KEPT_OPEN_S = 60.0  # a connection that is not used
NEVER = float("inf")

_gives_up_at: ContextVar[float] = ContextVar("deft_client_gives_up_at", default=NEVER)


def ends_at() -> float:
    """Return the moment at which this thread's calls end, whatever they allow themselves."""
    return _gives_up_at.get()


@contextmanager
def ending_at(moment: float) -> Iterator[None]:
    """End every wait of this thread's connections at a moment of `time.monotonic`.

    Inside another one the earlier moment counts.
    """
    token = _gives_up_at.set(min(moment, ends_at()))
    try:
        yield
    finally:
        _gives_up_at.reset(token)


def remaining_s(
    timeout: float | None, over: type[httpcore.TimeoutException] = httpcore.ReadTimeout
) -> float | None:
    """Return the seconds one wait may take, or raise where the call's time is over."""
    left = _gives_up_at.get() - time.monotonic()
    if left <= 0:
        raise over("the time for the whole call is over")
    if left == NEVER:
        return timeout
    return left if timeout is None else min(timeout, left)


def connection_pool(
    context: ssl.SSLContext | None, proxy: httpcore.Proxy | None
) -> httpcore.ConnectionPool:
    """Return connections that know about `ending_at`."""
    return httpcore.ConnectionPool(
        context, proxy, MAX_CONNECTIONS, keepalive_expiry=KEPT_OPEN_S, network_backend=_Backend()
    )


class _Backend(httpcore.SyncBackend):
    """Connects in time."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in _addresses(host, port, timeout):
            wait_s = remaining_s(timeout, httpcore.ConnectTimeout)
            try:
                stream = super().connect_tcp(address, port, wait_s, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return _Stream(stream)
        raise failure


class _Stream(httpcore.NetworkStream):
    """One connection, every wait on which ends in time."""

    def __init__(self, stream: httpcore.NetworkStream, is_nested: bool = False) -> None:
        self._stream = stream
        self._is_nested = is_nested  # TLS inside TLS, through an https proxy

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(min(max_bytes, MAX_READ_BYTES), remaining_s(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all of it, looking at the clock whenever the other side has taken some."""
        if self._is_nested:  # its socket is the outer one: only the stream can encrypt twice
            self._stream.write(buffer, remaining_s(timeout, httpcore.WriteTimeout))
            return
        connection: socket.socket = self._stream.get_extra_info("socket")
        left = memoryview(buffer)
        while left:
            wait_s = remaining_s(timeout, httpcore.WriteTimeout)
            try:
                connection.settimeout(wait_s)
                left = left[connection.send(left) :]
            except TimeoutError as error:
                raise httpcore.WriteTimeout(str(error)) from error
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        wait_s = remaining_s(timeout, httpcore.ConnectTimeout)
        is_nested = isinstance(self.get_extra_info("socket"), ssl.SSLSocket)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, wait_s), is_nested)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)


def _addresses(host: str, port: int, timeout: float | None) -> list[str]:
    """Return the addresses of a host. The system has no time limit for looking them up,
    so a thread that nobody waits for any longer does it."""
    results: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

    def look() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            results.put(error)
        else:
            results.put([str(address[0]) for *_, address in entries])

    with suppress(ValueError):
        ip_address(host)
        return [host]
    threading.Thread(target=look, name="deft-client-addresses", daemon=True).start()
    try:
        addresses = results.get(timeout=remaining_s(timeout, httpcore.ConnectTimeout))
    except queue.Empty:
        raise httpcore.ConnectTimeout(f"the address of {host} was not found in time") from None
    if isinstance(addresses, OSError):
        try:  # httpcore drops the cause of an error and keeps its context
            raise addresses
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
    return addresses
