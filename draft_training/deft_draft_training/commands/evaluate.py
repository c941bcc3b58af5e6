"""`deft train evaluate`: judges draft heads on held-out episodes, with the production decoder.

Every held-out action is decoded in session order, once per source and radius. A row is printed when
it is done; with --json it is kept, and the same command goes on with the rows that are missing.
"""

import re
from argparse import ArgumentTypeError
from pathlib import Path

from deft_core.datasets.flags import add_camera_flag
from deft_core.program import CommandParser
from deft_draft_training.commands.target import at_least_one, check_datasets, parse_target
from deft_draft_training.errors import DataError

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def main(arguments: list[str]) -> int:
    """Print a table; return the exit code."""
    parser = CommandParser(prog="deft train evaluate", description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path, help="data sets (docs/datasets.md)")
    add_camera_flag(parser)
    parser.add_argument("--head", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument(
        "--radii", type=read_numbers, default="0,5,9",
        help="such as 0,5,9 or 0-15, in this order (default 0,5,9)",
    )  # fmt: skip
    parser.add_argument(
        "--episodes", type=read_numbers, help="numbers of held-out episodes (default: all given)"
    )
    parser.add_argument(
        "--frames", type=at_least_one, metavar="N",
        help="the first frames of each episode, N in all (default: every frame)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep each row there, as a line of JSON"
    )
    flags = parse_target(parser, arguments)
    check_datasets(flags.sources)
    for directory in flags.head:
        if not directory.is_dir():
            raise DataError(f"--head {directory}: no such directory; `deft train fit` writes one")
    if flags.json is not None and not flags.json.absolute().parent.is_dir():
        raise DataError(f"--json {flags.json}: its folder does not exist")
    from deft_draft_training.heads.evaluate import run  # brings torch along

    return run(flags)


def read_numbers(text: str) -> list[int]:
    """`0,3-5` to 0, 3, 4, 5."""
    numbers: list[int] = []
    for part in text.split(","):
        matched = _RANGE.fullmatch(part)
        if matched is None:
            raise ArgumentTypeError(f"expected numbers such as 0,5,9 or 0-15, got {text!r}")
        low, high = matched.groups()
        numbers.extend(range(int(low), int(high or low) + 1))
    return numbers
