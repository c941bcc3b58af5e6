"""From recorded lines to a page and its plots; and whether they still say the same.

The same lines give the same bytes. A page of prose quotes by a block, which begins with
`<!-- from DIR#STUDY/TABLE -->` (or `DIR#facts`, `DIR#legend`, `DIR#choices`; of an evaluation's
runs, packed or not, `PATH#runs`, `PATH#beside/RUN`, `PATH#tasks`, `PATH#times`) and ends with
`<!-- end -->`; its content is made from the lines in DIR, a path beside the page. A page says once
what a column means: under the first table that says it, and `DIR#legend` has the columns of the
page's tables.
"""

import difflib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from deft_core.files import write_atomically
from deft_core.measures.table import markdown_table, without_empty
from deft_libero.report.difference import conclusion
from deft_libero.results.records import TrialKey
from deft_libero.results.store import RunResults, load_runs, pack_runs, unpack_runs, weights_of
from scripts.reproduce import played, record
from scripts.reproduce.choices import FILE as CHOICES
from scripts.reproduce.choices import choices_table
from scripts.reproduce.measures import (
    MARGIN,
    RowResults,
    answers_of,
    cell_of,
    find_measure,
    heading_of,
    legend_of,
)
from scripts.reproduce.plots import line_plot
from scripts.reproduce.runs import table_of
from scripts.reproduce.study import (
    PLAIN,
    SUFFIX,
    ReproductionError,
    Row,
    Study,
    Table,
    load_study,
)

PAGE, FACTS, STUDIES, STRIP = "page.md", "environment.json", "studies", "plots/frames.png"
PACKED = ".jsonl.gz"
LEGEND = "legend"
_KINDS = (record.FRAMES, record.TIMED, played.FOLDER)
_FRAMES = "On recorded frames, by fixed plans:"
_EPISODES_AND_FRAMES = "In episodes, and on recorded frames, by fixed plans:"
_TIMED = "On the frames that were timed, as served:"
_SERVED_PASSES = "served-passes"
_PLAIN_NAMES = {PLAIN: "plain"}  # what sentences call a baseline
_BLOCK = re.compile(r"(<!-- from ([^#\s]+)#(\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_OF_A_GPU = re.compile(r"<!-- gpu .*?<!-- end of gpu -->", re.DOTALL)  # scripts.bench.gpu.page
_START = "<!-- from "
_CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)
_MEASURED = re.compile(r"\d+\.\d+|\d+\s?%|\d+\s?(ms|mm|s|points|times|of \d+)\b")
_OF_EPISODES = re.compile(r"\d+(\.\d+)?\s?(%|ms|points|times|passes|of \d+)(?!\w)")


