"""`deft train record`: a target's features over the episodes of data sets, into shards.

Recording appends: a killed run goes on behind its last whole shard.
"""

from argparse import ArgumentTypeError
from pathlib import Path

from deft_core.datasets.flags import add_camera_flag
from deft_core.program import CommandParser
from deft_draft_training.commands.target import at_least_one, check_datasets, parse_target


def main(arguments: list[str]) -> int:
    """Record; return the exit code."""
    parser = CommandParser(prog="deft train record", description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path, help="data sets (docs/datasets.md)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of shards")
    parser.add_argument(
        "--stride", type=at_least_one, default=1, help="every how many steps (default 1)"
    )
    add_camera_flag(parser)
    parser.add_argument(
        "--batch-size", type=at_least_one, default=8, help="frames at a time (default 8)"
    )
    parser.add_argument("--float32", action="store_true", help="twice the size of bfloat16")
    parser.add_argument(
        "--layers", type=_layers, default=(), metavar="N[,N...]",
        help="for a block head, of any family: record the hidden states behind these layers of "
        "the target, counted from 1, and the final ones",
    )  # fmt: skip
    parser.add_argument(
        "--reasoning", action="store_true", help="with --layers: of answers with reasoning"
    )
    flags = parse_target(parser, arguments)
    if flags.reasoning and not flags.layers:
        parser.error("--reasoning goes with --layers: other heads learn from actions")
    check_datasets(flags.sources)
    from deft_draft_training.heads.record import run  # brings torch along

    return run(flags)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"expected numbers joined by commas, got {text!r}") from None
