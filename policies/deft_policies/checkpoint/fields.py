"""Typed access to a checkpoint's JSON files. Knows nothing of what the fields mean.

Values are checked as those of messages are: see `deft_core.wire.formats.convert`.
"""

import json
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from deft_core.errors import WireError
from deft_core.wire.formats import convert
from deft_policies.errors import CheckpointError

T = TypeVar("T")
_MOST_BYTES = 2**26  # of a file; tokenizers have up to some 20 MB
_MOST_VALUES = 100_000  # of a YAML file
_LARGEST = sys.float_info.max
_FINITE = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
_WHOLE = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_KINDS: Mapping[object, Any] = {float: _FINITE, int: _WHOLE}


class JsonFields:
    """One JSON object of a checkpoint file; a wrong type is an error naming file and field.

    A getter without a default insists on the field; `null` counts as absent.
    """

    def __init__(self, path: Path, values: Mapping[str, object], where: str = "") -> None:
        self.path = path
        self._values = values
        self._where = where

    @staticmethod
    def load(path: Path, remedy: str, most: int = _MOST_BYTES) -> "JsonFields":
        """Read a file that holds one object; `remedy` says what to do when it is not there.

        One of more than `most` bytes is not read.
        """
        try:
            values = json.loads(_read_text(path, remedy, most))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; {remedy}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; {remedy}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not JSON ({error}); {remedy}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds {type(values).__name__}, expected an object")
        return JsonFields(path, values)

    @staticmethod
    def load_yaml(path: Path, remedy: str) -> "JsonFields":
        """Read a YAML file as if it were JSON: what YAML can hold besides is no configuration."""
        import yaml

        try:
            content = yaml.safe_load(_read_text(path, remedy, _MOST_VALUES * 10))
            _count_values(content)
            fields = json.loads(json.dumps(content))
        except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(fields, dict):
            raise CheckpointError(f"{path} holds {type(fields).__name__}, expected an object")
        return JsonFields(path, fields)

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
        value: T = self._read(key, _KINDS.get(kind, kind), default)
        return value

    def count(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        """A whole number up to `most`: larger ones no model has, and no memory could hold."""
        count: int = self._read(key, Annotated[int, Meta(ge=least, le=most)], default)
        return count

    def values(self, key: str, kind: type[T], default: Sequence[T] | None = None) -> tuple[T, ...]:
        """A list of values of this kind."""
        item: Any = _KINDS.get(kind, kind)
        values: tuple[T, ...] = self._read(key, tuple[item, ...], default)
        return values

    def items(self, key: str, default: Sequence[object] | None = None) -> tuple[object, ...]:
        """A list, whatever is in it."""
        items: tuple[object, ...] = self._read(key, tuple[object, ...], default)
        return items

    def rows(self, key: str) -> tuple[tuple[float, ...], ...]:
        """A list of lists of numbers."""
        rows: tuple[tuple[float, ...], ...] = self._read(key, tuple[tuple[_FINITE, ...], ...])
        return rows

    def section(self, key: str) -> "JsonFields":
        """An object; empty if the field is absent."""
        return JsonFields(self.path, self._read(key, dict[str, object], {}), f"{self._where}{key}.")

    def sections(self, key: str) -> tuple["JsonFields", ...]:
        """A list of objects."""
        objects = self._read(key, tuple[dict[str, object], ...])
        where = f"{self._where}{key}"
        return tuple(
            JsonFields(self.path, section, f"{where}[{index}].")
            for index, section in enumerate(objects)
        )

    def error(self, key: str, problem: str) -> CheckpointError:
        """An error about one field, to be raised by the caller."""
        return CheckpointError(f"{self.path}: {self._where}{key} {problem}")

    def _read(self, key: str, kind: Any, default: object = None) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        try:
            return convert(value, kind, f"{self._where}{key}")
        except WireError as error:
            raise CheckpointError(f"{self.path}: {error}") from None


def _read_text(path: Path, remedy: str, most: int) -> str:
    """A file's text, unless it is no file or has too many bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is no file; {remedy}")
    if status.st_size > most:
        raise CheckpointError(
            f"{path} has {status.st_size} bytes, more than the {most} of any such file; {remedy}"
        )
    return path.read_text(encoding="utf-8")


def _count_values(content: object) -> None:
    """Raise `ValueError` for too many values: a short text can name one list a billion times."""
    num_left, waiting = _MOST_VALUES, [content]
    while waiting:
        one = waiting.pop()
        inner = (
            list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else []
        )
        num_left -= 1 + len(inner)
        if num_left < 0:
            raise ValueError(f"it holds more than {_MOST_VALUES} values")
        waiting += inner
