"""Turns bodies into frames. Pictures are decoded on threads, so that the event loop stays free."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module

from deft_client import wire
from deft_client.wire_limits import WireLimits
from deft_client.wire_messages import ActMessage, has_pictures, read_request
from deft_server.errors import OverloadedError
from deft_server.frame_bodies import decode_body

NUM_THREADS = 2
MAX_PENDING = 64
BUSY_FOR_S = 0.1


class FrameDecoder:
    """Decodes raw frames at once, compressed ones on threads, and not too many of these."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="decode")
        self._num_pending = 0

    async def decode(self, content_type: str, body: bytes) -> ActMessage:
        """Return the frame in a body; raise `WireError`, or `OverloadedError` if too many wait."""
        if content_type != wire.CONTENT_TYPE:
            return await self._on_a_thread(partial(decode_body, content_type, body, self._limits))
        fields = wire.open_request(body, self._limits)
        if has_pictures(fields):
            return await self._on_a_thread(partial(read_request, fields))
        return read_request(fields)

    async def _on_a_thread(self, decode: Callable[[], ActMessage]) -> ActMessage:
        if self._num_pending >= MAX_PENDING:
            raise OverloadedError("too many pictures wait to be decoded", BUSY_FOR_S)
        loop = asyncio.get_running_loop()
        self._num_pending += 1
        try:
            return await loop.run_in_executor(self._threads, decode)
        finally:
            self._num_pending -= 1

    def warm_up(self) -> None:
        """Load the image library before the first picture needs it."""
        self._threads.submit(import_module, "PIL.PngImagePlugin")
        self._threads.submit(import_module, "PIL.JpegImagePlugin")

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
