"""Bounds what one turn of the event loop does for whom: addresses take turns, too.

A thousand connections of one address that speak at the same moment would be a second's work, and
whoever spoke then as well would wait for all of it.
"""

import asyncio
import time
from collections.abc import Callable

from deft_server.serving.turns import Turns

MAX_CALLS_A_TURN = 8  # most of them begin what the next turn goes on with
MAX_TURN_S = 0.005  # after which no call is made any more


class FairCalls:
    """Makes calls at once while there are few in a turn of the loop, and the others in its next.

    A call is the work of a few milliseconds: a connection to open, a request to begin with, a few
    frames of a WebSocket to parse.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: Turns[Callable[[], None]] = Turns()
        self._num_made, self._until_s = 0, 0.0  # in this turn, and its end
        self._next_turn: asyncio.Handle | None = None

    def count(self, address: str) -> int:
        """Return how many calls wait for an address."""
        return self._waiting.count(address)

    def make(self, address: str, call: Callable[[], None]) -> None:
        """Make a call on behalf of an address, now or when it is its turn."""
        if self._next_turn is None:
            self._enter_turn()
        elif self._waiting or self._is_over():
            self._waiting.add(address, call)
            return
        self._num_made += 1
        call()

    def _enter_turn(self) -> None:
        self._num_made, self._until_s = 0, self._clock() + MAX_TURN_S
        self._next_turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def _is_over(self) -> bool:
        return self._num_made >= MAX_CALLS_A_TURN or self._clock() >= self._until_s

    def _end_turn(self) -> None:
        self._next_turn = None
        if self._waiting:
            self._enter_turn()
            while self._waiting and not self._is_over():
                self._num_made += 1
                self._waiting.take()()
