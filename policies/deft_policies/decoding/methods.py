"""Decoding methods as text: NAME or NAME:KNOB=VALUE,KNOB=VALUE. Method files write them so, too.

Of the core itself is `autoregressive` alone; the others are files of `deft_policies.methods`.

Knobs are those of the method and the fields of its rule. Texts come with requests, so every value
is checked here and has a limit. Imports no torch: flags are made of this, and front processes check
methods by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import get_type_hints

from deft_core.methods import with_knobs
from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance.rule import AcceptanceRule, ChoosingRule, ExactMatch
from deft_policies.decoding.knobs import read_switch, read_value
from deft_policies.decoding.plan import (
    ACTION_PLANS,
    DEFAULT_PLANS,
    NUMBER_PLANS,
    PLAIN,
    PLANS,
    TEXT_PLANS,
    Plan,
    TreeShape,
    read_tree,
)
from deft_policies.decoding.plugins import (
    RULES,
    find_plugins,
    from_files,
    load_rule,
    method_files,
)
from deft_policies.errors import RequestError, UnknownDecodingError

AUTOREGRESSIVE = "autoregressive"
DEFAULT_METHOD = "lossless"


@dataclass(frozen=True)
class Method:
    """One way of decoding, as a value: what a caller changes about it makes another one.

    The first plan whose sources are there is used, or the guard chooses. `required` sources must be
    there; plans that use others which are not there are left out. `whole_vocabulary` makes the head
    draft over every token instead of action tokens alone. A temperature of 0 means greedy.
    """

    name: str
    rule: AcceptanceRule = ExactMatch()
    plans: tuple[Plan, ...] = (PLAIN,)
    required: frozenset[str] = frozenset()
    whole_vocabulary: bool = False
    is_guarded: bool = False
    temperature: float = 0.0
    seed: int = 0
    options: tuple[tuple[str, float], ...] = ()  # that its sources read: name and value

    def described(self) -> dict[str, str]:
        """Its rule with every number, and its plans, for people."""
        if self.plans == (PLAIN,):
            return {}
        about = {"rule": str(self.rule), "plans": ", ".join(plan.name for plan in self.plans)}
        if self.options:
            about["options"] = ", ".join(f"{name}={value:g}" for name, value in self.options)
        return about

    def option(self, name: str, default: float) -> float:
        """An option of a source, which says what its default is."""
        return dict(self.options).get(name, default)

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn by their odds, for a rule that judges them by these."""
        return isinstance(self.rule, ChoosingRule) and self.temperature > 0.0

    @property
    def drafting(self) -> tuple[bool, float | None]:
        """What a head drafts by: it drafts together for methods that have it in common."""
        return self.whole_vocabulary, self.temperature if self.draws else None

    def with_radius(self, radius: int) -> Method:
        """With another radius in bins; `RequestError` where the rule has none."""
        if radius < 0:
            raise RequestError("radius", f"radius must be 0 or more bins, got {radius}")
        return replace(self, rule=self.rule.with_radius(radius))

    def with_plans(self, plans: tuple[Plan, ...]) -> Method:
        """With these plans, unguarded; the sources of an only plan are required."""
        required = plans[0].kinds if len(plans) == 1 else frozenset()
        return replace(self, plans=plans, required=required, is_guarded=False)

    def with_drafts(self, drafts: tuple[str, ...]) -> Method:
        """Drafting from these sources alone, however slow they are.

        Sources that need no pass of their own draft in the prefill, too.
        """
        if self.plans == (PLAIN,):
            raise RequestError("drafts", f"{self.name!r} drafts nothing; choose another method")
        return self.with_plans((Plan("+".join(drafts), drafts, drafts),))

    def with_shape(self, shape: TreeShape) -> Method:
        """With other trees; of plans that become equal, the first."""
        by_sources: dict[tuple[tuple[str, ...], ...], Plan] = {}
        for plan in self.plans:
            by_sources.setdefault((plan.prefill, plan.rounds), replace(plan, shape=shape))
        return replace(self, plans=tuple(by_sources.values()))

    def with_sampling(self, temperature: float, seed: int = 0) -> Method:
        """Drawing tokens with this seed; at temperature 0 by the method's own temperature."""
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        if not temperature >= 0.0:
            raise ValueError(f"temperature must be 0 or more, got {temperature}")
        if temperature > 0.0 and not self.rule.is_exact:
            raise RequestError(
                "temperature",
                f"{self.name!r} relaxes greedy decoding and cannot sample; use 'lossless' or "
                "'autoregressive', which keep the target's distribution",
            )
        return replace(self, temperature=temperature or self.temperature, seed=seed)


def presets() -> dict[str, str]:
    """The text of every method that has a name, in the syntax in which callers write theirs."""
    return {AUTOREGRESSIVE: ""} | from_files("METHODS")


def method_names() -> tuple[str, ...]:
    """Every name that a text may begin with: ours, then rules of installed packages."""
    return tuple(dict.fromkeys((*presets(), *find_plugins(RULES))))


def find_method(text: str) -> Method:
    """The method that a text describes, named by it; raises `RequestError` where none is."""
    name, _, knobs = text.partition(":")
    return apply_knobs(_base(name), knobs)


