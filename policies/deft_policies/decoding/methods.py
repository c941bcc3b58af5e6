"""Decoding methods as text: NAME or NAME:KNOB=VALUE,KNOB=VALUE. The presets are written so, too.

Knobs are those of the method and the fields of its rule. Texts come with requests, so every value
is checked here and has a limit. Imports no torch: flags are made of this, and front processes check
methods by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

from deft_client.commands.methods import with_knobs
from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance import confidence, distance, numbers
from deft_policies.decoding.acceptance.rule import AcceptanceRule, ExactMatch
from deft_policies.decoding.plan import (
    NUMBER_PLANS,
    OUR_PLANS,
    PLAIN,
    PLANS,
    TEXT_PLANS,
    UNNAMED,
    Loop,
    Plan,
    TieBreak,
    TreeShape,
    read_tree,
)
from deft_policies.decoding.plugins import RULES, find_plugins, load_rule
from deft_policies.errors import RequestError, UnknownDecodingError

AUTOREGRESSIVE = "autoregressive"
DEFAULT_METHOD = "lossless"
LARGEST = 10_000.0  # of any number of a rule

# Every method of ours, in the syntax in which callers write theirs.
PRESETS = {
    # one token a pass: the baseline
    AUTOREGRESSIVE: "",
    # the same actions as autoregressive, in fewer passes
    "lossless": "autoregressive:plans=ours,guard=on",
    # drafts within physical limits, gripper by class, inside a drift budget
    "deft": "autoregressive:rule=within-drift,plans=steady",
    # numbers as text: near ones stand, within limits and a drift budget
    "numbers": "autoregressive:rule=within-numbers,plans=steady",
    # Spec-VLA, relaxed, in our loop
    "spec-vla": "autoregressive:rule=within-ids,radius=9,plans=spec-vla,ties=first-row,"
    "whole_vocabulary=on",
    # Spec-VLA, strict
    "spec-vla-strict": "spec-vla:radius=0",
    # as published for LIBERO-Long
    "spec-vla-long": "spec-vla:radius=5",
    # Spec-VLA's loop: drafts of the last token count
    "spec-vla-published": "spec-vla:loop=published",
    # FLy: misses stand where the target is unsure and its next tokens agree
    "fly": "autoregressive:rule=deferred-window,plans=chains,multi_level=on",
    # LVSpec: strict where the token depends on the image, loose elsewhere
    "lvspec": "autoregressive:rule=visual-relevance,shift_cap=9,plans=chains,patch_share=0.1",
    # standard speculative decoding
    "small-model": "autoregressive:plans=small-model",
    # SpecVLM: a tree from a model that looks at a tenth of the patches
    "specvlm": "autoregressive:plans=specvlm,patch_share=0.1",
    # prompt-lookup decoding: n-grams of the session's own actions
    "pld": "autoregressive:plans=ngram",
    # a tree of what the target last said after the same tokens
    "token-recycling": "autoregressive:plans=token-recycling",
    # HeiSD's budgets per group of dimensions, every token verified
    "heisd-like": "autoregressive:rule=within-budget,plans=heisd",
    # KERV's radius that shrinks over the episode
    "kerv-like": "autoregressive:rule=scheduled-radius,plans=kerv",
    # sampling, exact by Leviathan's ratio test
    "ratio-test": "autoregressive:plans=ratio-test,draws_drafts=on,temperature=1",
    # drafts at most a radius of bins away
    "within-bins": "autoregressive:rule=within-bins,plans=ours",
    # SpecDec: drafts among the target's k likeliest
    "top-k": "autoregressive:rule=top-k,plans=ours",
    # TensorRT-LLM's relaxed acceptance
    "near-top": "autoregressive:rule=near-top,plans=ours",
    # a radius that grows with the target's own uncertainty
    "entropy-radius": "autoregressive:rule=entropy-radius,plans=ours",
}

_RULES: dict[str, type[AcceptanceRule]] = {
    "exact": ExactMatch,
    "within-bins": distance.WithinBins,
    "within-ids": distance.WithinIds,
    "within-limits": distance.WithinLimits,
    "within-budget": distance.WithinBudget,
    "within-drift": distance.WithinDrift,
    "within-numbers": numbers.WithinNumbers,
    "scheduled-radius": distance.ScheduledRadius,
    "top-k": confidence.TopK,
    "near-top": confidence.NearTop,
    "entropy-radius": confidence.EntropyRadius,
    "deferred-window": confidence.DeferredWindow,
    "visual-relevance": confidence.VisualRelevance,
}


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
    tie_break: TieBreak = TieBreak.CLOSEST
    required: frozenset[str] = frozenset()
    whole_vocabulary: bool = False
    is_guarded: bool = False
    temperature: float = 0.0
    seed: int = 0
    draws_drafts: bool = False  # draw drafts by their odds, for the ratio test
    multi_level: bool = False  # n-grams of the session speed up the small model, as in FLy
    patch_share: float = 1.0  # of the image patches that the small model looks at
    loop: Loop = Loop.LEAN

    def described(self) -> dict[str, str]:
        """Its rule with every number, and its plans, for people."""
        if self.plans == (PLAIN,):
            return {}
        about = {"rule": str(self.rule), "plans": ", ".join(plan.name for plan in self.plans)}
        if any(kinds.SMALL_MODEL in plan.kinds for plan in self.plans):
            small = f"multi_level={self.multi_level}, patch_share={self.patch_share:g}"
            about["small model"] = small
        return about

    @property
    def drafting(self) -> tuple[bool, float | None]:
        """What a head drafts by: it drafts together for methods that have it in common."""
        return self.whole_vocabulary, self.temperature if self.draws_drafts else None

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
        """With other trees; of the plans that become alike, the first."""
        found: dict[tuple[tuple[str, ...], ...], Plan] = {}
        for plan in self.plans:
            found.setdefault((plan.prefill, plan.rounds), replace(plan, shape=shape))
        return replace(self, plans=tuple(found.values()))

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


def method_names() -> tuple[str, ...]:
    """Every name that a text may begin with: ours, then rules of installed packages."""
    return tuple(dict.fromkeys((*PRESETS, *find_plugins(RULES))))


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
        key, _, value = (one.strip() for one in part.partition("="))
        if key in turned:
            raise RequestError("decoding", f"{method.name!r}: knob {key!r} is given twice")
        turned[key] = value
    name = with_knobs(method.name, turned)
    for key, value in turned.items():
        method = _with_knob(method, key, value)
    return replace(method.with_sampling(method.temperature, method.seed), name=name)


def _base(name: str) -> Method:
    if name in PRESETS:
        text = PRESETS[name]
        method = find_method(text) if text else Method(name)
        return replace(method, name=name)
    found = find_plugins(RULES).get(name)
    if found is None:
        raise UnknownDecodingError(name, method_names())
    return Method(name, load_rule(found), PLANS["steady"])


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
    names: list[str] = [one.name for one in fields(rule)] if is_dataclass(rule) else []
    if field not in names:
        known = ", ".join((*names, *_METHOD_KNOBS))
        raise RequestError("decoding", f"{method.name!r} has no knob {key!r}; it has: {known}")
    old = getattr(rule, field)
    if isinstance(old, AcceptanceRule):
        return replace(rule, **{field: _with_rule_knob(method, old, inner, value)})  # type: ignore[type-var]
    hint = get_type_hints(type(rule))[field]
    return replace(rule, **{field: _number(hint, value)})  # type: ignore[type-var]


def _number(hint: object, text: str) -> Any:
    """A value of a rule's field, by the field's type."""
    allowed = get_args(hint) or (hint,)
    if type(None) in allowed and text == "none":
        return None
    if bool in allowed:
        return _switch(text)
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r}") from None
    if not 0 <= number <= LARGEST or (int in allowed and number != math.floor(number)):
        kind = "a whole number" if int in allowed else "a number"
        raise ValueError(f"expected {kind} from 0 to {LARGEST:g}, got {text!r}")
    return int(number) if int in allowed else number


def _switch(text: str) -> bool:
    if text not in ("on", "true", "off", "false"):
        raise ValueError(f"expected on or off, got {text!r}")
    return text in ("on", "true")


def _find_rule(name: str) -> AcceptanceRule:
    """A rule of ours by its own name, else that of a method or of a package."""
    return _RULES[name]() if name in _RULES else _base(name).rule


def _find_plans(name: str) -> tuple[Plan, ...]:
    if name not in PLANS:
        raise ValueError(f"expected one of {', '.join(PLANS)}, got {name!r}")
    return PLANS[name]


def _with_plan(method: Method, name: str) -> Method:
    """With one of the method's own plans and no other, whatever it costs.

    A method that names no plans may have any of ours, those of texts included.
    """
    of_texts = (*TEXT_PLANS, *NUMBER_PLANS)
    ours = (*OUR_PLANS, *of_texts) if method.plans in UNNAMED else method.plans
    every = tuple(dict.fromkeys((*method.plans, *ours, PLAIN)))
    found = next((plan for plan in every if plan.name == name), None)
    if found is None:
        known = ", ".join(plan.name for plan in every)
        raise ValueError(f"expected one of its plans, {known}, got {name!r}")
    return replace(method, plans=(found,), is_guarded=False)


def _with_rule(method: Method, rule: AcceptanceRule) -> Method:
    """With another rule; a relaxed one is not guarded, because its answers depend on the plan."""
    return replace(method, rule=rule, is_guarded=method.is_guarded and rule.is_exact)


def _with_guard(method: Method, text: str) -> Method:
    guards = _switch(text) and len(method.plans) > 1
    if guards and not method.rule.is_exact:
        raise ValueError("plans of a relaxed method are fixed: its answers depend on them")
    return replace(method, is_guarded=guards)


def _with_patch_share(method: Method, text: str) -> Method:
    share = _number(float, text)
    if not 0 < share <= 1:
        raise ValueError(f"expected a share above 0 and up to 1, got {text!r}")
    return replace(method, patch_share=share)


_METHOD_KNOBS: dict[str, Callable[[Method, str], Method]] = {
    "radius": lambda method, text: method.with_radius(_number(int, text)),
    "rule": lambda method, name: _with_rule(method, _find_rule(name)),
    "drafts": lambda method, text: method.with_drafts(kinds.read_kinds(text)),
    "tree": lambda method, text: method.with_shape(read_tree(text)),
    "plan": _with_plan,
    "plans": lambda method, name: method.with_plans(_find_plans(name)),
    "guard": _with_guard,
    "ties": lambda method, text: replace(method, tie_break=TieBreak(text)),
    "loop": lambda method, text: replace(method, loop=Loop(text)),
    "draws_drafts": lambda method, text: replace(method, draws_drafts=_switch(text)),
    "multi_level": lambda method, text: replace(method, multi_level=_switch(text)),
    "patch_share": _with_patch_share,
    "whole_vocabulary": lambda method, text: replace(method, whole_vocabulary=_switch(text)),
    "temperature": lambda method, text: method.with_sampling(_number(float, text), method.seed),
}
