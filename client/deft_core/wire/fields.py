"""Kinds of values: what a field of a message may hold, for reading it and for OpenAPI.

Untrusted values are read limits first, and every complaint names its field. Knows nothing of
observations or actions; `messages` says which fields there are.
"""

import math
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from itertools import filterfalse
from typing import Any, Generic, TypeVar

from deft_core.errors import MalformedMessageError, MessageTooLargeError, UnusableValueError

try:
    from pybase64 import b64decode  # thirty times quicker; servers have it
except ImportError:
    from base64 import b64decode  # type: ignore[assignment]

MAX_DECODABLE_PIXELS = 64 * 1024 * 1024  # below where the image library itself starts to warn


@dataclass(frozen=True)
class WireLimits:
    """Upper bounds for one message, both directions."""

    max_bytes: int = 16 * 1024 * 1024
    max_image_side: int = 4096  # pixels
    max_image_pixels: int = 4 * 1024 * 1024
    max_cameras: int = 8  # besides the main image
    max_observations: int = 32  # in one message
    max_instruction_chars: int = 4096
    max_name_chars: int = 128  # session ids, keys, camera names
    max_state_dim: int = 1024
    max_action_values: int = 65_536  # steps x action_dim
    max_trace_values: int = 65_536  # numbers in any one list of a decode trace
    max_lists: int = 16_384  # maps and lists in one message
    max_entries: int = 131_072  # of all of them together

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ValueError(f"every limit must be at least 1, got {self}")
        if self.max_image_pixels > MAX_DECODABLE_PIXELS:
            raise ValueError(
                f"max_image_pixels may be {MAX_DECODABLE_PIXELS} at most, "
                f"got {self.max_image_pixels}"
            )


DEFAULT_LIMITS = WireLimits()
MAX_MAP_ENTRIES = 1024  # of one binary map; those of a message have a few dozen
Limit = Callable[[WireLimits], int]
Json = dict[str, Any]
T = TypeVar("T")
EnumT = TypeVar("EnumT", bound=Enum)


def _hold_nothing(num_bytes: int) -> None:
    """Nobody bounds what all messages hold together."""