def apply_knobs(method: Method, knobs: str) -> Method:
    """The method with KNOB=VALUE,... applied in order, and named so."""
    if not knobs:
        return method
    turned: dict[str, str] = {}
    for part in knobs.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key in turned:
            raise RequestError("decoding", f"{method.name!r}: knob {key!r} is given twice")
        turned[key] = value
    name = with_knobs(method.name, turned)
    for key, value in turned.items():
        method = _with_knob(method, key, value)
    return replace(method.with_sampling(method.temperature, method.seed), name=name)


def _base(name: str) -> Method:
    known = presets()
    if name in known:
        return _read_preset(name, known[name])
    point = find_plugins(RULES).get(name)
    broken = method_files().get(name.replace("-", "_"))
    if point is None and isinstance(broken, Exception):
        reason = f"methods/{name.replace('-', '_')}.py cannot be loaded: {broken}"
        raise RequestError("decoding", reason)
    if point is None:
        raise UnknownDecodingError(name, method_names())
    return Method(name, load_rule(point), PLANS["steady"])


@lru_cache(maxsize=256)
def _read_preset(name: str, text: str) -> Method:
    return replace(find_method(text) if text else Method(name), name=name)


def _with_knob(method: Method, key: str, value: str) -> Method:
    apply = _METHOD_KNOBS.get(key)
    read_option: Callable[[str], float] | None = from_files("OPTIONS").get(key)
    try:
        if apply is not None:
            return apply(method, value)
        if read_option is not None:
            options = dict(method.options) | {key: read_option(value)}
            return replace(method, options=tuple(options.items()))
        return replace(method, rule=_with_rule_knob(method, method.rule, key, value))
    except ValueError as error:
        raise RequestError("decoding", f"{method.name!r}, knob {key!r}: {error}") from error


def _with_rule_knob(method: Method, rule: AcceptanceRule, key: str, value: str) -> AcceptanceRule:
    """The rule with one of its fields changed; `inner.key` reaches into a rule that it wraps."""
    field, _, inner = key.partition(".")
    names: list[str] = [entry.name for entry in fields(rule)] if is_dataclass(rule) else []
    if field not in names:
        known = ", ".join((*names, *_METHOD_KNOBS, *from_files("OPTIONS")))
        raise RequestError("decoding", f"{method.name!r} has no knob {key!r}; it has: {known}")
    old = getattr(rule, field)
    if isinstance(old, AcceptanceRule):
        return replace(rule, **{field: _with_rule_knob(method, old, inner, value)})  # type: ignore[type-var]
    hint = get_type_hints(type(rule))[field]
    return replace(rule, **{field: read_value(hint, value)})  # type: ignore[type-var]


def _find_rule(name: str) -> AcceptanceRule:
    """A rule by its own name, else that of a method or of a package."""
    if name == "exact":
        return ExactMatch()
    rule: AcceptanceRule | None = found() if (found := from_files("RULES").get(name)) else None
    return rule or _base(name).rule


def _find_plans(name: str) -> tuple[Plan, ...]:
    known: dict[str, tuple[Plan, ...]] = PLANS | from_files("PLANS")
    if name not in known:
        raise ValueError(f"expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def _with_plan(method: Method, name: str) -> Method:
    """With one of the method's own plans and no other, whatever it costs.

    A method that names no plans may have any default plan, those of texts included.
    """
    of_texts = (*TEXT_PLANS, *NUMBER_PLANS)
    ours = (*ACTION_PLANS, *of_texts) if method.plans in DEFAULT_PLANS else method.plans
    plans = tuple(dict.fromkeys((*method.plans, *ours, PLAIN)))
    chosen = next((plan for plan in plans if plan.name == name), None)
    if chosen is None:
        names = ", ".join(plan.name for plan in plans)
        raise ValueError(f"expected one of its plans, {names}, got {name!r}")
    return replace(method, plans=(chosen,), is_guarded=False)


def _with_rule(method: Method, rule: AcceptanceRule) -> Method:
    """With another rule; a relaxed one is not guarded, because its answers depend on the plan."""
    return replace(method, rule=rule, is_guarded=method.is_guarded and rule.is_exact)


def _with_guard(method: Method, text: str) -> Method:
    guards = read_switch(text) and len(method.plans) > 1
    if guards and not method.rule.is_exact:
        raise ValueError("plans of a relaxed method are fixed: its answers depend on them")
    return replace(method, is_guarded=guards)


_METHOD_KNOBS: dict[str, Callable[[Method, str], Method]] = {
    "radius": lambda method, text: method.with_radius(read_value(int, text)),
    "rule": lambda method, name: _with_rule(method, _find_rule(name)),
    "drafts": lambda method, text: method.with_drafts(kinds.read_kinds(text)),
    "tree": lambda method, text: method.with_shape(read_tree(text)),
    "plan": _with_plan,
    "plans": lambda method, name: method.with_plans(_find_plans(name)),
    "guard": _with_guard,
    "whole_vocabulary": lambda method, text: replace(method, whole_vocabulary=read_switch(text)),
    "temperature": lambda method, text: method.with_sampling(read_value(float, text), method.seed),
}