@dataclass(frozen=True, eq=False)
class ResultsFolder:
    """What a study left in a folder: lines, the studies as they were, the environment."""

    folder: Path
    _known: dict[tuple[Row, Row | None], RowResults] = field(default_factory=dict, init=False)
    _rows: dict[Table, list[RowResults]] = field(default_factory=dict, init=False)

    @cached_property
    def facts(self) -> Mapping[str, Mapping[str, str]]:
        """`environment`, and `left_out`: rows that this policy cannot answer, and why."""
        try:
            found: Mapping[str, Mapping[str, str]] = json.loads((self.folder / FACTS).read_text())
        except (OSError, ValueError) as error:
            raise ReproductionError(
                f"{self.folder} holds no results of `python -m scripts.reproduce`: {error}"
            ) from error
        return found

    @cached_property
    def studies(self) -> Mapping[str, Study]:
        """By name, as they were when the lines were recorded."""
        paths = sorted((self.folder / STUDIES).glob(f"*{SUFFIX}"))
        return {path.stem: load_study(path) for path in paths}

    @cached_property
    def _runs(self) -> Mapping[str, Mapping[str, RunResults]]:
        """By kind and then by row; those played by method. All must be of the same weights."""
        found: dict[str, dict[str, RunResults]] = {kind: {} for kind in _KINDS}
        for kind in _KINDS:
            for path in (self.folder / f"{kind}{PACKED}", self.folder / kind):
                for run in load_runs(path) if path.exists() else ():
                    is_played = kind == played.FOLDER
                    name = run.header.options["decoding"] if is_played else run.folder.name
                    if run.records:
                        found[kind][name] = run
        weights_of(run for runs in found.values() for run in runs.values())
        return found

    @property
    def weights(self) -> str:
        """Of all lines, as far as they say."""
        return weights_of(run for runs in self._runs.values() for run in runs.values())

    @property
    def episodes(self) -> str:
        """Which were played in closed loop, and on which assets."""
        runs = self._runs[played.FOLDER].values()
        counts = sorted({len(run.records) for run in runs})
        places = sorted({f"{run.header.suite}, assets {run.header.assets}" for run in runs})
        return f"{' or '.join(map(str, counts))} a row of {'; '.join(places)}" if counts else "none"

    def rows_of(self, table: Table) -> list[RowResults]:
        """The rows that have lines; of frames only those with all that the baseline answered."""
        if table not in self._rows:
            self._rows[table] = self._found(table)
        return self._rows[table]

    def _found(self, table: Table) -> list[RowResults]:
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
        return _on_same_starts(rows) if has_columns and any(one.plain for one in rows) else []

    def _results(self, row: Row, plain: RowResults | None) -> RowResults:
        key = row, plain.row if plain else None
        if key not in self._known:  # many tables have the same rows
            base = plain or RowResults(row)
            is_base = not row.flags and row.batch == 1 and row.is_method
            self._known[key] = RowResults(
                row,
                _whole(self._runs[record.FRAMES].get(row.slug), base.replayed),
                _whole(self._runs[record.TIMED].get(row.slug), base.timed),
                self._runs[played.FOLDER].get(row.method) if is_base else None,
                plain,
            )
        return self._known[key]

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

    def table_text(self, study: str, key: str) -> str:
        """A table as a page has it, below its title."""
        table = self.table(study, key)
        return f"## {table.title}\n\n{_table(self, table)}"


def _whole(run: RunResults | None, plain: RunResults | None) -> RunResults | None:
    """The run where it has all that the baseline has."""
    return run if run is not None and _keys(plain) <= _keys(run) else None


def _keys(run: RunResults | None) -> set[TrialKey]:
    return set() if run is None else {record.key for record in run.records}


def _on_same_starts(rows: Sequence[RowResults]) -> list[RowResults]:
    """Rows with the played starts that baseline and the row with most starts share.

    A row that lacks some of them keeps what it has, says so and is not compared.
    """
    base = next((one.baseline for one in rows), None)
    known = _keys(base.played) if base else set()
    shared = max((_keys(one.played) & known for one in rows if one.plain), key=len, default=known)
    if not shared:
        return list(rows)

    def cut(one: RowResults, plain: RowResults | None) -> RowResults:
        if one.played is None:
            return replace(one, plain=plain)
        kept = tuple(found for found in one.played.records if found.key in shared)
        few = "" if len(kept) == len(shared) else f", on {len(kept)} of {len(shared)} starts"
        run = replace(one.played, records=kept) if kept else None
        return replace(one, played=run, plain=plain, few=few)

    bases = {id(one.plain): cut(one.plain, None) for one in rows if one.plain}
    return [cut(one, bases[id(one.plain)] if one.plain else None) for one in rows]


def outputs(results: ResultsFolder) -> dict[str, str]:
    """Everything that is derived, by its path below the folder."""
    found = {PAGE: "\n\n".join(_page(results)) + "\n"}
    for name, study in results.studies.items():
        for table in study.table:
            rows = results.rows_of(table)
            if rows and table.plot_x:
                found[f"plots/{name}-{table.key}.svg"] = _plot(table, rows)
    return found


