"""Turns TOML into frozen dataclasses. Unknown keys and wrong types are refused by name."""

import difflib
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from deft_draft_training.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Config = TypeVar("Config")


def load_config(kind: type[Config], path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration from TOML, then apply `section.key=value` overrides.

    Without a path the defaults are the starting point. An override's value is read as TOML and,
    where that fails, taken as text.
    """
    table = _read(path) if path else {}
    for override in overrides:
        _apply(table, override)
    return build_config(kind, table)


def build_config(kind: type[Config], table: Mapping[str, Any], prefix: str = "") -> Config:
    """Build a dataclass from plain values, checking every key and type."""
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a dataclass")
    hints = typing.get_type_hints(kind)
    known = [one.name for one in fields(kind)]
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown key {prefix}{key!s}{hint} (known: {', '.join(known)})")
    for one in fields(kind):
        required = one.default is MISSING and one.default_factory is MISSING
        if required and one.name not in table:
            raise ConfigError(f"missing key {prefix}{one.name}")
    values = {key: _convert(hints[key], value, prefix + key) for key, value in table.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"{prefix or 'configuration'}: {error}") from error


def plain(config: object) -> Any:
    """The configuration as JSON-ready values: what a run directory stores and compares."""
    values = asdict(config)  # type: ignore[call-overload]
    return json.loads(json.dumps(values, default=lambda one: one.value))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _apply(table: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    *sections, name = key.strip().split(".")
    for section in sections:
        table = table.setdefault(section, {})
    try:
        table[name] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[name] = text


def _convert(hint: Any, value: Any, key: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key} must be a list, got {value!r}")
        return tuple(_convert(inner, one, key) for one in value)
    return _convert_scalar(hint, value, key)


def _convert_scalar(hint: Any, value: Any, key: str) -> Any:
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a table, got {value!r}")
        return build_config(typing.cast(type, hint), value, f"{key}.")
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            names = ", ".join(repr(one.value) for one in hint)
            raise ConfigError(f"{key} must be one of {names}, got {value!r}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{key} must be {hint.__name__}, got {value!r}")
    return value
