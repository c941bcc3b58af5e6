"""Methods are text: presets are what they were, and naming them needs no torch."""

import json
import subprocess
import sys

from deft_policies.decoding.methods import DEFAULT_METHOD, Method, find_method, presets
from deft_policies.decoding.plan import Plan
from deft_policies.families.options import ModelOptions
from tests.repository import ROOT

ALWAYS_THERE = {"ngram", "token-recycling"}


def plan_fields(plan: Plan) -> dict[str, object]:
    shape = plan.shape
    return {
        "name": plan.name,
        "prefill": list(plan.prefill),
        "rounds": list(plan.rounds),
        "levels": shape.levels,
        "top_k": shape.top_k,
        "num_guesses": shape.num_guesses,
        "is_full_depth": shape.is_full_depth,
        "paths": [list(path) for path in shape.paths] or None,
    }


def method_fields(method: Method) -> dict[str, object]:
    return {
        "name": method.name,
        "rule": str(method.rule),
        "plans": [plan_fields(plan) for plan in method.plans],
        "ties": getattr(method.rule, "ties", "closest"),
        "required": sorted(method.required - ALWAYS_THERE),
        "whole_vocabulary": method.whole_vocabulary,
        "is_guarded": method.is_guarded,
        "temperature": method.temperature,
        "seed": method.seed,
        "draws_drafts": method.draws,
        "multi_level": method.option("multi_level", False),
        "patch_share": method.option("patch_share", 1.0),
        "loop": getattr(method.rule, "loop", "lean"),
    }


def test_presets_are_what_they_were_field_by_field() -> None:
    """The file was written when every preset was a value in code."""
    known = json.loads((ROOT / "tests" / "golden" / "methods.json").read_text())
    assert [method_fields(find_method(name)) for name in presets()] == known


def test_a_preset_is_what_its_text_says() -> None:
    for name, text in presets().items():
        if text:
            written, named = (method_fields(find_method(one)) for one in (text, name))
            assert written | {"name": name} == named


def test_methods_are_named_and_checked_without_torch() -> None:
    code = (
        "import sys\n"
        "from deft_policies.decoding.methods import find_method, presets\n"
        "import deft_policies.families.options\n"
        "for name in presets(): find_method(name).described()\n"
        "find_method('fly:theta=0.2,drafts=previous+head,tree=template+4+4')\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_default_of_flags_is_the_default_method() -> None:
    assert ModelOptions().decoding == DEFAULT_METHOD == "lossless"