def _page(results: ResultsFolder) -> Iterator[str]:
    names = list(results.studies)
    yield f"# {', '.join(study.title for study in results.studies.values())}"
    yield (
        f"Written by `python -m scripts.reproduce {' '.join(names)}` from the lines beside it; "
        "`python -m scripts.reproduce --check` derives every number again."
    )
    yield _facts(results)
    if (results.folder / CHOICES).exists():
        yield "## How sure the target is"
        yield choices_table(results.folder)
    for name, study in results.studies.items():
        yield f"## {study.title}"
        yield study.about.strip()
        for table in study.table:
            if results.rows_of(table):
                yield f"### {table.title}"
                yield _table(results, table)
                if table.plot_x:
                    yield f"![{table.title}](plots/{name}-{table.key}.svg)"
                if table.shows_steps and (results.folder / STRIP).is_file():
                    yield f"![Frames of that episode, evenly spaced]({STRIP})"
    yield "## What the columns say"
    yield _legend(results)


def _facts(results: ResultsFolder) -> str:
    """Which policy, which frames, which machine."""
    told = {"episodes": results.episodes, "weights": results.weights}
    facts = {**results.facts["environment"], **told}
    left_out = sorted(results.facts["left_out"].items())
    lines = [markdown_table(("", ""), list(facts.items())).rstrip(), *([""] if left_out else [])]
    return "\n".join([*lines, *(f"Left out: `{row}`: {why}." for row, why in left_out)])


def _legend(results: ResultsFolder) -> str:
    names = (
        name
        for study in results.studies.values()
        for table in study.table
        if results.rows_of(table)
        for name in table.measures
    )
    return "\n".join(f"- **{heading}**: {meaning}." for heading, meaning in legend_of(names))


def _table(results: ResultsFolder, table: Table) -> str:
    """A table with its note, what may be concluded from it, and what was published."""
    rows = results.rows_of(table)
    timed = [name for name in table.measures if find_measure(name)[0].is_time]
    others = [name for name in table.measures if name not in timed]
    notes = [*_conclusions(rows)] if "points" in table.measures else []
    if timed:
        notes += _said_of_times(rows)
    parts = [*_tables(rows, others, timed), table.note.strip()]
    parts.append("\n".join(f"- {one}" for one in notes))
    if table.published is not None:
        parts.append(f"Published ({table.published.where}). {table.published.differs.strip()}")
        parts.append(markdown_table(table.published.columns, table.published.rows).rstrip())
    return "\n\n".join(part for part in parts if part)


def _tables(
    rows: Sequence[RowResults], others: Sequence[str], timed: Sequence[str]
) -> Iterator[str]:
    """The columns of each experiment in a table of its own: a row holds no two of them."""
    frames = _columns(rows, others)
    if frames and timed:
        timed = [*dict.fromkeys([_SERVED_PASSES, *timed])]
    times = _columns([one for one in rows if one.timed], timed)
    if frames and times:
        has_episodes = "success" in others and any(one.played for one in rows)
        yield _EPISODES_AND_FRAMES if has_episodes else _FRAMES
    yield frames
    if frames and times:
        yield _TIMED
    yield times


def _columns(rows: Sequence[RowResults], measures: Sequence[str]) -> str:
    """Rows with the measures that any of them has; empty where none has one."""
    cells = [[one.row.name, *(cell_of(name, one)[0] for name in measures)] for one in rows]
    columns, cells = without_empty(["", *map(heading_of, measures)], cells)
    return markdown_table(columns, cells).rstrip() if len(columns) > 1 else ""


def _said_of_times(rows: Sequence[RowResults]) -> Iterator[str]:
    """Which frames were timed, and for which rows no speed-up is reported."""
    timed = next((one.timed for one in rows if one.timed is not None), None)
    if timed is None:
        return
    worked = sum(one.worked_s for one in timed.records)
    spent = sum(one.timings.round_trip_ms for one in answers_of(timed)) / 1000
    share = f"; the first row's thread had {worked / spent:.0%} of a core" if worked else ""
    yield f"Times are of {timed.header.assets}; methods alternated frame by frame{share}."
    doubts: dict[tuple[str, ...], list[str]] = {}
    for one in rows:
        if one.speedup is not None and one.speedup.doubts:
            doubts.setdefault(one.speedup.doubts, []).append(one.row.name)
    for why, names in doubts.items():
        yield f"No speed-up is reported for {', '.join(names)}: {'; '.join(why)}."


