"""Values as bytes, in JSON and in msgpack: the same types for both. Knows no message.

A type is a msgspec struct or a dataclass. What arrives is checked against it while it is read, so
that nothing is built that no field asks for. Bytes are base64 in JSON.
"""

from collections.abc import Mapping
from enum import Enum
from types import ModuleType
from typing import AnyStr, TypeVar

import msgspec
import numpy as np
from msgspec import Raw

from deft_core.errors import MalformedMessageError, MessageTooLargeError
from deft_core.wire.limits import DEFAULT_LIMITS, WireLimits
from deft_core.wire.refusals import refusal

try:
    from pybase64 import b64decode  # thirty times quicker; servers have it
except ImportError:
    from base64 import b64decode  # type: ignore[assignment]

T = TypeVar("T")
_FEW = 100
_SHORT_BYTES = 262_144  # nothing in so short a body takes long to read; most frames are shorter


class WireFormat(Enum):
    """How a message travels; the value is its content type."""

    MSGPACK = "application/msgpack"
    JSON = "application/json"


_LIBRARY: Mapping[WireFormat, ModuleType] = {
    WireFormat.MSGPACK: msgspec.msgpack,
    WireFormat.JSON: msgspec.json,
}


def encode(value: object, wire_format: WireFormat) -> bytes:
    """Return a value as bytes."""
    data: bytes = _LIBRARY[wire_format].encode(value, enc_hook=_plain)
    return data


def decode(
    data: bytes | Raw,
    kind: type[T],
    wire_format: WireFormat,
    limits: WireLimits = DEFAULT_LIMITS,
    name: str = "body",
) -> T:
    """Return the value in the bytes, or raise `WireError`; `name` is what the whole is called."""
    library = _LIBRARY[wire_format]
    check_bytes(data, limits.max_bytes, name)
    if wire_format is WireFormat.JSON and isinstance(data, bytes):  # parts were counted with it
        check_json(data, limits, name)
    try:
        value: T = library.decode(data, type=kind)
        return value
    except msgspec.ValidationError as error:
        raise refusal(error, kind, Raw(data), library.decode, name, "") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        spelt = "JSON" if wire_format is WireFormat.JSON else "msgpack"
        raise MalformedMessageError(name, f"is not {spelt}: {error}") from None


def decode_base64(text: str) -> bytes:
    """Return what strict base64 says, or raise `ValueError`."""
    return b64decode(text, validate=True)


def convert(value: object, kind: type[T], field: str = "", name: str = "body") -> T:
    """Return maps, lists and scalars as a type, or raise `WireError`.

    Errors call it `field`, or `name` where it is a whole message.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise refusal(error, kind, value, msgspec.convert, name, field) from None


def _plain(value: object) -> object:
    """Return what msgspec refuses as what it knows: numbers of numpy, kinds of maps and text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):  # such as torch's version
        return str.__str__(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no place in a message")


def check_bytes(data: bytes | Raw, max_bytes: int, name: str = "body") -> None:
    """Refuse an empty message, and one beyond the limit."""
    num_bytes = memoryview(data).nbytes
    if not num_bytes:
        raise MalformedMessageError(name, "is empty")
    if num_bytes > max_bytes:
        raise MessageTooLargeError(name, f"{num_bytes} bytes; at most {max_bytes} are allowed")


def check_json(data: bytes | str, limits: WireLimits, name: str = "body") -> None:
    """Refuse JSON that would take long to read, by the signs in it; texts hold few of these."""
    if len(data) <= _SHORT_BYTES:
        return
    for signs, most, what in (
        ("[{", limits.max_lists, "lists or maps"),
        (",", limits.max_entries, "entries"),
        (":.", limits.max_entries, "names or fractions"),
    ):
        if isinstance(data, str):
            count = sum(count_of(data, sign) for sign in signs)
        else:
            count = sum(count_of(data, sign.encode()) for sign in signs)
        if count > most:
            raise MessageTooLargeError(
                name, f"{count} {what}; at most {most} are allowed: send images in base64"
            )


def count_of(data: AnyStr, sign: AnyStr) -> int:
    """Return what `data.count(sign)` does, much sooner where there are few of them in much data:
    `find` leaps from one to the next, `count` looks at every character."""
    at, found = data.find(sign), 0
    while at >= 0 and found < _FEW:
        at, found = data.find(sign, at + 1), found + 1
    return found if at < 0 else found + data.count(sign, at)
