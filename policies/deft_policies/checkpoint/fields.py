"""Typed access to a checkpoint's JSON files. Knows nothing of what the fields mean."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from deft_policies.errors import CheckpointError


class JsonFields:
    """One JSON object of a checkpoint file; a wrong type is an error naming file and field.

    A getter without a default insists on the field; `null` counts as absent.
    """

    def __init__(self, path: Path, values: Mapping[str, object], where: str = "") -> None:
        self._path = path
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
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON ({error}); {remedy}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds {type(values).__name__}, expected an object")
        return JsonFields(path, values)

    @property
    def path(self) -> Path:
        """The file these fields come from."""
        return self._path

    def keys(self) -> tuple[str, ...]:
        """Names of the fields that are there."""
        return tuple(self._values)

    def has(self, key: str) -> bool:
        """True if the field is there and not `null`."""
        return self._values.get(key) is not None

    def is_list(self, key: str) -> bool:
        """True if the field holds a list."""
        return isinstance(self._values.get(key), list)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be a whole number, got {value!r}")
        return value

    def count(self, key: str, most: int, default: int | None = None) -> int:
        """A whole number from 1 to `most`: what is beyond it no model has, and nobody can hold."""
        value = self.integer(key, default)
        if not 1 <= value <= most:
            raise self.error(key, f"is {value}, expected 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, whole or not."""
        value = self._get(key, default)
        if not _is_number(value):
            raise self.error(key, f"must be a finite number, got {value!r}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {value!r}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def integers(self, key: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A list of whole numbers."""
        values = self._items(key, default)
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
            raise self.error(key, "must be a list of whole numbers")
        return tuple(one for one in values if isinstance(one, int))

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        values = self._items(key, None)
        if not all(map(_is_number, values)):
            raise self.error(key, "must be a list of finite numbers")
        return tuple(float(one) for one in values if _is_number(one))

    def flags(self, key: str) -> tuple[bool, ...]:
        """A list of true and false."""
        values = self._items(key, None)
        if not all(isinstance(one, bool) for one in values):
            raise self.error(key, "must be a list of true and false")
        return tuple(one for one in values if isinstance(one, bool))

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """A list of strings."""
        values = self._items(key, default)
        if not all(isinstance(one, str) for one in values):
            raise self.error(key, "must be a list of strings")
        return tuple(one for one in values if isinstance(one, str))

    def optional_texts(self, key: str) -> tuple[str | None, ...]:
        """A list of strings and `null`s; empty if the field is absent."""
        values = self._items(key, ())
        if not all(one is None or isinstance(one, str) for one in values):
            raise self.error(key, "must be a list of strings or null")
        return tuple(one if isinstance(one, str) else None for one in values)

    def rows(self, key: str) -> tuple[tuple[float, ...], ...]:
        """A list of lists of numbers."""
        holder = {str(i): row for i, row in enumerate(self._items(key, None))}
        rows = JsonFields(self._path, holder, f"{self._where}{key}.")
        return tuple(rows.numbers(name) for name in holder)

    def section(self, key: str) -> "JsonFields":
        """An object; empty if the field is absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return JsonFields(self._path, value, f"{self._where}{key}.")

    def sections(self, key: str) -> tuple["JsonFields", ...]:
        """A list of objects."""
        holder = {str(i): one for i, one in enumerate(self._items(key, None))}
        parent = JsonFields(self._path, holder, f"{self._where}{key}.")
        return tuple(parent.section(name) for name in holder)

    def error(self, key: str, problem: str) -> CheckpointError:
        """An error about one field, to be raised by the caller."""
        return CheckpointError(f"{self._path}: {self._where}{key} {problem}")

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value

    def _items(self, key: str, default: object) -> tuple[object, ...]:
        value = self._get(key, default)
        if not isinstance(value, list | tuple):
            raise self.error(key, f"must be a list, got {value!r}")
        return tuple(value)


def _is_number(value: object) -> TypeGuard[float]:
    """JSON as Python reads it knows NaN, infinity and integers beyond any float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
