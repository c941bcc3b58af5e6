"""The bytes that cross the network, as msgpack. Client and server both use this file.

A message is a map with a version `v`. Arrays travel as `{dtype, shape, data}`; the dtype of every
field is fixed by the protocol (image uint8, state float32, actions float64, little-endian) and is
there to be checked, so a peer cannot ask us to build anything else. See docs/http_api.md.
"""

from collections.abc import Callable

import msgpack

from deft_client.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    UnsupportedMessageError,
    UnusableValueError,
    WireError,
)
from deft_client.types import ActionChunk
from deft_client.wire.fields import DEFAULT_LIMITS, FieldReader, WireLimits
from deft_client.wire.images import JPEG_QUALITY, ImageEncoding
from deft_client.wire.messages import (
    VERSION,
    ActMessage,
    Fields,
    answer_fields,
    read_answer,
    read_request,
    request_fields,
)

__all__ = [
    "CONTENT_TYPE",
    "DEFAULT_LIMITS",
    "VERSION",
    "ActMessage",
    "ImageEncoding",
    "MalformedMessageError",
    "MessageTooLargeError",
    "UnsupportedMessageError",
    "UnusableValueError",
    "WireError",
    "WireLimits",
    "decode_answer",
    "decode_request",
    "encode_answer",
    "encode_request",
    "open_request",
]

CONTENT_TYPE = "application/msgpack"

# What msgpack raises for bytes that are not msgpack; all the rest are subclasses of these.
_UNREADABLE = (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError)


def encode_request(
    message: ActMessage,
    encoding: ImageEncoding = ImageEncoding.RAW,
    quality: int = JPEG_QUALITY,
) -> bytes:
    """Return a request as bytes."""
    return _pack(request_fields(message, encoding, quality))


def decode_request(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ActMessage:
    """Return the request in the bytes, or raise `WireError`. Its arrays are read-only."""
    return read_request(open_request(data, limits))


def open_request(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> FieldReader:
    """Return the fields of a request for `read_request`, nothing in them decoded yet."""
    return FieldReader(_unpack(data, limits), limits)


def encode_answer(chunk: ActionChunk) -> bytes:
    """Return an answer as bytes."""
    return _pack(answer_fields(chunk))


def decode_answer(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ActionChunk:
    """Return the answer in the bytes, or raise `WireError`."""
    return read_answer(FieldReader(_unpack(data, limits), limits))


def _pack(fields: Fields) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


def _unpack(data: bytes, limits: WireLimits) -> object:
    """Return the object in the bytes, having built no more of it than the limits allow."""
    check_bytes(data, limits)
    counted = _counted(limits.max_lists)
    try:
        return msgpack.unpackb(
            data,
            unicode_errors="surrogateescape",  # so that the field can be named, see FieldReader
            max_array_len=limits.max_trace_values,
            max_map_len=limits.max_trace_values,
            max_ext_len=0,
            list_hook=counted,
            object_pairs_hook=_unique(counted),
        )
    except WireError:
        raise
    except _UNREADABLE as error:
        raise MalformedMessageError("body", f"is not msgpack: {error}") from error


def check_bytes(data: bytes, limits: WireLimits, where: str = "body") -> None:
    """Refuse an empty message, and one beyond the limit."""
    if not data:
        raise MalformedMessageError(where, "is empty")
    if len(data) > limits.max_bytes:
        raise MessageTooLargeError(
            where, f"{len(data)} bytes; at most {limits.max_bytes} are taken"
        )


def _counted(most: int) -> Callable[[list[object]], list[object]]:
    """Return a hook that refuses a message with too many lists: each costs 60 bytes for one."""
    count = 0

    def hook(items: list[object]) -> list[object]:
        nonlocal count
        count += 1
        if count > most:
            raise MessageTooLargeError("body", f"more than {most} lists or maps")
        return items

    return hook


def _unique(
    counted: Callable[[list[object]], list[object]],
) -> Callable[[list[tuple[object, object]]], dict[object, object]]:
    """Return a hook that builds a map and refuses a key given twice."""

    def hook(pairs: list[tuple[object, object]]) -> dict[object, object]:
        counted([])
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise MalformedMessageError("body", "the same field is given twice")
        return entries

    return hook
