"""Methods, rules, plans and draft sources by name: of method files, and of installed packages.

The core imports no method. A broken file or plugin stops only those who name it, and every error
names the plugin.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from deft_policies.decoding.acceptance.rule import (
    AcceptanceRule,
    ChoosingRule,
    DeviceRule,
    LocalRule,
    PathRule,
    TreeRule,
)
from deft_policies.decoding.kinds import SOURCES
from deft_policies.errors import PolicyError, RequestError

if TYPE_CHECKING:
    from deft_policies.decoding.target import Target

Answer = TypeVar("Answer")

RULES = "deft.acceptance_rules"  # the entry points under which packages bring rules


FILES = "deft_policies.methods"


@lru_cache(maxsize=1)
def method_files() -> Mapping[str, ModuleType | Exception]:
    """The modules of `FILES` in the order in which they are read; of a broken one its error."""
    try:
        folder = import_module(FILES)
    except ImportError:
        return {}
    order: tuple[str, ...] = getattr(folder, "READING_ORDER", ())
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    return {name: _imported(f"{FILES}.{name}") for name in names}


def _imported(name: str) -> ModuleType | Exception:
    try:
        return import_module(name)
    except Exception as error:  # noqa: BLE001 - it may fail in any way, and others go on
        return error


def from_files(table: str) -> dict[str, Any]:
    """What method files hold in one of their tables, as METHODS; `methods/__init__.py` has all."""
    entries: dict[str, Any] = {}
    for module in method_files().values():
        entries |= getattr(module, table, {})
    return entries


@lru_cache(maxsize=2)
def find_plugins(group: str) -> Mapping[str, EntryPoint]:
    """The plugins of a group by name. Nothing is loaded."""
    return {point.name: point for point in sorted(entry_points(group=group))}


def describe(found: EntryPoint) -> str:
    """How messages call a plugin: by its package and its class."""
    package = f"{found.dist.name} " if found.dist is not None else ""
    return f"plugin {package}({found.value})"


@contextmanager
def naming(found: EntryPoint, field: str | None = None) -> Iterator[None]:
    """Name the plugin in every error here.

    Where the `field` of a request names the plugin it is a `RequestError`, else a `PolicyError`.
    """
    try:
        yield
    except Exception as error:
        reason = str(error)
        if not isinstance(error, PolicyError):
            reason = f"{type(error).__name__}: {error}"
        reason = f"{describe(found)}: {reason}"
        raise (RequestError(field, reason) if field else PolicyError(reason)) from error


@lru_cache(maxsize=64)
def load_rule(found: EntryPoint) -> AcceptanceRule:
    """The rule of a package."""
    with naming(found, "decoding"):
        rule: object = found.load()()
        if not isinstance(rule, (LocalRule, PathRule, TreeRule, DeviceRule, ChoosingRule)):
            raise PolicyError(
                "must make a LocalRule, a PathRule, a TreeRule, a DeviceRule or a ChoosingRule, "
                f"got {type(rule).__name__}"
            )
        return rule


def ask_rule(rule: AcceptanceRule, ask: Callable[[], Answer]) -> Answer:
    """What a rule answers. An error names the plugin or the module, and is a `PolicyError`.

    So a broken rule fails the answers that name it, and no others.
    """
    module = type(rule).__module__
    plugin = next((point for point in find_plugins(RULES).values() if point.module == module), None)
    if plugin is not None:
        with naming(plugin):
            return ask()
    try:
        return ask()
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"a rule of {module}: {type(error).__name__}: {error}") from error


def broken_plugins() -> list[str]:
    """What is wrong with method files, rules and sources, as far as can be seen."""
    broken = [
        f"methods/{name}.py: {type(error).__name__}: {error}"
        for name, error in method_files().items()
        if isinstance(error, Exception)
    ]
    for group, load in ((RULES, load_rule), (SOURCES, load_source)):
        for point in find_plugins(group).values():
            try:
                load(point)
            except RequestError as error:
                broken.append(str(error))
    return broken


def load_source(found: EntryPoint) -> Callable[[Target], object]:
    """What makes the source of a package."""
    with naming(found, "drafts"):
        make: Callable[[Target], object] = found.load()
        if not callable(make):
            raise PolicyError(f"must be called with the target, and is a {type(make).__name__}")
        return make
