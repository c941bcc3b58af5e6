"""Takes typed fields out of an untrusted map, and names the field in every complaint.

Knows nothing of observations or actions; `wire_messages` says which fields there are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_client.errors import MalformedMessageError, MessageTooLargeError, UnusableValueError

MAX_DECODABLE_PIXELS = 64 * 1024 * 1024  # below where the image library itself starts to warn


@dataclass(frozen=True)
class WireLimits:
    """Upper bounds for one message, both directions."""

    max_bytes: int = 16 * 1024 * 1024
    max_image_side: int = 4096  # pixels
    max_image_pixels: int = 4 * 1024 * 1024
    max_cameras: int = 8  # besides the main image
    max_instruction_chars: int = 4096
    max_name_chars: int = 128  # session ids, keys, camera names
    max_state_dim: int = 1024
    max_action_values: int = 65_536  # steps x action_dim
    max_trace_values: int = 65_536  # numbers in any one list of a decode trace
    max_lists: int = 16_384  # maps and lists in one binary message
    max_json_lists: int = 400_000  # the same for JSON, where an image may be nested lists

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ValueError(f"every limit must be at least 1, got {self}")
        if self.max_image_pixels > MAX_DECODABLE_PIXELS:
            raise ValueError(
                f"max_image_pixels may be {MAX_DECODABLE_PIXELS} at most, "
                f"got {self.max_image_pixels}"
            )


DEFAULT_LIMITS = WireLimits()


_LAYOUTS: dict[str, np.dtype[np.generic]] = {
    "uint8": np.dtype("|u1"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
_TOO_LARGE = 2**63


def describe(value: object) -> str:
    """Name what arrived, briefly: for error messages."""
    if value is None:
        return "nothing"
    if isinstance(value, bool | int | float):
        return f"{type(value).__name__} {str(value)[:24]}"
    if isinstance(value, str):
        return f"text {value[:24]!r}" if len(value) <= 24 else f"text of {len(value)} characters"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "a map" if isinstance(value, dict) else type(value).__name__


class FieldReader:
    """One map of a message. Every field is taken once; `finish` refuses those nobody took."""

    def __init__(self, source: object, limits: WireLimits, path: str = "") -> None:
        if not isinstance(source, dict):
            raise MalformedMessageError(path or "body", f"must be a map, got {describe(source)}")
        self._left = dict(source)
        self._path = path
        self.limits = limits

    def where(self, name: str) -> str:
        """Return the full name of a field."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Is the field there, and not null?"""
        if self._left.get(name) is None:
            self._left.pop(name, None)
            return False
        return True

    def has_any(self, names: frozenset[str]) -> bool:
        """Is one of these fields there, be it null?"""
        return not names.isdisjoint(self._left)

    def peek(self, name: str) -> object:
        """Return a field without taking it; None where there is none."""
        return self._left.get(name)

    def take(self, name: str) -> object:
        """Take a field of any type."""
        try:
            return self._left.pop(name)
        except KeyError:
            raise MalformedMessageError(self.where(name), "missing") from None

    def finish(self) -> None:
        """Refuse fields that nobody took: they are typing errors, or of a later version."""
        for name in self._left:
            label = name if isinstance(name, str) else repr(name)
            raise MalformedMessageError(
                self.where(_printable(label[:64])), "unknown field; remove it"
            )

    def text(self, name: str, max_chars: int) -> str:
        """Take a string of valid Unicode."""
        value = self.take(name)
        if not isinstance(value, str):
            raise self._unusable(name, "text", value)
        if len(value) > max_chars:
            raise MessageTooLargeError(
                self.where(name), f"{len(value)} characters; at most {max_chars} are taken"
            )
        if not value.isascii() and _printable(value) != value:
            raise UnusableValueError(self.where(name), "is not valid UTF-8")
        return value

    def name(self, name: str) -> str:
        """Take a short string."""
        return self.text(name, self.limits.max_name_chars)

    def optional_name(self, name: str) -> str | None:
        """Take a short string, or None where there is none."""
        return self.name(name) if self.has(name) else None

    def flag(self, name: str) -> bool:
        """Take a boolean."""
        value = self.take(name)
        if not isinstance(value, bool):
            raise self._unusable(name, "true or false", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        """Take an integer between two bounds, both included."""
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._unusable(name, f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str) -> float:
        """Take a finite number."""
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unusable(name, "a number", value)
        return _finite(value, self.where(name))

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Take one of several words."""
        value = self.take(name)
        if not isinstance(value, str) or value not in choices:
            raise self._unusable(name, f"one of {', '.join(choices)}", value)
        return value

    def binary(self, name: str) -> bytes:
        """Take bytes."""
        value = self.take(name)
        if not isinstance(value, bytes):
            raise self._unusable(name, "bytes", value)
        return value

    def items(self, name: str, max_items: int) -> list[object]:
        """Take a list of anything."""
        value = self.take(name)
        if not isinstance(value, list):
            raise self._unusable(name, "a list", value)
        if len(value) > max_items:
            raise MessageTooLargeError(
                self.where(name), f"{len(value)} items; at most {max_items} are taken"
            )
        return value

    def integers(self, name: str, max_items: int) -> tuple[int, ...]:
        """Take a list of integers that fit 64 bits."""
        items = self.items(name, max_items)
        for item in items:
            if type(item) is not int or not -_TOO_LARGE < item < _TOO_LARGE:
                raise UnusableValueError(self.where(name), "must be a list of integers")
        return tuple(items)  # type: ignore[arg-type]

    def numbers(self, name: str, max_items: int) -> tuple[float, ...]:
        """Take a list of finite numbers."""
        items = self.items(name, max_items)
        if set(map(type, items)) - {int, float}:
            raise UnusableValueError(self.where(name), "must be a list of numbers")
        return tuple(_finite(item, self.where(name)) for item in items)  # type: ignore[arg-type]

    def names(self, name: str, max_items: int) -> tuple[str, ...]:
        """Take a list of short strings."""
        items = self.items(name, max_items)
        for item in items:
            if not isinstance(item, str) or len(item) > self.limits.max_name_chars:
                raise self._unusable(name, "a list of short texts", item)
        return tuple(map(str, items))

    def child(self, name: str) -> "FieldReader":
        """Take a map."""
        return self.over(self.take(name), self.where(name))

    def children(self, name: str, max_items: int) -> Iterator["FieldReader"]:
        """Take a list of maps."""
        for index, item in enumerate(self.items(name, max_items)):
            yield self.over(item, f"{self.where(name)}[{index}]")

    def names_left(self) -> list[str]:
        """Return the names of the fields not taken yet."""
        return [name for name in self._left if isinstance(name, str)]

    def over(self, source: object, path: str) -> "FieldReader":
        """Return a reader of the same kind over another map."""
        return type(self)(source, self.limits, path)

    def array(self, name: str, dtype: str, max_values: int) -> NDArray[np.generic]:
        """Take an array of a fixed dtype; its shape is checked against its bytes first."""
        child = self.child(name)
        values = child.own_array(dtype, max_values)
        child.finish()
        return values

    def own_array(self, dtype: str, max_values: int) -> NDArray[np.generic]:
        """Take `dtype`, `shape` and `data` of this very map as an array (read-only)."""
        self.choice("dtype", (dtype,))
        shape = self._shape("shape", max_values)
        data = self.binary("data")
        layout = _LAYOUTS[dtype]
        expected = math.prod(shape) * layout.itemsize
        if len(data) != expected:
            raise UnusableValueError(
                self.where("data"),
                f"{len(data)} bytes; {list(shape)} of {dtype} takes {expected}",
            )
        return np.frombuffer(data, layout).reshape(shape)

    def _shape(self, name: str, max_values: int) -> tuple[int, ...]:
        shape = self.integers(name, 4)
        if not shape or min(shape) < 0:
            raise UnusableValueError(self.where(name), f"must not be negative, got {list(shape)}")
        if math.prod(shape) > max_values:
            raise MessageTooLargeError(
                self.where(name), f"{list(shape)} is beyond the {max_values} values that are taken"
            )
        return shape

    def _unusable(self, name: str, expected: str, value: object) -> UnusableValueError:
        return UnusableValueError(
            self.where(name), f"must be {expected}, got {_printable(describe(value))}"
        )


def _finite(value: float, field: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UnusableValueError(field, "must be finite, got NaN, infinity or beyond")
    return number


def _printable(text: str) -> str:
    """Return a text that can be encoded; it equals the original where that could be."""
    return text.encode("utf-8", "replace").decode("utf-8")
