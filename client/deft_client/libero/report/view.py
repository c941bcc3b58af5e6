"""What the sections of a report share: a run with its numbers and its colour, and small HTML."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from deft_client.libero.report.chart import legend
from deft_client.libero.report.summary import RunSummary, summarise
from deft_client.libero.results.store import RunResults

NUM_COLOURS = 6
_NARROW_COLUMNS = 5  # more do not fit a telephone and are scrolled


@dataclass(frozen=True)
class View:
    """A run as the page shows it; `style` is the class of its colour."""

    run: RunResults
    summary: RunSummary
    style: str
    name: str  # without the suite where all runs are of the same one
    link_from: Path  # folder of the page, from which links to videos are relative

    def link(self, video: str) -> str:
        """A relative link to one of the run's videos, or nothing if it is not there."""
        path = self.run.folder / video
        if not video or not path.is_file():
            return ""
        return quote(os.path.relpath(path.resolve(), self.link_from.resolve()))


def build_views(runs: Sequence[RunResults], link_from: Path) -> list[View]:
    """The runs with their numbers; colours repeat after the sixth."""
    names = short_names(runs)
    return [
        View(run, summarise(run), f"run{number % NUM_COLOURS}", names[number], link_from)
        for number, run in enumerate(runs)
    ]


def short_names(runs: Sequence[RunResults]) -> list[str]:
    """What tells the runs apart: their names, without the suite if it is the same for all."""
    names = [run.header.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.header.name} ({run.folder.parent.name})" for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.header.name} ({run.header.run})" for run in runs]
    if len({run.header.suite for run in runs}) > 1:
        return names
    suite = runs[0].header.suite if runs else ""
    return [name.removeprefix(suite).strip() or name for name in names]


def section(title: str, lead: str, body: str) -> str:
    """A part of the page; empty bodies make no section."""
    if not body:
        return ""
    return f'<section><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p>{body}</section>'


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], num_text: int = 1, above: str = ""
) -> str:
    """A table of ready-made HTML cells; all but the first `num_text` columns are numbers.

    `above` is a row over the names of the columns.
    """
    head = "".join(_cell("th", name, index >= num_text) for index, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(_cell("td", cell, i >= num_text) for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    wide = ' class="wide"' if len(columns) > _NARROW_COLUMNS else ""
    return (
        f'<div class="scroll"><table{wide}><thead>{above}<tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def legend_of(views: Sequence[View]) -> str:
    """The colours of the runs; one run alone needs none."""
    return legend([(view.name, view.style) for view in views]) if len(views) > 1 else ""


def _cell(tag: str, content: str, is_number: bool) -> str:
    return f'<{tag} class="n">{content}</{tag}>' if is_number else f"<{tag}>{content}</{tag}>"
