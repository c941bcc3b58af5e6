"""Turns bodies into frames. Pictures are decoded on threads, so that the event loop stays free.

A request may also come as a form (multipart/form-data), so that curl can send a picture file:
files are `image`, and `camera.NAME` for each further camera, PNG or JPEG; texts are `instruction`,
the options by their names, and `state` as a JSON list.
"""

from email.message import Message
from functools import partial
from io import BytesIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from deft_core.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    UnsupportedMessageError,
    UnusableValueError,
)
from deft_core.wire.codec import needs_decoding, parse_request, read_request, read_requests
from deft_core.wire.formats import WireFormat, check_bytes, convert, decode
from deft_core.wire.limits import ReadContext, WireLimits
from deft_core.wire.messages import ActMessage, ActMessages, ActRequest, ActRequests
from deft_server.serving.bounds import DecodeThreads

MAX_CONTENT_TYPE_CHARS = 256  # with the longest boundary there may be
FORM = "multipart/form-data"
MSGPACK, JSON = WireFormat.MSGPACK.value, WireFormat.JSON.value
_CONTENT_TYPES = (MSGPACK, JSON, FORM)


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of a request, or raise `ClientDisconnect`.

    It grows in one place: a list of its parts would leave as many holes in the memory.
    """
    grown = BytesIO()  # which gives its bytes away without a copy
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        grown.write(message.get("body", b""))
        if not message.get("more_body", False):
            return grown.getvalue()


def decode_body(content_type: str, body: bytes, context: ReadContext) -> ActMessage | ActMessages:
    """Return the frame in a body, or the frames, or raise `WireError`."""
    limits = context.limits
    if len(content_type) > MAX_CONTENT_TYPE_CHARS:  # the standard library takes ages for long ones
        raise UnsupportedMessageError(
            "content-type",
            f"must be one of {', '.join(_CONTENT_TYPES)}; got {len(content_type)} characters",
        )
    header = Message()
    header["content-type"] = content_type or "none/none"
    kind = header.get_content_type()
    if kind in (MSGPACK, JSON):
        wire_format = WireFormat(kind)
        return _read(parse_request(body, wire_format, limits), wire_format, context)
    if kind != FORM:
        raise UnsupportedMessageError(
            "content-type", f"must be one of {', '.join(_CONTENT_TYPES)}; got {content_type[:80]!r}"
        )
    check_bytes(body, limits.max_bytes)
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise MalformedMessageError("content-type", "multipart/form-data names no boundary")
    return decode_form(body, boundary, context)


def _read(
    request: ActRequest | ActRequests, wire_format: WireFormat, context: ReadContext
) -> ActMessage | ActMessages:
    if isinstance(request, ActRequests):
        return read_requests(request, wire_format, context)
    return read_request(request, context)


def wants_msgpack(accept: str, content_type: str) -> bool:
    """Should the answer be msgpack? It is JSON otherwise."""
    accept = accept.lower()
    if MSGPACK in accept:
        return True
    sent = content_type.partition(";")[0].strip().lower()
    return sent == MSGPACK and JSON not in accept


async def decode_frame(
    threads: DecodeThreads, context: ReadContext, content_type: str, body: bytes
) -> ActMessage | ActMessages:
    """Return the frame in a body, or the frames: raw ones at once, all else is read on threads.

    Raises `WireError`, or `OverloadedError` if too many wait for a thread.
    """
    if content_type != MSGPACK:
        return await threads.run(partial(decode_body, content_type, body, context))
    request = parse_request(body, WireFormat.MSGPACK, context.limits)
    del body  # what is in it was copied, and may have to wait for long
    read = partial(_read, request, WireFormat.MSGPACK, context)
    return await threads.run(read) if needs_decoding(request) else read()


CAMERA_PREFIX = "camera."
MAX_PARTS = 64
_NUMBERS = {"deadline_ms": float, "radius": int, "max_tokens": int, "executed_steps": int, "v": int}
_FLAGS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False, "": None}


def decode_form(body: bytes, boundary: str, context: ReadContext) -> ActMessage:
    """Return the request in a form, or raise `WireError`."""
    entries: dict[str, object] = {}
    cameras: dict[str, object] = {}
    for name, value in read_parts(body, boundary).items():
        if name.startswith(CAMERA_PREFIX):
            cameras[name.removeprefix(CAMERA_PREFIX)] = _picture(name, value)
        elif isinstance(value, bytes) or name == "image":
            entries[name] = _picture(name, value)
        else:
            entries[name] = _option(name, value, context.limits)
    return read_request(convert({**entries, "cameras": cameras or None}, ActRequest), context)


def read_parts(body: bytes, boundary: str) -> dict[str, str | bytes]:
    """Return the parts of a form, those with a file name as bytes; the library bounds headers."""
    parts: list[Field | File] = []
    ends: list[bool] = []

    def keep(part: Field | File) -> None:
        if len(parts) >= MAX_PARTS:
            raise MessageTooLargeError("body", f"more than {MAX_PARTS} parts")
        parts.append(part)

    # The body is in memory already, and bounded, so that nothing needs to go to disk.
    config = {"MAX_MEMORY_FILE_SIZE": len(body)}
    try:
        parser = FormParser(FORM, keep, keep, lambda: ends.append(True), boundary, config=config)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise MalformedMessageError("body", f"is not a multipart form: {error}") from error
    if not ends:
        raise MalformedMessageError("body", "the multipart form is cut off")
    values: dict[str, str | bytes] = {}
    for part in parts:
        name = (part.field_name or b"").decode("utf-8", "replace")
        if name in values:
            raise MalformedMessageError(name, "given twice")
        values[name] = _value(part)
    return values


def _value(part: Field | File) -> str | bytes:
    if isinstance(part, Field):
        return (part.value or b"").decode("utf-8", "surrogateescape")
    part.file_object.seek(0)
    return part.file_object.read()


def _picture(name: str, data: str | bytes) -> object:
    """Return a file as the map of an image; whatever it is called, its first bytes decide."""
    if isinstance(data, str):
        raise UnusableValueError(name, "must be a file; with curl: -F image=@frame.png")
    return {"encoding": "png" if data[:1] == b"\x89" else "jpeg", "data": data}


def _option(name: str, text: str, limits: WireLimits) -> object:
    """Return what a text field stands for; `ActRequest` judges whether it may."""
    if name == "state":
        data = text.encode("utf-8", "surrogateescape")
        return decode(data, object, WireFormat.JSON, limits, name)
    if name in ("trace", "reasoning", "log_probs", "notes"):
        if text.lower() not in _FLAGS:
            raise UnusableValueError(name, f"must be true or false, got {text[:24]!r}")
        return _FLAGS[text.lower()]
    if name in _NUMBERS and text:
        try:
            return _NUMBERS[name](text)
        except ValueError:
            raise UnusableValueError(name, f"must be a number, got {text[:24]!r}") from None
    return text or None