def _conclusions(rows: Sequence[RowResults]) -> Iterator[str]:
    """What may be said of every row beside the baseline, and which is the cheapest of the good."""
    good = [one for one in rows if one.plain is None and one.played is not None]
    for one in rows:
        if one.played_apart is not None:
            yield conclusion(one.played_apart)
            good += [one] if one.played_apart.is_not_worse else []
    counted = [(cell_of("played-passes", one)[1], one.row.name) for one in good]
    fewest = min((pair for pair in counted if pair[0] is not None), default=None)
    if len(good) > 1 and fewest is not None:
        yield (
            f"Of the rows for which a loss of {100 * MARGIN:g} points is ruled out, {fewest[1]} "
            f"has the fewest passes: {fewest[0]:.2f}."
        )


def _plot(table: Table, rows: Sequence[RowResults]) -> str:
    if table.shows_steps:
        lanes = [(one.row.name, _passes_by_step(one)) for one in rows]
        return line_plot(table.title, "step of the first episode", "passes", lanes, apart=True)
    lines = []
    for name in table.plot:
        points = [
            (one.row.x, value)
            for one in rows
            if one.row.x is not None and (value := cell_of(name, one)[1]) is not None
        ]
        lines.append((heading_of(name), points))
    headings = [name for name, points in lines if points]
    return line_plot(table.title, table.plot_x, " / ".join(headings), lines)


def _passes_by_step(one: RowResults) -> list[tuple[float, float]]:
    """Of the first episode that was replayed."""
    if one.replayed is None or not one.replayed.records:
        return []
    answers = one.replayed.records[0].answers
    return [(float(answer.asked_step), float(len(answer.accepted))) for answer in answers]


def pack(folder: Path) -> None:
    """Put the lines of all rows into one file for each kind, as the repository keeps them.

    The runs of an evaluation, which has no rows, into one file beside its folder.
    """
    if not (folder / FACTS).exists():
        pack_runs(folder.with_name(folder.name + PACKED), load_runs(folder))
        return
    unpack(folder)
    for kind in _KINDS:
        if (folder / kind).is_dir():
            pack_runs(folder / f"{kind}{PACKED}", load_runs(folder / kind))
            shutil.rmtree(folder / kind)


def unpack(folder: Path) -> None:
    """Give packed rows their folders again, so that they can go on."""
    for kind in _KINDS:
        packed = folder / f"{kind}{PACKED}"
        if packed.exists():
            unpack_runs(packed, folder / kind)
            packed.unlink()


def check(path: Path) -> list[str]:
    """What is not as the lines say of a page, of results, or of a folder of results and the pages
    around it that quote them; empty where all is."""
    if not path.exists():
        raise ReproductionError(f"{path}: no such page or results folder")
    if path.is_file():
        text = path.read_text("utf-8")
        quoted = _differences(path.name, text, fill(text, path.parent))
        # Pages that are no results have other numbers, too: sizes, versions, limits.
        is_results = path.name == "results.md" or path.resolve().parent.name == "results"
        measured = _MEASURED if is_results else _OF_EPISODES
        return [*quoted, *_loose_numbers(path.name, text, measured)]
    inside = _folders_in(path)
    if not inside:
        return list(_check_folder(ResultsFolder(path)))
    pages = quoting_pages(path)
    found = [f"{one.name}: {note}" for one in inside for note in _check_folder(ResultsFolder(one))]
    return found + [note for page in pages for note in check(page)]


def _folders_in(path: Path) -> list[Path]:
    """The folders of results in a folder that is none itself."""
    is_results = (path / FACTS).exists()
    return [] if is_results else sorted(one.parent for one in path.glob(f"*/{FACTS}"))


def quoting_pages(results: Path) -> list[Path]:
    """Pages of the repository around a folder of results that quote lines."""
    root = results.resolve().parents[1]
    folder = results.resolve()
    pages = [*root.glob("*.md"), *folder.parent.glob("*.md"), *folder.glob("*.md")]
    pages += root.glob("policies/*/*/*.md")
    return sorted(page for page in pages if _START in _CODE.sub("", page.read_text("utf-8")))


