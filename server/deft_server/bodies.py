"""Takes the body of a request in: bounded in bytes and in time."""

import asyncio

from starlette.types import Message, Receive

from deft_server.cancelling import Cancellation
from deft_server.errors import BodyTooLargeError, BodyTooSlowError


class BoundedBody:
    """Wraps an ASGI `receive`; raises `BodyError` as soon as a bound is passed."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
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
            self._timer = loop.call_later(self._timeout_s, self._cancellation.cancel)
        try:
            message = await self._receive()
        except asyncio.CancelledError:
            if self._cancellation.was_ours():
                raise BodyTooSlowError(
                    f"the body did not arrive within {self._timeout_s:g} s"
                ) from None
            raise
        self._num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            self.close()
            self.is_complete = True
        if self._num_bytes > self._max_bytes:
            raise BodyTooLargeError(f"over the {self._max_bytes} bytes that are taken")
        return message

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
