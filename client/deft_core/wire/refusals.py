"""What to say of a value that does not fit: which field, what arrived, what was expected.

msgspec says what does not fit, and where: "Expected `int` >= 0 - at `$.radius`". With the type and
the value at that place it becomes "radius: must be an integer from 0 to 65535, got int -1".
"""

import re
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, inspect

from deft_core.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    UnsupportedMessageError,
    UnusableValueError,
    WireError,
)

Decode = Callable[..., Any]  # msgspec.json.decode, msgspec.msgpack.decode or msgspec.convert
_SENTENCE = re.compile(r"(.*?)(?: - at `(key` in `)?\$(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")  # a field, an item of a list, a value of a map
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_TOO_LONG = re.compile(r"Expected `\w+` of length <= (\d+)")
_FOUND = re.compile(r"Expected `.*`, got `(.*)`")
_FOUND_WORDS = {"object": "a map", "array": "a list", "null": "nothing", "None": "nothing"}
_OF_LATER_VERSIONS = ("v", "encoding")  # fields whose other values may mean something to others
_RECORDS = (inspect.StructType, inspect.DataclassType)
_MAPS = (*_RECORDS, inspect.DictType)
_LISTS = (inspect.ListType, inspect.VarTupleType)
# What is read again to show a value; one in a larger map or list is not shown.
_MAP = Annotated[dict[str, Raw], Meta(max_length=1024)]
_LIST = Annotated[list[Raw], Meta(max_length=1024)]
_MAX_BYTES = 4 * 1024 * 1024  # of a message that is read again: 20 ms where it is all small parts
_UNKNOWN = object()
_type_info = lru_cache(inspect.type_info)  # it takes half a millisecond


def refusal(
    error: msgspec.ValidationError, kind: Any, value: object, decode: Decode, name: str, field: str
) -> WireError:
    """Return the complaint about a value that does not fit a type.

    A value that is not decoded yet is a `msgspec.Raw`. Errors call it `field`, or `name` where it
    is a whole message.
    """
    match = _SENTENCE.fullmatch(str(error))
    assert match is not None
    sentence, is_name, path = match[1], match[2], match[3] or ""
    if isinstance(value, Raw) and memoryview(value).nbytes > _MAX_BYTES:
        value = _UNKNOWN
    step, types = "", _alternatives([_type_info(kind)])
    for entry, index in _STEP.findall(path):
        step = _culprit(types, value, decode) if index == "..." else entry or index
        value = _part(value, step, decode)
        types = _alternatives(_part_types(types, step))
        field += f"[{step}]" if index.isdigit() else f".{printable(step[:64])}" if step else ""
    field = field.removeprefix(".")
    if found := _FIELD.fullmatch(sentence):
        place = f"{field}.{printable(found[2][:64])}".removeprefix(".")
        if found[1] == "missing required":
            return MalformedMessageError(place, "missing")
        fields = [one for kind in types for one in getattr(kind, "fields", ())]
        return unknown_field(place, [one.encode_name for one in fields])
    field = field or name
    if is_name:
        return MalformedMessageError(field, "has a name that is not text")
    if found := _TOO_LONG.match(sentence):
        return MessageTooLargeError(field, f"has more than the {found[1]} entries that are allowed")
    if "base64" in sentence:
        return UnusableValueError(field, "is not base64")
    if not sentence.startswith(("Expected", "Invalid", "Integer", "Number")):
        return UnusableValueError(field, sentence)  # by a type's own check
    if kind is object:  # anything is allowed, but not a number of thousands of digits
        return UnusableValueError(field, sentence[:1].lower() + sentence[1:])
    text = f"must be {' or '.join(map(_expected, types))}{_arrived(sentence, value, decode)}"
    if step in _OF_LATER_VERSIONS:
        return UnsupportedMessageError(field, text)
    if any(isinstance(one, _MAPS) for one in types):
        return MalformedMessageError(field, text)
    return UnusableValueError(field, text)


def unknown_field(field: str, known: Collection[str]) -> MalformedMessageError:
    """Return the complaint about a field that a record does not have."""
    close = get_close_matches(field.rpartition(".")[2], known, n=1)
    hint = f"did you mean {close[0]}?" if close else "remove it"
    return MalformedMessageError(field, f"unknown field; {hint}")


