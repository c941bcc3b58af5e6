"""Methods from text: NAME:KNOB=VALUE,KNOB=VALUE. Knobs of the method, and those of its rule.

Texts come with requests, so that every value is checked here and has a limit.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from deft_client.commands.methods import with_knobs
from deft_policies.decoding.acceptance.rule import AcceptanceRule
from deft_policies.decoding.methods import Method, known_methods, rule_method
from deft_policies.decoding.plan import PLAIN, Loop, TieBreak, read_kinds, read_tree
from deft_policies.decoding.sampling import Sampling
from deft_policies.errors import RequestError, UnknownDecodingError

LARGEST = 10_000.0  # of any number of a rule
_SWITCH = MappingProxyType({"on": True, "true": True, "off": False, "false": False})
ApplyKnob = Callable[[Method, str], Method]


def find_method(text: str) -> Method:
    """The method that a text describes, named by it; raises `RequestError` where none is."""
    name, _, knobs = text.partition(":")
    return apply_knobs(_base(name), knobs)


def apply_knobs(method: Method, knobs: str) -> Method:
    """The method with KNOB=VALUE,... applied in order, which its name tells."""
    if not knobs:
        return method
    turned: dict[str, str] = {}
    for part in knobs.split(","):
        key, value = _split(part)
        if key in turned:
            raise RequestError("decoding", f"{method.name!r}: knob {key!r} is given twice")
        turned[key] = value
    name = with_knobs(method.name, turned)
    for key, value in turned.items():
        method = _with_knob(method, key, value)
    return replace(method, name=name)


def _split(part: str) -> tuple[str, str]:
    key, _, value = part.partition("=")
    return key.strip(), value.strip()


def method_names() -> tuple[str, ...]:
    """Every name that a text may begin with."""
    return tuple(known_methods())


def _base(name: str) -> Method:
    found = known_methods().get(name)
    if found is None:
        raise UnknownDecodingError(name, method_names())
    return found if isinstance(found, Method) else rule_method(found)


def _with_knob(method: Method, key: str, value: str) -> Method:
    apply = _METHOD_KNOBS.get(key)
    try:
        if apply is not None:
            return apply(method, value)
        return replace(method, rule=_with_rule_knob(method, method.rule, key, value))
    except ValueError as error:
        raise RequestError("decoding", f"{method.name!r}, knob {key!r}: {error}") from error


def _with_rule_knob(method: Method, rule: AcceptanceRule, key: str, value: str) -> AcceptanceRule:
    """The rule with one of its fields changed; `inner.key` reaches into a rule that it wraps."""
    field, _, inner = key.partition(".")
    hints = get_type_hints(type(rule))
    names: list[str] = [one.name for one in fields(rule)] if is_dataclass(rule) else []
    if field not in names:
        known = ", ".join((*names, *_METHOD_KNOBS))
        raise RequestError("decoding", f"{method.name!r} has no knob {key!r}; it has: {known}")
    old = getattr(rule, field)
    is_rule = isinstance(old, AcceptanceRule)
    new = _with_rule_knob(method, old, inner, value) if is_rule else _number(hints[field], value)
    return replace(rule, **{field: new})  # type: ignore[type-var]


def _number(hint: object, text: str) -> Any:
    """A value of a rule's field, by the field's type."""
    kinds = get_args(hint) or (hint,)
    if type(None) in kinds and text == "none":
        return None
    if bool in kinds:
        return _switch(text)
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r}") from None
    if not 0 <= number <= LARGEST or (int in kinds and number != math.floor(number)):
        kind = "a whole number" if int in kinds else "a number"
        raise ValueError(f"expected {kind} from 0 to {LARGEST:g}, got {text!r}")
    return int(number) if int in kinds else number


def _switch(text: str) -> bool:
    if text not in _SWITCH:
        raise ValueError(f"expected on or off, got {text!r}")
    return _SWITCH[text]


def _with_plan(method: Method, name: str) -> Method:
    """With one of the method's own plans and no other, whatever it costs."""
    found = [plan for plan in (*method.plans, PLAIN) if plan.name == name]
    if not found:
        known = ", ".join(plan.name for plan in (*method.plans, PLAIN))
        raise ValueError(f"expected one of its plans, {known}, got {name!r}")
    return replace(method, plans=(found[0],), is_guarded=False)


def _with_patch_share(method: Method, text: str) -> Method:
    share = _number(float, text)
    if not 0 < share <= 1:
        raise ValueError(f"expected a share above 0 and up to 1, got {text!r}")
    return replace(method, patch_share=share)


_METHOD_KNOBS: Mapping[str, ApplyKnob] = MappingProxyType(
    {
        "radius": lambda method, text: method.with_radius(_number(int, text)),
        "rule": lambda method, name: replace(method, rule=_base(name).rule),
        "drafts": lambda method, text: method.with_drafts(read_kinds(text)),
        "tree": lambda method, text: method.with_shape(read_tree(text)),
        "plan": _with_plan,
        "guard": lambda method, text: replace(
            method, is_guarded=_switch(text) and len(method.plans) > 1
        ),
        "ties": lambda method, text: replace(method, tie_break=TieBreak(text)),
        "loop": lambda method, text: replace(method, loop=Loop(text)),
        "multi_level": lambda method, text: replace(method, multi_level=_switch(text)),
        "patch_share": _with_patch_share,
        "whole_vocabulary": lambda method, text: replace(method, whole_vocabulary=_switch(text)),
        "temperature": lambda method, text: method.with_sampling(
            Sampling(_number(float, text), method.sampling.seed)
        ),
    }
)
