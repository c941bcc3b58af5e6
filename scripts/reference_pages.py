"""What programs say of themselves, as Markdown for the reference pages of the site.

A page asks for it by a mark on a line of its own, `<!-- reference: settings -->`. The site's build
puts the text there (`scripts.docs_site`), so nothing of it is written twice. Needs no torch.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deft_client
from deft_server.app import create_app
from deft_server.settings import Settings

ROOT = Path(__file__).parents[1]
# What the programs said when they were last recorded; tests/black_box compares.
BLACK_BOX = ROOT / "tests" / "golden" / "black_box"
HELPS = BLACK_BOX / "help"
_MARK = re.compile(r"^<!-- reference: (\w[\w -]*) -->$", re.M)


def filled(text: str) -> str:
    """A page with the text of every mark in it; `KeyError` names a mark that there is not."""
    return _MARK.sub(lambda found: REFERENCES[found[1]](), text)


def commands(program: str) -> str:
    """The help of a program and of each of its subcommands."""
    stems = sorted(path.stem for path in HELPS.glob("*.txt"))
    return "\n\n".join(_command(stem) for stem in stems if _program_of(stem) == program)


def _program_of(stem: str) -> str:
    return stem.partition("_")[0]


def _command(stem: str) -> str:
    """The first thing that the file says, without what follows an unknown flag."""
    typed, _, rest = (HELPS / f"{stem}.txt").read_text("utf-8").partition("\n")
    command = typed.removeprefix("$ ").removesuffix(" --help")
    command = re.sub(r"^deft serve (\w+)$", r"deft serve --policy \1", command)
    said = re.split(r"^\$ ", rest.partition("\n")[2], maxsplit=1, flags=re.M)[0].strip()
    return f"{'#' * (2 + (' ' in command))} {command}\n\n```text\n{said}\n```"


def settings() -> str:
    """A row for each setting of the server."""
    rows = [
        (f"`{name}`", f"`--{name.replace('_', '-')}`", _shown(field.default), field.description)
        for name, field in Settings.model_fields.items()
    ]
    return _table(("setting", "flag", "default", "what it is"), rows)


def _shown(default: object) -> str:
    value = getattr(default, "value", default)
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def metrics() -> str:
    """A row for each metric of the server, as Prometheus reads it."""
    app = create_app(_never_loaded, Settings(record=Path("recordings")))
    served: list[str] = json.loads((BLACK_BOX / "metrics.json").read_text("utf-8"))
    rows = []
    for family in app.service.metrics.registry.collect():
        if family.name.startswith("deft_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            known = {label for sample in family.samples for label in sample.labels}
            known |= {*_labels_of(name, served)}
            labels = ", ".join(f"`{one}`" for one in sorted(known - {"le"}))  # bounds of histograms
            rows.append((f"`{name}`", family.type, labels, family.documentation))
    return _table(("metric", "kind", "labels", "what it is"), sorted(rows))


def _labels_of(metric: str, served: list[str]) -> Iterator[str]:
    """Those that a server's page has."""
    for line in served:
        if line.partition("{")[0] == metric:
            yield from re.findall(r'(\w+)="', line)


def python() -> str:
    """Every public name of the client, for mkdocstrings to describe from its docstrings."""
    homes = {name: getattr(deft_client, name).__module__ for name in deft_client.__all__}
    return "\n\n".join(f"::: {home}.{name}" for name, home in homes.items())


def http() -> str:
    """Every address of the server, then the schemas of what is sent and answered."""
    document = create_app(_never_loaded).openapi()
    errors: dict[str, str] = {}
    parts = [_endpoint(*one, errors) for one in _endpoints(document)]
    rows = sorted(errors.items())
    parts += ["## Errors", _table(("status", "when"), rows), "## Schemas"]
    for name, schema in document["components"]["schemas"].items():
        parts.append(f"### {name}\n\n```json\n{json.dumps(schema, indent=2)}\n```")
    return "\n\n".join(parts)


def _never_loaded() -> Any:
    raise AssertionError("a document needs no policy")


def _endpoints(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            yield path, method.upper(), said


def _endpoint(path: str, method: str, said: Mapping[str, Any], errors: dict[str, str]) -> str:
    """One address; what its errors mean is added to `errors`, by status."""
    about = said.get("description") or said.get("summary", "")
    parts = [f"## {method} {path}", about.rstrip(".") + "."]
    if kinds := said.get("requestBody", {}).get("content"):
        parts.append("\n".join(["Body:", "", *_contents(kinds)]))
    answers = dict(said["responses"])
    parts.append("\n".join(["Answer:", "", *_contents(answers.pop("200").get("content", {}))]))
    if answers:
        parts.append(f"Errors: {', '.join(answers)}, each as [Problem](#problem).")
    errors.update({status: one["description"] for status, one in answers.items()})
    return "\n\n".join(parts)


def _contents(kinds: Mapping[str, Any]) -> list[str]:
    """A line for each kind of content, with links to its schemas on the page."""
    lines = []
    for kind, described in kinds.items():
        names = re.findall(r"#/components/schemas/(\w+)", json.dumps(described))
        linked = " or ".join(f"[{name}](#{name.lower()})" for name in names)
        lines.append(f"- `{kind}`" + (f": {linked}" if linked else ""))
    return lines


def _table(headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(str(one).replace("|", "\\|") for one in row) + " |" for row in lines
    )


REFERENCES: Mapping[str, Callable[[], str]] = {
    "deft": lambda: commands("deft"),
    "deft-client": lambda: commands("deft-client"),
    "settings": settings,
    "metrics": metrics,
    "http": http,
    "python": python,
}
