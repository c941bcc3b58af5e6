"""Takes the body of a request in: bounded in bytes and in time."""

import asyncio
from dataclasses import dataclass

from starlette.types import Message, Receive

from deft_server.cancelling import Cancellation
from deft_server.errors import BodyTooLargeError, BodyTooSlowError, OverloadedError

BUSY_FOR_S = 1.0


@dataclass
class BodyBounds:
    """What all requests of a server share: the bounds, and the bytes they hold together."""

    max_bytes: int  # of one body
    max_total_bytes: int
    timeout_s: float
    total_bytes: int = 0


class BoundedBody:
    """Wraps an ASGI `receive`; raises an error of the server as soon as a bound is passed.

    Close it when the request is answered: until then its bytes count as held.
    """

    def __init__(self, receive: Receive, bounds: BodyBounds) -> None:
        self._receive = receive
        self._bounds = bounds
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._cancellation: Cancellation
        self.is_complete = False

    async def __call__(self) -> Message:
        """Return the next part of the body, or the news that the caller has gone."""
        if self.is_complete:
            return await self._receive()
        if self._timer is None:
            self._cancellation = Cancellation()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._bounds.timeout_s, self._cancellation.cancel)
        try:
            message = await self._receive()
        except asyncio.CancelledError:
            if self._cancellation.was_ours():
                raise BodyTooSlowError(
                    f"the body did not arrive within {self._bounds.timeout_s:g} s"
                ) from None
            raise
        self._take(len(message.get("body", b"")))
        if not message.get("more_body", False):
            self._timer.cancel()
            self.is_complete = True
        return message

    def close(self) -> None:
        """Stop the clock and let go of the bytes."""
        if self._timer is not None:
            self._timer.cancel()
        self._bounds.total_bytes -= self._num_bytes
        self._num_bytes = 0

    def _take(self, num_bytes: int) -> None:
        bounds = self._bounds
        self._num_bytes += num_bytes
        bounds.total_bytes += num_bytes
        if self._num_bytes > bounds.max_bytes:
            raise BodyTooLargeError(f"over the {bounds.max_bytes} bytes that are taken")
        if bounds.total_bytes > bounds.max_total_bytes:
            raise OverloadedError("too many bytes of requests are in hand", BUSY_FOR_S)
