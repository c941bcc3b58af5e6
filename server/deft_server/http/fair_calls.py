"""Bounds what one turn of the event loop does for whom: addresses take turns, too.

A thousand connections of one address that speak at the same moment would be a second's work, and
whoever spoke then as well would wait for all of it.
"""

import asyncio
from collections.abc import Callable

from deft_server.serving.turns import Turns

MAX_CALLS_A_TURN = 8


class FairCalls:
    """Makes calls at once while there are few in a turn of the loop, and the others in its next.

    A call is the work of a few milliseconds: a connection to open, a request to begin with, a slice
    of a WebSocket to parse.
    """

    def __init__(self, most_a_turn: int = MAX_CALLS_A_TURN) -> None:
        self._most = most_a_turn
        self._waiting: Turns[Callable[[], None]] = Turns()
        self._num_made = 0  # in this turn
        self._next_turn: asyncio.Handle | None = None

    def count(self, address: str) -> int:
        """Return how many calls wait for an address."""
        return self._waiting.count(address)

    def make(self, address: str, call: Callable[[], None]) -> None:
        """Make a call on behalf of an address, now or when it is its turn."""
        if self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._begin_turn)
        if self._num_made < self._most and not self._waiting:
            self._num_made += 1
            call()
        else:
            self._waiting.add(address, call)

    def _begin_turn(self) -> None:
        self._next_turn = None
        self._num_made = min(self._most, len(self._waiting))
        if self._num_made:
            self._next_turn = asyncio.get_running_loop().call_soon(self._begin_turn)
        for _ in range(self._num_made):
            self._waiting.take()()
