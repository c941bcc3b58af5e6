"""From recorded lines to a page, its sheets and its plots. The same lines give the same bytes."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from deft_client.libero.report.difference import conclusion
from deft_client.libero.report.tables import markdown_table
from deft_client.libero.results.records import TrialKey
from deft_client.libero.results.store import RunResults, load_runs
from deft_server.reproduce import played, replays
from deft_server.reproduce.measures import (
    MARGIN,
    NOTHING,
    RowResults,
    cell_of,
    find_measure,
    heading_of,
)
from deft_server.reproduce.plots import line_plot
from deft_server.reproduce.study import (
    PLAIN,
    SUFFIX,
    ReproductionError,
    Row,
    Study,
    Table,
    load_study,
)

PAGE, FACTS, STUDIES, STRIP = "page.md", "environment.json", "studies", "plots/frames.png"
_STEP = "step"  # the x of a plot over one episode
_PLAIN_NAMES = {PLAIN: "plain"}  # what sentences call a baseline


@dataclass(frozen=True, eq=False)
class ResultsFolder:
    """What `deft reproduce` left in a folder: lines, the studies as they were, the environment."""

    folder: Path
    _known: dict[tuple[Row, Row | None], RowResults] = field(default_factory=dict, init=False)

    @cached_property
    def facts(self) -> Mapping[str, Mapping[str, str]]:
        """`environment`, and `left_out`: rows that this policy cannot answer, and why."""
        try:
            found: Mapping[str, Mapping[str, str]] = json.loads((self.folder / FACTS).read_text())
        except (OSError, ValueError) as error:
            raise ReproductionError(
                f"{self.folder} holds no results of `deft reproduce`: {error}"
            ) from error
        return found

    @cached_property
    def studies(self) -> Mapping[str, Study]:
        """By name, as they were when the lines were recorded."""
        paths = sorted((self.folder / STUDIES).glob(f"*{SUFFIX}"))
        return {path.stem: load_study(path) for path in paths}

    @cached_property
    def _replayed(self) -> Mapping[str, RunResults]:
        return self._by_slug(replays.FOLDER)

    @cached_property
    def _timed(self) -> Mapping[str, RunResults]:
        return self._by_slug(replays.TIMED)

    def _by_slug(self, name: str) -> Mapping[str, RunResults]:
        folder = self.folder / name
        runs = load_runs(folder) if folder.is_dir() else ()
        return {run.folder.name: run for run in runs if run.records}

    @cached_property
    def _played(self) -> Mapping[str, RunResults]:
        return played.load_played(self.folder)

    @property
    def episodes(self) -> str:
        """Which were played in closed loop, and on which assets."""
        runs = self._played.values()
        counts = sorted({len(run.records) for run in runs})
        told = sorted({f"{run.header.suite}, assets {run.header.assets}" for run in runs})
        return f"{' or '.join(map(str, counts))} a row of {'; '.join(told)}" if counts else "none"

    def rows_of(self, table: Table) -> list[RowResults]:
        """The rows that have lines; of frames only those with all that the baseline answered."""
        rows = []
        for row in table.rows:
            # A batch is compared with plain decoding of as many.
            name = _PLAIN_NAMES.get(table.baseline, table.baseline)
            base = self._results(Row(name, table.baseline, batch=row.batch), None)
            found = self._results(row, base if row.slug != base.row.slug else None)
            if any(run is not None for run in (found.replayed, found.timed, found.played)):
                rows.append(found)
        # A baseline with nothing beside it says nothing, and neither do rows without a column.
        has_times = any(one.timed is not None for one in rows)
        has_columns = has_times or not all(find_measure(one)[0].is_time for one in table.measures)
        return rows if has_columns and any(one.plain for one in rows) else []

    def _results(self, row: Row, plain: RowResults | None) -> RowResults:
        key = row, plain.row if plain else None
        if key not in self._known:  # many tables have the same rows
            self._known[key] = self._made(row, plain)
        return self._known[key]

    def _made(self, row: Row, plain: RowResults | None) -> RowResults:
        is_base = not row.flags and row.batch == 1 and row.acceptance is None
        base = plain or RowResults(row)
        return RowResults(
            row,
            _whole(self._replayed.get(row.slug), base.replayed),
            _whole(self._timed.get(row.slug), base.timed),
            self._played.get(row.method) if is_base else None,
            plain,
        )

    def table(self, study: str, key: str) -> Table:
        """One table; `ReproductionError` lists those there are."""
        tables = {
            f"{name}/{one.key}": one for name, found in self.studies.items() for one in found.table
        }
        if f"{study}/{key}" not in tables:
            raise ReproductionError(
                f"{self.folder} has no {study}/{key}; it has {', '.join(tables)}"
            )
        return tables[f"{study}/{key}"]


def _whole(run: RunResults | None, plain: RunResults | None) -> RunResults | None:
    """The run where it has all that the baseline has."""
    return run if run is not None and _keys(plain) <= _keys(run) else None


def _keys(run: RunResults | None) -> set[TrialKey]:
    return set() if run is None else {record.key for record in run.records}


def outputs(results: ResultsFolder) -> dict[str, str]:
    """Everything that is derived, by its path below the folder."""
    found = {PAGE: "\n\n".join(_page(results)) + "\n"}
    for name, study in results.studies.items():
        for table in study.table:
            rows = results.rows_of(table)
            if rows:
                found[f"tables/{name}-{table.key}.csv"] = _sheet(rows, table.measures)
                if table.plot is not None:
                    found[f"plots/{name}-{table.key}.svg"] = _plot(table, rows)
    return found


def _page(results: ResultsFolder) -> Iterator[str]:
    names = list(results.studies)
    yield f"# {', '.join(study.title for study in results.studies.values())}"
    yield (
        f"Written by `deft reproduce {' '.join(names)}` from the lines beside it; "
        "`deft reproduce --check` derives every number again."
    )
    yield render_facts(results)
    for name, study in results.studies.items():
        yield f"## {study.title}"
        yield study.about.strip()
        for table in study.table:
            if results.rows_of(table):
                yield f"### {table.title}"
                yield render_table(results, name, table)
                if table.plot is not None:
                    yield f"![{table.title}](plots/{name}-{table.key}.svg)"
                if table.plot is not None and table.plot.x == _STEP:
                    yield from _strip(results)


def _strip(results: ResultsFolder) -> Iterator[str]:
    if (results.folder / STRIP).is_file():
        yield f"![Frames of that episode, evenly spaced]({STRIP})"


def render_facts(results: ResultsFolder) -> str:
    """Which policy, which frames, which machine."""
    facts = {**results.facts["environment"], "episodes": results.episodes}
    lines = [markdown_table(("", ""), list(facts.items())).rstrip()]
    left_out = results.facts["left_out"]
    if left_out:
        lines.append("")
        lines += [f"Left out: `{row}`: {why}." for row, why in sorted(left_out.items())]
    return "\n".join(lines)


def render_table(results: ResultsFolder, study: str, table: Table) -> str:
    """A table with its note, what may be concluded from it, and what was published."""
    rows = results.rows_of(table)
    measures, cells = _filled(rows, table.measures)
    parts = [
        markdown_table(
            ["", *map(heading_of, measures)],
            [[one.row.name, *line] for one, line in zip(rows, cells, strict=True)],
        ).rstrip()
    ]
    parts.append(table.note.strip())
    if any(find_measure(name)[0].is_time for name in measures):
        parts.append(f"Times are {results.facts['environment'][replays.TIMES]}.")
    parts += (
        ["\n".join(f"- {one}" for one in _conclusions(rows))] if "points" in table.measures else []
    )
    if table.published is not None:
        parts.append(f"Published ({table.published.where}). {table.published.differs.strip()}")
        parts.append(markdown_table(table.published.columns, table.published.rows).rstrip())
    return "\n\n".join(part for part in parts if part)


def _filled(
    rows: Sequence[RowResults], measures: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """The measures that any row has, and their cells by row."""
    cells = {name: [cell_of(name, one).text for one in rows] for name in measures}
    kept = [name for name in measures if set(cells[name]) != {NOTHING}]
    return kept, [[cells[name][index] for name in kept] for index in range(len(rows))]


def _conclusions(rows: Sequence[RowResults]) -> Iterator[str]:
    """What may be said of every row beside the baseline, and which is the cheapest of the good."""
    good = [one for one in rows if one.plain is None and one.played is not None]
    for one in rows:
        if one.played_apart is not None:
            yield conclusion(one.played_apart)
            good += [one] if one.played_apart.is_not_worse else []
    counted = [(cell_of("played-passes", one).value, one.row.name) for one in good]
    fewest = min((pair for pair in counted if pair[0] is not None), default=None)
    if len(good) > 1 and fewest is not None:
        yield (
            f"Of the rows for which a loss of {100 * MARGIN:g} points is ruled out, {fewest[1]} "
            f"has the fewest passes: {fewest[0]:.2f}."
        )


def _sheet(rows: Sequence[RowResults], measures: Sequence[str]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    kept, cells = _filled(rows, measures)
    writer.writerow(["row", "method", "flags", *map(heading_of, kept)])
    for one, line in zip(rows, cells, strict=True):
        writer.writerow([one.row.name, one.row.method, " ".join(one.row.flags), *line])
    return stream.getvalue()


def _plot(table: Table, rows: Sequence[RowResults]) -> str:
    assert table.plot is not None
    if table.plot.x == _STEP:
        lines = [(one.row.name, _passes_by_step(one)) for one in rows]
        return line_plot(f"{table.title}: passes per action", _STEP, lines)
    lines = []
    for name in table.plot.measures:
        points = [
            (one.row.x, value)
            for one in rows
            if one.row.x is not None and (value := cell_of(name, one).value) is not None
        ]
        lines.append((heading_of(name), points))
    return line_plot(table.title, table.plot.x, lines)


def _passes_by_step(one: RowResults) -> list[tuple[float, float]]:
    """Of the first episode that was replayed."""
    if one.replayed is None or not one.replayed.records:
        return []
    answers = one.replayed.records[0].answers
    return [(float(answer.asked_step), float(len(answer.accepted))) for answer in answers]
