"""Takes connections from a listening socket, and opens them address by address, a few in a turn.

The event loop's own server opens all that wait at once, and whoever calls next waits for thousands
of a flood: the system's queue knows no addresses.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

from deft_server.http.bounds import ConnectionBounds

MAX_ACCEPTED_A_TURN = 256
TRY_AGAIN_S = 0.1  # where the system has no file descriptors left

logger = logging.getLogger(__name__)


class FairListener:
    """Listens from its making until it is closed; make it on the event loop."""

    def __init__(
        self,
        listening: socket.socket,
        build_protocol: Callable[[], asyncio.Protocol],
        bounds: ConnectionBounds,
    ) -> None:
        self._listening = listening
        self._build_protocol = build_protocol
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_closed = False
        listening.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Take no more connections, and open none of those that wait."""
        self._is_closed = True
        self._loop.remove_reader(self._listening)

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED_A_TURN):
            try:
                accepted, (address, *_) = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(TRY_AGAIN_S, self._listen)
                return
            if self._bounds.calls.count(address) < self._bounds.connections.most_per_address:
                self._bounds.calls.make(address, partial(self._open, accepted))
            else:
                accepted.close()

    def _open(self, accepted: socket.socket) -> None:
        if self._is_closed:
            accepted.close()
            return
        task = self._loop.create_task(self._connect(accepted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._build_protocol, accepted)
        except OSError as error:  # it has gone already
            logger.debug("a connection could not be opened: %s", error)
            accepted.close()
