"""The bytes that cross the network, as msgpack. Client and server both use this file.

A message is a map with a version `v`. Arrays travel as `{dtype, shape, data}`; the dtype of every
field is fixed by the protocol (image uint8, state float32, actions float64, little-endian) and is
there to be checked, so a peer cannot ask us to build anything else. See docs/http_api.md.
"""

from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

import msgpack

from deft_core.errors import MalformedMessageError, MessageTooLargeError, Problem, WireError
from deft_core.types import ActionChunk
from deft_core.wire.fields import (
    DEFAULT_LIMITS,
    MAX_MAP_ENTRIES,
    ReadContext,
    WireLimits,
    unique_map,
)
from deft_core.wire.images import JPEG_QUALITY, ImageEncoding
from deft_core.wire.messages import (
    ANSWER,
    ANSWERS,
    REQUEST,
    VERSION,
    ActMessage,
    answer_fields,
    answers_fields,
    request_fields,
)

SizedT = TypeVar("SizedT", bound=Sized)
CONTENT_TYPE = "application/msgpack"

# What msgpack raises for bytes that are not msgpack; all the rest are subclasses of these.
UNREADABLE = (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError)


def encode_request(
    message: ActMessage,
    encoding: ImageEncoding = ImageEncoding.RAW,
    quality: int = JPEG_QUALITY,
) -> bytes:
    """Return a request as bytes."""
    return bytes(msgpack.packb(request_fields(message, encoding, quality)))


def encode_requests(
    messages: Sequence[ActMessage],
    message_id: str | None = None,
    encoding: ImageEncoding = ImageEncoding.RAW,
    quality: int = JPEG_QUALITY,
) -> bytes:
    """Return a request with several observations as bytes."""
    each = [request_fields(message, encoding, quality) for message in messages]
    id_field = {} if message_id is None else {"id": message_id}
    return bytes(msgpack.packb({"v": VERSION, **id_field, "observations": each}))


def decode_request(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ActMessage:
    """Return the request in the bytes, or raise `WireError`. Its arrays are read-only."""
    return REQUEST.read(unpack(data, limits), "", ReadContext(limits))


def encode_answer(chunk: ActionChunk, message_id: str | None = None) -> bytes:
    """Return an answer as bytes."""
    return bytes(msgpack.packb(answer_fields(chunk, message_id)))


def encode_answers(
    answers: Sequence[ActionChunk | Problem], ids: Sequence[str | None], message_id: str | None
) -> bytes:
    """Return the answers to several observations, whose own ids those are, as bytes."""
    return bytes(msgpack.packb(answers_fields(answers, ids, message_id)))


def decode_answers(
    data: bytes, limits: WireLimits = DEFAULT_LIMITS
) -> tuple[ActionChunk | Problem, ...]:
    """Return the answers to several observations in the bytes, or raise `WireError`."""
    return ANSWERS.read(unpack(data, limits), "", ReadContext(limits))


def decode_answer(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> ActionChunk:
    """Return the answer in the bytes, or raise `WireError`."""
    return ANSWER.read(unpack(data, limits), "", ReadContext(limits))


def message_id(data: bytes) -> object:
    """Return the `id` of a request or an answer, reading little else; None where there is none."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        for _ in range(unpacker.read_map_header()):
            if unpacker.unpack() == "id":
                return unpacker.unpack()
            unpacker.skip()
    except UNREADABLE:  # the rest of the message has the same fault, and is judged for it
        pass
    return None


def without_id(request: bytes) -> bytes:
    """Return a request of ours for a server that knows no ids."""
    entries = msgpack.unpackb(request)
    del entries["id"]
    return bytes(msgpack.packb(entries))


def unpack(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> object:
    """Return the object in the bytes, having built no more of it than the limits allow."""
    check_bytes(data, limits)
    count = counter(limits)

    try:
        return msgpack.unpackb(
            data,
            unicode_errors="surrogateescape",  # so that the field can be named, see fields.text
            max_array_len=limits.max_trace_values,
            max_map_len=MAX_MAP_ENTRIES,
            max_ext_len=0,
            list_hook=count,
            object_pairs_hook=lambda pairs: unique_map(count(pairs)),
        )
    except WireError:
        raise
    except UNREADABLE as error:
        raise MalformedMessageError("body", f"is not msgpack: {error}") from error


def check_bytes(data: bytes, limits: WireLimits, where: str = "body") -> None:
    """Refuse an empty message, and one beyond the limit."""
    if not data:
        raise MalformedMessageError(where, "is empty")
    if len(data) > limits.max_bytes:
        raise MessageTooLargeError(
            where, f"{len(data)} bytes; at most {limits.max_bytes} are taken"
        )


def counter(limits: WireLimits, where: str = "body") -> Callable[[SizedT], SizedT]:
    """Return a hook that refuses a message with too many lists: each costs 60 bytes for one.

    Their entries are counted, too: a byte each on the wire, they take a second of reading.
    """
    num_lists = num_entries = 0

    def hook(items: SizedT) -> SizedT:
        nonlocal num_lists, num_entries
        num_lists += 1
        num_entries += len(items)
        if num_lists > limits.max_lists or num_entries > limits.max_entries:
            raise MessageTooLargeError(
                where,
                f"more than {limits.max_lists} lists and maps, or {limits.max_entries} entries",
            )
        return items

    return hook
