"""Typed access to a checkpoint's JSON files. Knows nothing of what the fields mean."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from deft_policies.errors import CheckpointError

T = TypeVar("T")
_NAMES: Mapping[object, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    str: ("a string", "strings"),
    bool: ("true or false", "true and false"),
}


class JsonFields:
    """One JSON object of a checkpoint file; a wrong type is an error naming file and field.

    A getter without a default insists on the field; `null` counts as absent.
    """

    def __init__(self, path: Path, values: Mapping[str, object], where: str = "") -> None:
        self.path = path
        self._values = values
        self._where = where

    @staticmethod
    def load(path: Path, remedy: str) -> "JsonFields":
        """Read a file that holds one object; `remedy` says what to do when it is not there."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; {remedy}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; {remedy}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not JSON ({error}); {remedy}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds {type(values).__name__}, expected an object")
        return JsonFields(path, values)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the fields that are there."""
        return tuple(self._values)

    def has(self, key: str) -> bool:
        """True if the field is there and not `null`."""
        return self._values.get(key) is not None

    def is_list(self, key: str) -> bool:
        """True if the field holds a list."""
        return isinstance(self._values.get(key), list)

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A value of this kind; a whole number is a number, too, and true is none."""
        value = self._get(key, default)
        if not _is(value, kind):
            raise self.error(key, f"must be {_NAMES[kind][0]}, got {value!r}")
        return cast(T, float(value) if kind is float else value)  # type: ignore[arg-type]

    def optional(self, key: str, kind: type[T]) -> T | None:
        """A value of this kind; None where it is absent."""
        return self.value(key, kind) if self.has(key) else None

    def count(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        """A whole number up to `most`: what is beyond it no model has, and nobody can hold."""
        value = self.value(key, int, default)
        if not least <= value <= most:
            raise self.error(key, f"is {value}, expected {least} to {most}")
        return value

    def values(self, key: str, kind: type[T], default: Sequence[T] | None = None) -> tuple[T, ...]:
        """A list of values of this kind."""
        values = self.items(key, default)
        if not all(_is(one, kind) for one in values):
            raise self.error(key, f"must be a list of {_NAMES[kind][1]}")
        return tuple(cast(T, float(one) if kind is float else one) for one in values)  # type: ignore[arg-type]

    def items(self, key: str, default: Sequence[object] | None = None) -> tuple[object, ...]:
        """A list, whatever is in it."""
        value = self._get(key, default)
        if not isinstance(value, list | tuple):
            raise self.error(key, f"must be a list, got {value!r}")
        return tuple(value)

    def rows(self, key: str) -> tuple[tuple[float, ...], ...]:
        """A list of lists of numbers."""
        rows = self._by_index(key)
        return tuple(rows.values(name, float) for name in rows.names)

    def section(self, key: str) -> "JsonFields":
        """An object; empty if the field is absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return JsonFields(self.path, value, f"{self._where}{key}.")

    def sections(self, key: str) -> tuple["JsonFields", ...]:
        """A list of objects."""
        sections = self._by_index(key)
        return tuple(sections.section(name) for name in sections.names)

    def error(self, key: str, problem: str) -> CheckpointError:
        """An error about one field, to be raised by the caller."""
        return CheckpointError(f"{self.path}: {self._where}{key} {problem}")

    def _by_index(self, key: str) -> "JsonFields":
        held = {str(index): one for index, one in enumerate(self.items(key))}
        return JsonFields(self.path, held, f"{self._where}{key}.")

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def _is(value: object, kind: type) -> bool:
    """NaN, infinity and integers beyond any float, which Python finds in JSON, are no numbers."""
    if kind is float:
        is_real = type(value) is int or type(value) is float
        return is_real and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    return type(value) is kind
