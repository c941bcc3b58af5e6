"""Turns bodies into frames. Pictures are decoded on threads, so that the event loop stays free."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from deft_client.wire import ActMessage
from deft_client.wire_limits import WireLimits
from deft_server.errors import OverloadedError
from deft_server.frame_bodies import decode_body, is_quick

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
        if is_quick(content_type, body):
            return decode_body(content_type, body, self._limits)
        if self._num_pending >= MAX_PENDING:
            raise OverloadedError("too many pictures wait to be decoded", BUSY_FOR_S)
        loop = asyncio.get_running_loop()
        self._num_pending += 1
        try:
            return await loop.run_in_executor(
                self._threads, decode_body, content_type, body, self._limits
            )
        finally:
            self._num_pending -= 1

    def warm_up(self) -> None:
        """Load the image library before the first picture needs it."""
        self._threads.submit(import_module, "PIL.PngImagePlugin")
        self._threads.submit(import_module, "PIL.JpegImagePlugin")

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
