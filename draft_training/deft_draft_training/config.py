"""Turns TOML into frozen dataclasses. Unknown keys and wrong types are refused by name."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from deft_core.errors import WireError
from deft_core.wire.formats import convert
from deft_core.wire.refusals import unknown_field
from deft_draft_training.errors import ConfigError

Config = TypeVar("Config")


def load_config(kind: type[Config], path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration from TOML, then apply `section.key=value` overrides.

    What a group does not name keeps the value that this kind of configuration gives it. An
    override's value is read as TOML and, where that fails, taken as text.
    """
    table = _read(path) if path else {}
    for override in overrides:
        _apply(table, override)
    for field in fields(kind):  # type: ignore[arg-type]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if is_dataclass(default) and isinstance(table.get(field.name), dict):
            table[field.name] = _merged(plain(default), table[field.name])
    return build_config(kind, table)


def _merged(defaults: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the table, and those of the defaults that it does not name."""
    merged = {**defaults, **table}
    for name, value in table.items():
        if isinstance(value, dict) and isinstance(defaults.get(name), dict):
            merged[name] = _merged(defaults[name], value)
    return merged


def build_config(kind: type[Config], table: Mapping[str, Any]) -> Config:
    """Build a dataclass from plain values, checking every key and type."""
    try:
        _check_names(kind, table)
        return convert(dict(table), kind)
    except (WireError, ValueError) as error:
        raise ConfigError(f"configuration: {error}") from error


def _check_names(kind: type[Any], table: Mapping[str, Any], where: str = "") -> None:
    """Raise `WireError` for a key that a dataclass, or one within it, does not have."""
    hints = get_type_hints(kind)
    for name, value in table.items():
        if name not in hints:
            raise unknown_field(where + name, hints)
        if is_dataclass(hints[name]) and isinstance(value, dict):
            _check_names(hints[name], value, f"{where}{name}.")


def plain(config: object) -> Any:
    """The configuration as JSON-ready values: what a run directory stores and compares."""
    values = asdict(config)  # type: ignore[call-overload]
    return json.loads(json.dumps(values, default=lambda value: value.value))


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