def check_text(text: str, field: str, max_chars: int) -> str:
    """Return a text that is no longer than `max_chars` and valid Unicode, or raise `WireError`."""
    if len(text) > max_chars:
        raise MessageTooLargeError(
            field, f"{len(text)} characters; at most {max_chars} are allowed"
        )
    if not text.isascii() and printable(text) != text:
        raise UnusableValueError(field, "is not valid UTF-8")
    return text


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


def printable(text: str) -> str:
    """Return a text that can be encoded; it equals the original where that could be."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _alternatives(types: Iterable[inspect.Type]) -> list[inspect.Type]:
    """Return the members of unions each on its own, without null."""
    members = [one for kind in types for one in getattr(kind, "types", (kind,))]
    return [one for one in members if not isinstance(one, inspect.NoneType)]


def _part_types(types: Iterable[inspect.Type], step: str) -> list[inspect.Type]:
    """Return the types of a field, of the items of a list, or of the values of a map."""
    found: list[inspect.Type] = []
    for kind in types:
        if isinstance(kind, inspect.StructType | inspect.DataclassType):
            found += [one.type for one in kind.fields if one.encode_name == step]
        elif isinstance(kind, inspect.DictType):
            found.append(kind.value_type)
        elif isinstance(kind, inspect.ListType | inspect.VarTupleType) and step.isdigit():
            found.append(kind.item_type)
    return found


def _part(value: object, step: str, decode: Decode) -> Any:
    """Return a field, an item of a list, or a value of a map."""
    is_item = step.isdigit()
    inside: Any = _opened(value, _LIST if is_item else _MAP, decode)
    try:
        return inside[int(step)] if is_item else inside[step]
    except (LookupError, TypeError):
        return _UNKNOWN


def _opened(value: object, kind: Any, decode: Decode) -> Any:
    """Return one level of a value."""
    if not isinstance(value, Raw):
        return value
    try:
        return decode(value, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _UNKNOWN


def _culprit(types: Iterable[inspect.Type], value: object, decode: Decode) -> str:
    """Return the name of the record in a map that does not fit: msgspec does not say which."""
    inner = [one.value_type for one in types if isinstance(one, inspect.DictType)]
    entries = _opened(value, _MAP, decode)
    for record in (one for one in inner if isinstance(one, inspect.StructType)):
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            try:
                decode(entry, type=record.cls)
            except msgspec.ValidationError:
                return str(name)
    return ""


def _expected(kind: inspect.Type) -> str:
    """Name a type in words."""
    match kind:
        case inspect.IntType(ge=int(low), le=int(high)):
            return f"an integer from {low} to {high}"
        case inspect.IntType(ge=int(low)):
            return f"an integer of at least {low}"
        case inspect.IntType():
            return "an integer"
        case inspect.FloatType(gt=low, le=high) if low is not None:
            return f"a number above {low:.15g} and at most {high:.15g}"
        case inspect.FloatType(ge=low) if low is not None:
            return "a finite number"
        case inspect.FloatType():
            return "a number"
        case inspect.StrType():
            return "text"
        case inspect.BoolType():
            return "true or false"
        case inspect.BytesType():
            return "bytes (in JSON base64 text)"
        case inspect.LiteralType(values=words):
            return ("one of " if len(words) > 1 else "") + ", ".join(map(str, words))
        case inspect.EnumType(cls=words):
            return f"one of {', '.join(str(one.value) for one in words)}"
        case inspect.ListType(min_length=int(least)):
            return f"a list of at least {least}"
    return "a list" if isinstance(kind, _LISTS) else "a map"


def _arrived(sentence: str, value: object, decode: Decode) -> str:
    """Say what arrived, where that can be had for little."""
    found = _FOUND.fullmatch(sentence)
    if found and found[1] in _FOUND_WORDS:
        return f", got {_FOUND_WORDS[found[1]]}"
    value = _opened(value, object, decode)
    return "" if value is _UNKNOWN else f", got {brief(value)}"
