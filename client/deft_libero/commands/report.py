"""`deft-client report RESULTS...`: one self-contained HTML page, a markdown table and a CSV."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from deft_client.commands.connection import reported
from deft_core.program import CommandParser
from deft_libero.errors import EvaluationError, SelectionError
from deft_libero.report.page import View, build_page, build_views
from deft_libero.report.picture import find_races, write_picture
from deft_libero.report.speed import baseline_of
from deft_libero.report.tables import episodes_csv, markdown_tables, notes_of, terminal_table
from deft_libero.results.records import Outcome, TrialKey
from deft_libero.results.store import RunResults, load_runs

_SOLVED = {Outcome.SUCCEEDED}
_BESIDE = (".md", ".csv")  # the page: the same numbers as text


def main(arguments: list[str]) -> int:
    """Write the report; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.out.suffix in _BESIDE:
        parser.error(
            f"--out is the page, got {options.out}; {' and '.join(_BESIDE)} are written beside it"
        )
    return reported(lambda: _report(options), "report")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("deft-client report", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS",
        help="folders that `deft-client eval` wrote: runs, or folders of runs",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE",
        help="the page; FILE.md and FILE.csv are written beside it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--episode", metavar="SUITE:TASK:TRIAL",
        help="whose actions to draw (default: the first that went differently)",
    )  # fmt: skip
    parser.add_argument(
        "--picture", type=Path, metavar="FILE",
        help="also the quickest run beside its baseline as an animation, .webp or .gif: the filmed "
        "trial whose lead is the median",
    )  # fmt: skip
    return parser


def _report(options: argparse.Namespace) -> int:
    runs = [run for path in options.results for run in load_runs(path)]
    try:
        views = write_report(runs, options.out, options.episode)
        if options.picture is not None:
            _write_picture(options.picture, views)
    except OSError as error:
        raise EvaluationError(f"cannot write the report: {error}") from error
    sys.stdout.write(terminal_table([view.summary for view in views]))
    sys.stdout.writelines(_speed_lines(views))
    names = ", ".join(str(options.out.with_suffix(one)) for one in (options.out.suffix, *_BESIDE))
    sys.stdout.write(f"wrote {names}\n")
    return 0


def write_report(runs: Sequence[RunResults], out: Path, episode: str | None = None) -> list[View]:
    """Write the page and the files beside it, make the folder; return what the page shows."""
    key = _episode(episode, runs) if episode else None
    out.parent.mkdir(parents=True, exist_ok=True)
    views = build_views(runs, out.parent)
    compared = [view.comparison for view in views if view.comparison]
    notes = notes_of([view.run for view in views], [view.name for view in views])
    notes += [one.strip() for one in _speed_lines(views)]
    tables = markdown_tables([view.summary for view in views], compared, notes)
    out.write_text(build_page(views, key), "utf-8")
    for suffix, text in zip(_BESIDE, (tables, episodes_csv(runs)), strict=True):
        out.with_suffix(suffix).write_text(text, "utf-8")
    return views


def _speed_lines(views: Sequence[View]) -> Iterator[str]:
    for view in views:
        if view.speedup is not None and view.comparison is not None:
            sentence = view.speedup.sentence(view.name, view.comparison.first)
            yield f"{sentence} {view.comparison.sentences}\n"


def _write_picture(path: Path, views: Sequence[View]) -> None:
    """The quickest run beside its baseline, on the filmed trial whose lead is the median."""
    runs, name_of = [one.run for one in views], {id(one.run): one.name for one in views}
    times = {id(one.run): one.speedup.times for one in views if one.speedup}
    quickest = max(runs, key=lambda run: times.get(id(run), 0.0))
    baseline = baseline_of(quickest, runs)
    races = find_races([baseline, quickest]) if baseline else {}
    pairs = [racers for racers in races.values() if len(racers) == 2]
    if not pairs:
        raise SelectionError(
            "--picture takes two runs of one trial with --video all; there are none"
        )
    solved = [one for one in pairs if {racer.record.outcome for racer in one} == _SOLVED]
    leads = sorted(solved or pairs, key=lambda pair: pair[0].seconds / pair[1].seconds)
    both = leads[(len(leads) - 1) // 2]
    write_picture(path, both, [name_of[id(racer.run)] for racer in both])


def _episode(text: str, runs: Sequence[RunResults]) -> TrialKey:
    suite, _, numbers = text.partition(":")
    task, _, trial = numbers.partition(":")
    if not (task.isdecimal() and trial.isdecimal()):
        raise SelectionError(f"--episode takes SUITE:TASK:TRIAL, got {text!r}")
    key = TrialKey(suite, int(task), int(trial))
    if not any(record.key == key for run in runs for record in run.records):
        raise SelectionError(f"--episode {text}: no run has that episode")
    return key
