"""Functions by name, `module:function`, so that simulators and policies can come from outside."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from deft_client.libero.evaluate_errors import SelectionError


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """The function that `module:function` names; SelectionError names the option otherwise."""
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise SelectionError(f"{option} takes module:function, got {spec!r}")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SelectionError(f"{option} {spec}: {error}") from error
    if not callable(function):
        raise SelectionError(f"{option} {spec}: {name} is no function")
    found: Callable[..., Any] = function
    return found
