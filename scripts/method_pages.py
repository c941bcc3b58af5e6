"""Write docs/methods and the tables of docs/decoding.md and docs/guard.md from the methods' files.

python -m scripts.method_pages          write them
python -m scripts.method_pages --check  say which are not current
"""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType

from deft_policies.decoding.acceptance.rule import AcceptanceRule
from deft_policies.decoding.methods import AUTOREGRESSIVE, find_method
from deft_policies.decoding.plan import (
    ACTION_PLANS,
    NUMBER_PLANS,
    PLAIN,
    PLANS,
    TEXT_PLANS,
    Plan,
    TreeShape,
)
from deft_policies.decoding.plugins import method_files
from deft_policies.errors import RequestError

ROOT = Path(__file__).parents[1]
_ANY_RADIUS = 3  # bins: no rule's default
FOLDER, PAGE = ROOT / "docs" / "methods", ROOT / "docs" / "decoding.md"
GUARD = ROOT / "docs" / "guard.md"


def pages() -> dict[Path, str]:
    """Every page as it should be, by path; those written by hand with their tables."""
    modules = {name: one for name, one in method_files().items() if isinstance(one, ModuleType)}
    found = {FOLDER / f"{name}.md": page_of(name, one) for name, one in modules.items()}
    text = PAGE.read_text(encoding="utf-8")
    text = _replaced(text, "methods", table_of_methods(modules))
    found[PAGE] = _replaced(text, "rules", table_of_rules(modules))
    found[GUARD] = _replaced(GUARD.read_text(encoding="utf-8"), "plans", table_of_plans())
    return found


def _replaced(text: str, name: str, table: str) -> str:
    """A page with a table between its marks."""
    before, rest = text.split(f"<!-- {name}, from policies/deft_policies/methods -->\n")
    _, behind = rest.split("<!-- end -->", 1)
    return (
        f"{before}<!-- {name}, from policies/deft_policies/methods -->\n{table}<!-- end -->{behind}"
    )


def summary_of(module: ModuleType) -> tuple[str, str]:
    """What a file calls its idea, and the idea in a sentence."""
    first = (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    title, _, idea = first.partition(": ")
    return title, idea.rstrip(".")


def page_of(name: str, module: ModuleType) -> str:
    """The words of a file, then its tables."""
    title, idea = summary_of(module)
    words = (module.__doc__ or "").strip().split("\n\n")[1:]
    parts = [f"# {title}", f"{idea[0].upper()}{idea[1:]}.", *map(_paragraph, words)]
    methods: Mapping[str, str] = getattr(module, "METHODS", {})
    if methods:
        lines = [f"`{key}` | `{text}`" for key, text in methods.items()]
        parts.append("\n".join(["method | as text", "---|---", *lines]))
    rules: Mapping[str, type[AcceptanceRule]] = getattr(module, "RULES", {})
    for key, rule in rules.items():
        parts.append(_describe_rule(key, rule))
    plans: Mapping[str, tuple[Plan, ...]] = getattr(module, "PLANS", {})
    for key, some in plans.items():
        lines = [f"- {_describe_plan(plan)}" for plan in some]
        first = f"`plans={key}`" + (", the first whose sources are there" if len(some) > 1 else "")
        parts.append("\n".join([f"{first}:", "", *lines]))
    if options := getattr(module, "OPTIONS", {}):
        knobs = ", ".join(f"`{one}`" for one in options)
        parts.append(
            f"Its sources also read {knobs}: see [methods as text](../decoding.md#methods-as-text)."
        )
    path = f"policies/deft_policies/methods/{name}.py"
    parts.append(f"*Written by `python -m scripts.method_pages` from [{name}.py](../../{path}).*")
    return "\n\n".join(parts) + "\n"


def table_of_methods(modules: Mapping[str, ModuleType]) -> str:
    """Names, rules, plans and ideas, a line for each file."""
    lines = ["name | rule | drafts by | what it is", "---|---|---|---"]
    lines.append(f"`{AUTOREGRESSIVE}` | exact | nothing | plain decoding, one token a pass")
    for name, module in modules.items():
        methods: Mapping[str, str] = getattr(module, "METHODS", {})
        if not methods:
            continue
        method = find_method(next(iter(methods)))
        names = ", ".join(f"`{one}`" for one in methods)
        rule = "exact" if method.rule.is_exact else f"`{_rule_name(method.rule, modules)}`"
        plans = _named_plans(method.plans, getattr(module, "PLANS", {}))
        title, idea = summary_of(module)
        lines.append(f"{names} | {rule} | `plans={plans}` | [{title}](methods/{name}.md): {idea}")
    return "\n" + "\n".join(lines) + "\n\n"


def table_of_rules(modules: Mapping[str, ModuleType]) -> str:
    """Every rule with its fields and their defaults."""
    lines = ["`rule=` | of | fields and defaults; * is what `radius` sets", "---|---|---"]
    for name, module in modules.items():
        for key, rule in getattr(module, "RULES", {}).items():
            title, _ = summary_of(module)
            given = ", ".join(_fields_of(rule)) or "none"
            lines.append(f"`{key}` | [{title}](methods/{name}.md) | {given}")
    return "\n" + "\n".join(lines) + "\n\n"


def table_of_plans() -> str:
    """What the plans that no method brings guess, and when."""
    lines = ["| plan | what is guessed when |", "|---|---|"]
    plans = (PLAIN, *ACTION_PLANS, *TEXT_PLANS, *NUMBER_PLANS)
    lines += [f"| `{one.name}` | {one.meaning} |" for one in plans]
    return "\n" + "\n".join(lines) + "\n\n"


def _paragraph(text: str) -> str:
    if text.startswith("    "):
        return f"```\n{re.sub('^    ', '', text, flags=re.M)}\n```"
    return _linked(text)


def _linked(text: str) -> str:
    """Links in place of pages of docs, and of their sections: `docs/a.md, "One" and "Two"`."""

    def sections(found: re.Match[str]) -> str:
        page, quoted = found[1], found[2]
        return re.sub(r'"([^"]+)"', lambda one: _section(page, one[1]), quoted)

    text = re.sub(r'docs/([\w/-]+\.md),\s+((?:"[^"]+"(?:\s+and\s+)?)+)', sections, text)
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1.md](../\1.md)", text)


