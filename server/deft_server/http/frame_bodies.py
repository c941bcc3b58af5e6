"""Turns bodies into frames. Pictures are decoded on threads, so that the event loop stays free."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from functools import partial
from importlib import import_module

from deft_client.errors import MalformedMessageError, UnsupportedMessageError
from deft_client.types import ActionChunk
from deft_client.wire import json_codec, msgpack_codec
from deft_client.wire.fields import Terms, WireLimits
from deft_client.wire.messages import REQUEST, ActMessage, has_pictures
from deft_server.errors import OverloadedError
from deft_server.http import forms

_CONTENT_TYPES = (msgpack_codec.CONTENT_TYPE, json_codec.CONTENT_TYPE, forms.CONTENT_TYPE)


def decode_body(content_type: str, body: bytes, limits: WireLimits) -> ActMessage:
    """Return the frame in a body, or raise `WireError`."""
    header = Message()
    header["content-type"] = content_type or "none/none"
    kind = header.get_content_type()
    if kind == msgpack_codec.CONTENT_TYPE:
        return msgpack_codec.decode_request(body, limits)
    if kind == json_codec.CONTENT_TYPE:
        return json_codec.decode_request(body, limits)
    if kind != forms.CONTENT_TYPE:
        raise UnsupportedMessageError(
            "content-type", f"must be one of {', '.join(_CONTENT_TYPES)}; got {content_type[:80]!r}"
        )
    msgpack_codec.check_bytes(body, limits)
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise MalformedMessageError("content-type", "multipart/form-data names no boundary")
    return forms.decode_form(body, boundary, limits)


def wants_msgpack(accept: str, content_type: str) -> bool:
    """Should the answer be msgpack? It is JSON otherwise."""
    if msgpack_codec.CONTENT_TYPE in accept:
        return True
    return content_type == msgpack_codec.CONTENT_TYPE and json_codec.CONTENT_TYPE not in accept


def encode_answer(chunk: ActionChunk, as_msgpack: bool) -> tuple[bytes, str]:
    """Return an answer as bytes, and their content type."""
    if as_msgpack:
        return msgpack_codec.encode_answer(chunk), msgpack_codec.CONTENT_TYPE
    return json_codec.encode_answer(chunk), json_codec.CONTENT_TYPE


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
        if content_type != msgpack_codec.CONTENT_TYPE:
            return await self._on_a_thread(partial(decode_body, content_type, body, self._limits))
        entries = msgpack_codec.unpack(body, self._limits)
        read = partial(REQUEST.read, entries, "", Terms(self._limits))
        return await self._on_a_thread(read) if has_pictures(entries) else read()

    async def _on_a_thread(self, decode: Callable[[], ActMessage]) -> ActMessage:
        if self._num_pending >= MAX_PENDING:
            raise OverloadedError("too many pictures wait to be decoded", BUSY_FOR_S)
        loop = asyncio.get_running_loop()
        self._num_pending += 1
        try:
            return await loop.run_in_executor(self._threads, decode)
        finally:
            self._num_pending -= 1

    def start(self) -> None:
        """Load the image library before the first picture needs it."""
        self._threads.submit(import_module, "PIL.PngImagePlugin")
        self._threads.submit(import_module, "PIL.JpegImagePlugin")

    def stop(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
