"""Flags for what a data set leaves open, for every command that reads one."""

from argparse import ArgumentParser, Namespace


def add_camera_flag(parser: ArgumentParser) -> None:
    """Declare `--cameras`."""
    parser.add_argument(
        "--cameras",
        metavar="NAME[,NAME...]",
        help="pictures of the data set by their names there: the policy's view first, then those "
        "that go along (default: the only one)",
    )


def read_cameras(given: Namespace) -> tuple[str, ...]:
    """The cameras that were named, in order; none if the flag was not given."""
    return tuple(given.cameras.split(",")) if given.cameras else ()