def _section(page: str, words: str) -> str:
    heading = " ".join(words.split())
    slug = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    return f"[{heading}](../{page}#{slug})"


def _fields_of(rule: type[AcceptanceRule]) -> list[str]:
    made, found = rule(), []
    try:
        other = made.with_radius(_ANY_RADIUS)
    except RequestError:  # it has none
        other = made
    names: list[str] = [one.name for one in fields(made)] if is_dataclass(made) else []
    for name in names:
        value = getattr(made, name)
        star = "*" if getattr(other, name) != value else ""
        if isinstance(value, AcceptanceRule):
            found.append(f"`{name}`{star} a rule")
        else:
            shown = {None: "none", True: "on", False: "off"}.get(value, value)  # 0 and 1 are ints
            if type(value) in (int, float):
                shown = f"{value:g}"
            found.append(f"`{name}`{star} {shown}")
    return found


def _describe_rule(key: str, rule: type[AcceptanceRule]) -> str:
    given = _fields_of(rule)
    return f"`rule={key}`" + (f", with {', '.join(given)}." if given else ".")


def _describe_plan(plan: Plan) -> str:
    before, later = ("+".join(some) or "nothing" for some in (plan.prefill, plan.rounds))
    shape = "" if plan.shape == TreeShape() else f", trees: {_describe_shape(plan.shape)}"
    return f"`{plan.name}`: {before} in the prefill, {later} in later passes{shape}"


def _describe_shape(shape: TreeShape) -> str:
    if shape == TreeShape.eagle():
        return "`eagle`"
    if shape.top_k == 1:
        return f"`chain:{shape.levels}`"
    depth = ", all levels in every round" if shape.is_full_depth else ""
    return f"`dynamic:{shape.levels},{shape.top_k},{shape.num_guesses}`{depth}"


def _rule_name(rule: AcceptanceRule, modules: Mapping[str, ModuleType]) -> str:
    known: dict[str, type[AcceptanceRule]] = {}
    for module in modules.values():
        known |= getattr(module, "RULES", {})
    return next(key for key, one in known.items() if type(rule) is one)


def _named_plans(plans: tuple[Plan, ...], own: Mapping[str, tuple[Plan, ...]]) -> str:
    return next(key for key, some in (*own.items(), *PLANS.items()) if some == plans)


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is old")
    given = parser.parse_args()
    wanted = pages()
    known = {path: path.read_text(encoding="utf-8") for path in wanted if path.exists()}
    left_over = set(FOLDER.glob("*.md")) - wanted.keys()
    old = [path for path, text in wanted.items() if known.get(path) != text]
    for path in [*old, *sorted(left_over)]:
        print(path.relative_to(ROOT))
    if given.check:
        sys.exit(bool(old or left_over))
    FOLDER.mkdir(exist_ok=True)
    for path in old:
        path.write_text(wanted[path], encoding="utf-8")
    for path in left_over:
        path.unlink()


if __name__ == "__main__":
    main()
