"""The body of a request, as large and as slow as it may be."""

import asyncio

from starlette.types import Message, Receive

from deft_server.errors import BodyTooLargeError, BodyTooSlowError
from deft_server.http.watches import Cancellation
from deft_server.serving.bounds import ConnectionBounds

SMALL_BODY_BYTES = 2048  # of requests that are not frames: a name, at most, however escaped


class BoundedBody:
    """Wraps an ASGI `receive`; raises an error of the server as soon as a bound is passed.

    Close it when the request is answered: until then its bytes count as held.
    """

    def __init__(
        self, receive: Receive, bounds: ConnectionBounds, max_bytes: int, address: str
    ) -> None:
        self._receive = receive
        self._address = address
        self._bounds = bounds
        self._max_bytes = max_bytes
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
            timeout_s = self._bounds.settings.body_timeout_s
            self._timer = loop.call_later(timeout_s, self._cancellation.cancel)
        try:
            message = await self._receive()
        except asyncio.CancelledError:
            if self._cancellation.was_ours():
                raise BodyTooSlowError(
                    f"the body did not arrive within {self._bounds.settings.body_timeout_s:g} s"
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
        self._bounds.held.release(self._num_bytes, self._address)
        self._num_bytes = 0

    def _take(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bounds.held.hold(num_bytes, self._address)
        if self._num_bytes > self._max_bytes:
            raise BodyTooLargeError(f"over the {self._max_bytes} bytes that are taken here")


def check_length(content_length: bytes, most: int) -> None:
    """Refuse a body by what its header says, which may be digits without number."""
    digits = content_length.lstrip(b"0")
    if digits.isdigit() and (len(digits) > len(str(most)) or int(digits) > most):
        raise BodyTooLargeError(f"{digits[:20].decode()} bytes; at most {most} are taken here")