def write(path: Path) -> None:
    """Bring a results folder's derived files, or a page's blocks, up to date with the lines.

    Of a folder of results: all of them, and the pages around it that quote them.
    """
    if inside := _folders_in(path):
        for one in (*inside, *quoting_pages(path)):
            write(one)
        return
    if path.is_dir():
        for name, content in outputs(ResultsFolder(path)).items():
            (path / name).parent.mkdir(exist_ok=True)
            write_atomically(path / name, content.encode())
        return
    write_atomically(path, fill(path.read_text("utf-8"), path.parent).encode())


def fill(text: str, folder: Path) -> str:
    """A page with its blocks made anew from the lines."""
    whole = [found[0].count(_START) for found in _BLOCK.finditer(text)]
    if whole != [1] * text.count(_START):
        raise ReproductionError(
            "a block that begins with `<!-- from DIR#STUDY/TABLE -->` on a line of its own, and no "
            "other block in it, must end with `<!-- end -->`"
        )
    known = {found[2]: ResultsFolder(folder / found[2]) for found in _BLOCK.finditer(text)}
    headings: set[str] = set()
    explained: set[str] = set()

    def made(found: re.Match[str]) -> str:
        lines = _block(known[found[2]], found[3]).splitlines()
        if found[3] == LEGEND:
            return _joined(found, lines)
        headings.update(_columns_of(lines))
        kept = [line for line in lines if line not in explained]
        explained.update(line for line in lines if _explained(line) in headings)
        return _joined(found, kept)

    def with_legend(found: re.Match[str]) -> str:
        if found[3] != LEGEND:
            return found[0]
        wanted = headings - {*map(_explained, explained)}
        return _joined(
            found, [line for line in found[4].splitlines() if _explained(line) in wanted]
        )

    return _BLOCK.sub(with_legend, _BLOCK.sub(made, text))


def _joined(block: re.Match[str], lines: Sequence[str]) -> str:
    return "\n".join([block[1].rstrip("\n"), *lines, block[5]])


def _columns_of(lines: Sequence[str]) -> Iterator[str]:
    """The headings of all tables."""
    for row, below in pairwise(lines):
        if re.fullmatch(r"\|[ |:-]+\|", below):
            yield from filter(None, map(str.strip, row.strip("|").split("|")))


def _explained(line: str) -> str:
    """The column that a line of a legend explains; empty where it is none."""
    found = re.match(r"- (?:\*\*)?(.+?)(?:\*\*)?: ", line)
    return found[1] if found else ""


def _block(results: ResultsFolder, key: str) -> str:
    if not (results.folder / FACTS).exists():
        return table_of(results.folder, key)
    if key == "facts":
        return _facts(results)
    if key == LEGEND:
        return _legend(results)
    if key == "choices":
        return choices_table(results.folder)
    study, _, table = key.partition("/")
    return _table(results, results.table(study, table))


def _check_folder(results: ResultsFolder) -> Iterator[str]:
    for name, content in outputs(results).items():
        path = results.folder / name
        if not path.is_file():
            yield f"{name} is missing; `--write {results.folder}` makes it"
        else:
            yield from _differences(name, path.read_text("utf-8"), content)


def _differences(name: str, there: str, derived: str) -> Iterator[str]:
    """Line by line: - what stands there, + what the lines say."""
    if there != derived:
        lines = difflib.unified_diff(there.splitlines(), derived.splitlines(), name, "lines", n=0)
        yield from (line.rstrip("\n") for line in lines)


def _loose_numbers(name: str, text: str, measured: re.Pattern[str]) -> Iterator[str]:
    """Numbers that look measured and are in no block."""
    rest = text
    for known in (_BLOCK, _OF_A_GPU, _CODE):
        rest = known.sub(_blank, rest)
    for number, line in enumerate(rest.splitlines(), 1):
        for found in measured.finditer(line):
            yield f"{name} line {number}: {found[0]!r} stands in no block"


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])
