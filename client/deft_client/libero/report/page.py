"""Joins the sections into one page that needs nothing but itself (and the videos it links to)."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

from deft_client.libero.report.page import (
    View,
    action_curves,
    cards,
    choose_episode,
    comparisons,
    latency,
    outcomes,
    section,
    speculation,
    success_by_task,
    table,
    videos,
)
from deft_client.libero.report.tables import Comparison
from deft_client.libero.results.records import TrialKey


def build_page(
    views: Sequence[View], compared: Sequence[Comparison], key: TrialKey | None = None
) -> str:
    """The whole page as HTML. `key` is the episode whose actions are drawn."""
    resources = files("deft_client.libero.report")
    css = resources.joinpath("report.css").read_text("utf-8")
    script = resources.joinpath("report.js").read_text("utf-8")
    body = "".join(
        (
            _header(views),
            cards(views),
            success_by_task(views),
            comparisons(compared),
            latency(views),
            speculation(views),
            action_curves(views, key or choose_episode(views)),
            outcomes(views),
            videos(views),
            _provenance(views),
            _notes(),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_title(views))}</title><style>{css}</style></head>"
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )


def _title(views: Sequence[View]) -> str:
    suites = list(dict.fromkeys(view.run.header.suite for view in views))
    return f"Evaluation on {', '.join(suites)}"


def _header(views: Sequence[View]) -> str:
    num_episodes = sum(len(view.run.records) for view in views)
    days = sorted({view.run.header.created[:10] for view in views})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    told = f"{num_episodes} episodes in {len(views)} run{'s' if len(views) > 1 else ''}, {when}"
    badges = "".join(f"<li>{escape(text)}</li>" for text in _badges(views))
    return (
        f'<header><h1>{escape(_title(views))}</h1><div class="lead">{told}</div>'
        f'<ul class="badges">{badges}</ul></header>'
    )


def _badges(views: Sequence[View]) -> Iterator[str]:
    for assets in dict.fromkeys(view.run.header.assets for view in views):
        yield f"assets: {assets}"
    for policy in dict.fromkeys(_policy(view) for view in views):
        yield f"policy: {policy}"
    if any(view.run.has_torn_line for view in views):
        yield "still being written, or cut short"


def _policy(view: View) -> str:
    header = view.run.header
    if header.server:
        return header.server.get("policy", "unknown")
    chosen = header.options.get("policy", "unknown")
    return f"a server of {header.options.get('profile')}" if chosen == "server" else chosen


def _provenance(views: Sequence[View]) -> str:
    facts = [_facts(view) for view in views]
    rows = []
    for name in dict.fromkeys(name for one in facts for name in one):
        values = [one.get(name, "") for one in facts]
        style = ' class="differs"' if len(set(values)) > 1 else ""
        cells = [f"<span{style}>{escape(value) or '–'}</span>" for value in values]
        rows.append((escape(name), *cells))
    columns = ("", *(escape(view.name) for view in views))
    return section(
        "What was run",
        "Everything that decides what the numbers mean; what differs between runs is in bold.",
        table(columns, rows, num_text=len(columns)),
    )


def _facts(view: View) -> Mapping[str, str]:
    header = view.run.header
    return {
        "run": header.run,
        "started": header.created,
        "suite": header.suite,
        "assets": header.assets,
        **{name.replace("_", " "): value for name, value in header.options.items()},
        **{f"server: {name}": value for name, value in header.server.items()},
        **{f"version of {name}": value for name, value in header.versions.items()},
        **header.notes,
        "folder": str(view.run.folder),
    }


def _notes() -> str:
    return (
        '<p class="note">Errored episodes, in which a tool broke, count neither as success nor as '
        "failure. Latencies are of all answers of the episodes that were played to their end. "
        "Committed length is the number of drafted tokens a pass kept, plus one; relaxed share is "
        "the share of executed tokens that are not the target model's own greedy choice. Success "
        "rates on different assets must not be compared.</p>"
    )