@dataclass
class ReadContext:
    """How one message is read: in JSON, bytes are base64 and arrays may be lists of numbers.

    `hold` is told how many bytes a picture will take before it is decoded, and may raise.
    """

    limits: WireLimits = DEFAULT_LIMITS
    is_json: bool = False
    hold: Callable[[int], None] = _hold_nothing
    num_claimed: int = 0  # pixels of the pictures so far that take more memory than their message


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a field may hold.

    `read` takes a value, the name of its field and the context, and raises `WireError` for what
    cannot be used. `schema` is the JSON schema of what `read` takes.
    """

    read: Callable[[object, str, ReadContext], T]
    schema: Callable[[WireLimits], Json]


def text(max_chars: Limit) -> Kind[str]:
    """Return the kind of a string of valid Unicode."""

    def read(value: object, where: str, context: ReadContext) -> str:
        if not isinstance(value, str):
            raise unusable(where, "text", value)
        most = max_chars(context.limits)
        if len(value) > most:
            raise MessageTooLargeError(where, f"{len(value)} characters; at most {most} are taken")
        if not value.isascii() and printable(value) != value:
            raise UnusableValueError(where, "is not valid UTF-8")
        return value

    return Kind(read, lambda limits: {"type": "string", "maxLength": max_chars(limits)})


def whole(low: int = -(2**63), high: int = 2**63 - 1) -> Kind[int]:
    """Return the kind of an integer between two bounds, both included."""

    def read(value: object, where: str, context: ReadContext) -> int:
        if type(value) is not int or not low <= value <= high:
            raise unusable(where, f"an integer from {low} to {high}", value)
        return value

    return Kind(read, lambda limits: {"type": "integer", "minimum": low, "maximum": high})


def number(most: float = math.inf) -> Kind[float]:
    """Return the kind of a finite number; with `most`, of one above 0 and at most that."""
    bounds = {} if most == math.inf else {"exclusiveMinimum": 0, "maximum": most}

    def read(value: object, where: str, context: ReadContext) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise unusable(where, "a number", value)
        if not abs(value) < math.inf or abs(value) > _MAX_FLOAT:
            raise UnusableValueError(where, "must be finite, got NaN, infinity or beyond")
        if bounds and not 0 < value <= most:
            raise UnusableValueError(where, f"must be above 0 and at most {most}, got {value}")
        return float(value)

    return Kind(read, lambda limits: {"type": "number", **bounds})


def word(words: type[EnumT]) -> Kind[EnumT]:
    """Return the kind of a word that an enumeration lists; reading it gives the member."""
    members = {one.value: one for one in words}

    def read(value: object, where: str, context: ReadContext) -> EnumT:
        if not isinstance(value, str) or value not in members:
            raise unusable(where, f"one of {', '.join(members)}", value)
        return members[value]

    return Kind(read, lambda limits: {"enum": list(members)})


def constant(only: str) -> Kind[str]:
    """Return the kind of a word that is always the same."""

    def read(value: object, where: str, context: ReadContext) -> str:
        if value != only:
            raise unusable(where, only, value)
        return only

    return Kind(read, lambda limits: {"const": only})


def list_of(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """Return the kind of a list, no longer than the longest list of a trace."""

    def read(value: object, where: str, context: ReadContext) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise unusable(where, "a list", value)
        most = context.limits.max_trace_values
        if len(value) > most:
            raise MessageTooLargeError(where, f"{len(value)} items; at most {most} are taken")
        return tuple(kind.read(one, f"{where}[{at}]", context) for at, one in enumerate(value))

    return Kind(read, lambda limits: {"type": "array", "items": kind.schema(limits)})


def map_of(kind: Kind[T]) -> Kind[dict[str, T]]:
    """Return the kind of a map from texts; entries whose name is none are passed over."""

    def read(value: object, where: str, context: ReadContext) -> dict[str, T]:
        entries = as_map(value, where)
        names = [name for name in entries if isinstance(name, str)]
        return {name: kind.read(entries[name], f"{where}.{name}", context) for name in names}

    return Kind(
        read, lambda limits: {"type": "object", "additionalProperties": kind.schema(limits)}
    )


def record(
    build: Callable[[Json], T],
    kinds: Mapping[str, Kind[Any]],
    optional: Collection[str] = (),
    is_open: bool = False,
) -> Kind[T]:
    """Return the kind of a map with known fields; `build` makes the result of the values read.

    Fields are read in the order given; one that is optional and not there, or null, is left to
    `build`. Unknown fields are refused unless the record is open: they are typing errors, or of a
    later version. At the top of a message the name of the record is empty.
    """
    needed = [name for name in kinds if name not in optional]

    def read(value: object, where: str, context: ReadContext) -> T:
        entries = as_map(value, where or "body")
        prefix = f"{where}." if where else ""
        values = {}
        for name in filter((entries.keys() | needed).__contains__, kinds):
            if name not in entries:
                raise MalformedMessageError(prefix + name, "missing")
            entry = entries[name]
            if entry is not None or name in needed:
                values[name] = kinds[name].read(entry, prefix + name, context)
        for name in () if is_open else filterfalse(kinds.__contains__, entries):
            label = printable((name if isinstance(name, str) else repr(name))[:64])
            close = get_close_matches(label, kinds, n=1)
            hint = f"did you mean {close[0]}?" if close else "remove it"
            raise MalformedMessageError(prefix + label, f"unknown field; {hint}")
        return build(values)

    def schema(limits: WireLimits) -> Json:
        told = {name: kind.schema(limits) for name, kind in kinds.items()}
        null = {name: {"anyOf": [told[name], {"type": "null"}]} for name in optional}
        return {
            "type": "object",
            "properties": {**told, **null},
            "required": [*needed],
            "additionalProperties": is_open,
        }

    return Kind(read, schema)


def record_of(
    cls: type[T], kinds: Mapping[str, Kind[Any]] | None = None, is_open: bool = False
) -> Kind[T]:
    """Return the kind of a dataclass; `kinds` are those of its fields that their types do not tell.

    A field may be left out if it has a default or may be None.
    """
    hints = typing.get_type_hints(cls)
    required = {one.name for one in fields(cls) if _has_no_default(one)}  # type: ignore[arg-type]
    nullable = {name for name, hint in hints.items() if type(None) in typing.get_args(hint)}
    told = {name: (kinds or {}).get(name) or _kind_of(hint) for name, hint in hints.items()}
    absent = dict.fromkeys(required & nullable)
    return record(
        lambda values: cls(**{**absent, **values}),
        told,
        told.keys() - (required - nullable),
        is_open,
    )


def _has_no_default(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _kind_of(hint: Any) -> Kind[Any]:
    inner = typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if is_dataclass(hint):
        return record_of(hint)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return word(hint)
    if typing.get_origin(hint) in (tuple, Sequence):
        return list_of(_kind_of(inner[0]))
    if typing.get_origin(hint) is Mapping:
        return map_of(SENTENCE)
    return _kind_of(inner[0])  # X | None


def brief(value: object) -> str:
    """Name what arrived, briefly: for error messages."""
    if value is None:
        return "nothing"
    if isinstance(value, bool | int | float):
        return f"{type(value).__name__} {str(value)[:24]}"
    if isinstance(value, str):
        shown = f"text {value[:24]!r}" if len(value) <= 24 else f"text of {len(value)} characters"
        return printable(shown)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "a map" if isinstance(value, dict) else type(value).__name__


def unusable(where: str, expected: str, value: object) -> UnusableValueError:
    """Return the complaint about a value of the wrong type or range."""
    return UnusableValueError(where, f"must be {expected}, got {brief(value)}")


def printable(text: str) -> str:
    """Return a text that can be encoded; it equals the original where that could be."""
    return text.encode("utf-8", "replace").decode("utf-8")


def as_map(value: object, where: str) -> dict[Any, object]:
    """Return a map as it is, or refuse what is none."""
    if not isinstance(value, dict):
        raise MalformedMessageError(where, f"must be a map, got {brief(value)}")
    return value


def unique_map(pairs: list[tuple[Any, object]]) -> dict[Any, object]:
    """Return a map of the pairs; a name given twice is refused."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise MalformedMessageError("body", "the same field is given twice")
    return entries


def decode_base64(text: str) -> bytes:
    """Return what strict base64 says, or raise `ValueError`."""
    return b64decode(text, validate=True)


def _read_flag(value: object, where: str, context: ReadContext) -> bool:
    if not isinstance(value, bool):
        raise unusable(where, "true or false", value)
    return value


def _read_binary(value: object, where: str, context: ReadContext) -> bytes:
    if isinstance(value, bytes):
        return value
    if not context.is_json or not isinstance(value, str):
        raise unusable(where, "base64 text" if context.is_json else "bytes", value)
    try:
        return decode_base64(value)
    except ValueError as error:
        raise UnusableValueError(where, f"is not base64: {error}") from error


_MAX_FLOAT = sys.float_info.max
NAME = text(lambda limits: limits.max_name_chars)
SENTENCE = text(lambda limits: limits.max_instruction_chars)
FLAG = Kind(_read_flag, lambda limits: {"type": "boolean"})
BINARY = Kind(_read_binary, lambda limits: {"type": "string", "contentEncoding": "base64"})
_SCALARS: Mapping[Any, Kind[Any]] = {str: NAME, bool: FLAG, int: whole(), float: number()}
