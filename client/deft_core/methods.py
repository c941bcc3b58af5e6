"""A decoding method as one line of text: NAME, or NAME:KNOB=VALUE,KNOB=VALUE.

The same line stands on command lines, in requests and in traces. A file of TOML says it over
several lines; what the knobs are only the server knows.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from deft_core.errors import UsageError

SUFFIX = ".toml"
NAME_KEY = "method"
OTHER_NAMES = {"plain": "autoregressive"}  # what people call a method, and what it is


def method_text(given: str) -> str:
    """What was given as `--decoding`: the text itself, or what the file of that name says."""
    return by_own_name(read_method(Path(given)) if given.endswith(SUFFIX) else given)


def by_own_name(text: str) -> str:
    """The same method, called as the decoder calls it: `plain` is `autoregressive`."""
    name, colon, knobs = text.partition(":")
    return OTHER_NAMES.get(name, name) + colon + knobs


def read_method(path: Path) -> str:
    """Read a file whose `method` names a method; every other key is a knob of it."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: no decoding method can be read from it: {error}") from error
    name = table.pop(NAME_KEY, None)
    if not isinstance(name, str) or not name:
        raise UsageError(
            f'{path}: expected {NAME_KEY} = "NAME" and one KNOB = VALUE per line, got {name!r} '
            f"for {NAME_KEY}"
        )
    return with_knobs(name, {key: _written(path, key, value) for key, value in table.items()})


def with_knobs(text: str, knobs: Mapping[str, str]) -> str:
    """The same method with further knobs; a later one takes the place of an earlier one."""
    if not knobs:
        return text
    name, _, given = text.partition(":")
    merged = dict(part.split("=", 1) for part in given.split(",") if "=" in part)
    merged.update(knobs)
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in merged.items())


def _written(path: Path, key: str, value: object) -> str:
    """A value as it stands in the text: lists, and what has commas in it, joined by +."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return "+".join(_written(path, key, one) for one in value)
    if not isinstance(value, str | int | float):
        raise UsageError(f"{path}: {key} must be a number, a text or a list of them, got {value!r}")
    return str(value).replace(",", "+")
