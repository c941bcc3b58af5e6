"""`deft train fit`: fits a draft head to a target, on one process or several under torchrun.

On one process a killed run resumes to the bit: the same command goes on from what was saved.
"""

from pathlib import Path

from deft_core.datasets.flags import add_camera_flag, read_cameras
from deft_core.program import CommandParser
from deft_draft_training.commands.target import (
    at_least_one,
    check_datasets,
    check_episodes,
    parse_target,
    refuse_few,
)
from deft_draft_training.errors import ConfigError
from deft_draft_training.heads.index import episodes_of

PUBLISHED_STEPS = 20_000
EPOCHS = 100


def main(arguments: list[str]) -> int:
    """Train, or go on training; return the exit code."""
    parser = CommandParser(prog="deft train fit", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="run directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--features", type=Path, metavar="DIR", help="what `record` wrote")
    source.add_argument(
        "--live", type=Path, nargs="+", metavar="DATA", help="data sets; features on the fly"
    )
    parser.add_argument(
        "--stride", type=at_least_one, default=1, help="with --live: every how many steps"
    )
    add_camera_flag(parser)
    parser.add_argument("--config", type=Path, metavar="TOML", help="default: the published run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help=f"such as steps=N (default: {EPOCHS} epochs, at most {PUBLISHED_STEPS} steps)",
    )  # fmt: skip
    parser.add_argument("--tensorboard", action="store_true", help="show losses there, too")
    flags = parse_target(parser, arguments)
    if flags.config is not None and not flags.config.is_file():
        raise ConfigError(f"--config {flags.config}: no such file")
    if flags.features is not None:
        refuse_few(len(episodes_of(flags.features)))
    else:
        check_datasets(flags.live)
        check_episodes(flags.live, read_cameras(flags))
    from deft_draft_training.heads.fit import run  # brings torch along

    return run(flags)
