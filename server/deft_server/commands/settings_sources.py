"""Where settings come from: flags, else the environment, else a TOML file, else the defaults.

The environment's names are DEFT_SERVER_PORT and so on. A name that is no setting is refused in all
three. The file may also hold a table `[policy_options]`: flags of the policy, without the dashes.
"""

import argparse
import shlex
import tomllib
import warnings
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from deft_policies import catalog
from deft_policies.commands.parse import PolicyCommand, parse_command
from deft_server.settings import Settings, SettingsError

ENVIRONMENT_PREFIX = "DEFT_SERVER_"
# Earlier names and values of settings, understood for one version.
RENAMED = {"range": "out_of_range"}
RENAMED_VALUES = {"range": {"peer": "passthrough"}}
POLICY_OPTIONS = "policy_options"
# How `--help` shows the settings: those that most people need first.
GROUPS = {
    "address and log": ("host", "port", "dashboard", "log_level", "log_format", "log_batches"),
    "who may call": (
        *("keys_file", "rate_per_s", "allow_anyone", "open_metrics", "allowed_hosts"),
        *("trusted_proxies", "cors_origins", "tls_certificate", "tls_key", "tls_client_ca"),
    ),
    "frames": (
        *("max_batch", "max_waiting", "patience_ms", "default_deadline_ms", "allow_options"),
        *("strict_inputs", "ignore_cameras", "out_of_range", "session_ttl_s", "max_sessions"),
    ),
    "clients of other projects": ("profile", "act_image_chain", "socket_image_chain"),
    "recording": ("record", "record_frames", "record_max_bytes", "record_min_free_bytes"),
    "failures and stopping": ("hang_after_s", "on_hang", "unready_after_failures", "drain_s"),
    "replicas": (
        *("replicas", "most_replicas", "ray", "replica_cpus", "replica_gpus", "replica_surge"),
    ),
    "limits": (
        *("max_body_bytes", "max_total_bytes", "max_header_bytes", "max_image_side"),
        *("max_image_pixels", "max_instruction_chars", "header_timeout_s", "body_timeout_s"),
        *("keep_alive_s", "max_connections", "max_connections_per_address"),
    ),
}


@dataclass(frozen=True)
class Source:
    """What a file or the environment says: settings, which policy, and flags for it."""

    settings: Mapping[str, object] = field(default_factory=dict)
    policy: str | None = None
    policy_flags: tuple[str, ...] = ()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting; only those given end up in the namespace."""
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            info = Settings.model_fields[name]
            flag = "--" + name.replace("_", "-")
            described = f"{info.description} [{_default_of(info)}]".replace("%", "%%")
            if info.annotation is bool:
                action = argparse.BooleanOptionalAction
                group.add_argument(flag, action=action, default=argparse.SUPPRESS, help=described)
            else:
                group.add_argument(
                    flag, default=argparse.SUPPRESS, help=described, metavar=_metavar(info)
                )
    for name in RENAMED:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def read_file(path: Path) -> Source:
    """Read a TOML file, or raise `SettingsError`."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    policy = table.pop("policy", None)
    if policy is not None and not isinstance(policy, str):
        raise SettingsError(f"{path}: policy must be a name, got {policy!r}")
    options = table.pop(POLICY_OPTIONS, {})
    if not isinstance(options, dict):
        raise SettingsError(f"{path}: {POLICY_OPTIONS} must be a table, got {options!r}")
    _refuse_unknown(table, {**Settings.model_fields, **RENAMED}, str(path))
    return Source(table, policy, _as_flags(options))


def read_environment(environment: Mapping[str, str]) -> Source:
    """Read the variables that are ours, or raise `SettingsError`; an empty one counts as unset.

    DEFT_SERVER_POLICY_OPTIONS holds flags of the policy, quoted as in a shell.
    """
    values: dict[str, object] = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and value
    }
    policy = values.pop("policy", None)
    options = values.pop(POLICY_OPTIONS, "")
    _refuse_unknown(values, {**Settings.model_fields, **RENAMED}, "the environment")
    return Source(
        values,
        None if policy is None else str(policy),
        tuple(shlex.split(str(options))),
    )


def build_settings(*sources: Mapping[str, object]) -> Settings:
    """Merge sources, the most important first, or raise `SettingsError`.

    Names that are no settings are ignored here: they belong to the policy.
    """
    merged: dict[str, Any] = {}
    for source in map(_with_new_names, reversed(sources)):
        merged |= {name: value for name, value in source.items() if name in Settings.model_fields}
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from error


def _with_new_names(source: Mapping[str, object]) -> Mapping[str, object]:
    """Return a source with today's name and value where it has an earlier one, and warn."""
    given = dict(source)
    for earlier in RENAMED.keys() & given.keys():
        value = given.pop(earlier)
        name, value = RENAMED[earlier], RENAMED_VALUES[earlier].get(str(value), value)
        warnings.warn(
            f"the setting {earlier} is now {name}: write {name} = {value!r}",
            FutureWarning,
            stacklevel=3,
        )
        given.setdefault(name, value)
    return given


def _refuse_unknown(given: Mapping[str, object], known: Mapping[str, object], source: str) -> None:
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise SettingsError(f"unknown setting {name!r} in {source}{hint}")


def _as_flags(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return a table as command-line flags: true is a bare flag, a list repeats its values."""
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            values = value if isinstance(value, list) else [value]
            flags += [flag, *map(str, values)]
    return tuple(flags)


def _explain(error: ValidationError) -> str:
    lines = []
    for one in error.errors():
        name = ".".join(str(part) for part in one["loc"])
        message = one["msg"].removeprefix("Value error, ")
        lines.append(f"{name}: {message}, got {one['input']!r}" if name else message)
    return "unusable settings: " + "; ".join(lines)


def _default_of(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    if isinstance(default, Enum):
        return str(default.value)
    return "none" if default in (None, ()) else str(default)


def _metavar(info: FieldInfo) -> str:
    kind = info.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "{" + ",".join(str(one.value) for one in kind) + "}"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")  # type: ignore[arg-type]


def policy_of_flags(options: Mapping[str, object]) -> PolicyCommand:
    """Return the policy that a table describes: `policy` is its name, the rest are its flags."""
    return parse_command(ArgumentParser(allow_abbrev=False), list(_as_flags(options)))


def read_command(
    parser: ArgumentParser, arguments: list[str], environment: Mapping[str, str]
) -> tuple[PolicyCommand, Settings]:
    """Add all flags to a parser and merge the three sources; raise `SettingsError` on nonsense.

    Returns a policy with its own flags, and the settings of the server. Flags beat the environment,
    which beats the file. Unknown flags end the program, as usual.
    """
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    for one in (first, parser):
        one.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")
    path = first.parse_known_args(arguments)[0].config
    variables = read_environment(environment)
    file = Source() if path is None else read_file(path)
    parser.epilog = (
        "Every server setting may also be a line of the file, or DEFT_SERVER_NAME in the "
        f"environment. Policies: {', '.join(catalog.CATALOG)}."
    )
    add_flags(parser)
    flags = [*file.policy_flags, *variables.policy_flags, *arguments]
    policy = parse_command(parser, flags, variables.policy or file.policy)
    return policy, build_settings(vars(policy.namespace), variables.settings, file.settings)
