"""`deft-client compare A B`: two runs on the same episodes, and what may be concluded from them."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from deft_client.commands.connection import reported
from deft_core.measures.table import markdown_table
from deft_core.program import CommandParser
from deft_libero.errors import SelectionError
from deft_libero.report.difference import MARGIN, Comparison, compare, conclusion
from deft_libero.report.page import short_names
from deft_libero.report.tables import COMPARISON_COLUMNS, comparison_cells
from deft_libero.results.store import RunResults, load_runs, weights_of

_MEASURE_COLUMNS = ("per run", "first", "second", "difference", "95% of the difference")
_DEVIATION_COLUMNS = ("phase", "steps", "mm apart", "95%", "degrees apart", "95%")


def main(arguments: list[str]) -> int:
    """Print the comparison; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not 0 < options.margin < 100:
        parser.error(f"--margin must lie between 0 and 100 points, got {options.margin:g}")
    return reported(lambda: _compare(options), "compare")


def _compare(options: argparse.Namespace) -> int:
    runs = [_only_run(path) for path in (options.first, options.second)]
    weights = weights_of(runs)
    first, second = short_names(runs)
    found = compare(runs[0], runs[1], (first, second), options.margin / 100)
    sys.stdout.write("\n".join([*describe(found), f"Weights: {weights}.\n"]))
    return 0


def describe(found: Comparison) -> Iterator[str]:
    """Tables and sentences, as text that is also Markdown."""
    if found.num_pairs:
        yield markdown_table(COMPARISON_COLUMNS, [comparison_cells(found)])
    yield conclusion(found) + "\n"
    if found.speedup is not None:
        yield found.speedup.sentence(found.second, found.first) + "\n"
    yield markdown_table(
        _MEASURE_COLUMNS,
        [
            (name, f"{first:.2f}", f"{second:.2f}", f"{second - first:+.2f}", f"{interval:+.2f}")
            for name, first, second, interval in found.measures
        ],
    )  # fmt: skip
    yield markdown_table(
        _DEVIATION_COLUMNS,
        [
            (one.phase, str(one.num_steps), f"{one.mm:.2f}", f"{one.mm_interval:.2f}",
             f"{one.deg:.2f}", f"{one.deg_interval:.2f}")
            for one in found.deviations
        ],
    )  # fmt: skip
    yield (
        "Commands are compared step by step. Of frames that were replayed both answers are to the "
        "same picture; in episodes that were played, what an earlier difference led to is in it.\n"
    )


def _only_run(path: Path) -> RunResults:
    runs = load_runs(path)
    if len(runs) > 1:
        names = ", ".join(run.folder.name for run in runs)
        raise SelectionError(f"{path} holds {len(runs)} runs; name one of them: {names}")
    return runs[0]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("deft-client compare", description=__doc__, allow_abbrev=False)
    for name in ("first", "second"):
        parser.add_argument(name, type=Path, help="folder of a run that `deft-client eval` wrote")
    parser.add_argument(
        "--margin", type=float, default=100 * MARGIN, metavar="POINTS",
        help="the loss of success that is to be ruled out (default: %(default)s)",
    )  # fmt: skip
    return parser
