"""`deft index`: make a retrieval index of a data set's frames, to draft from."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from deft_client.commands.program import CommandParser
from deft_client.datasets.episodes import StoredStep
from deft_client.datasets.flags import add_camera_flag, read_cameras
from deft_client.datasets.formats import read_dataset
from deft_policies.commands.parse import parse_command, run_command, target_flags
from deft_policies.decoding.drafts.guessers import save_index
from deft_policies.errors import PolicyError
from deft_policies.openvla.indexing import StoredActions, index_frames
from deft_policies.openvla.policy import OpenVLAPolicy

PROG = "deft index"


def main(arguments: list[str]) -> int:
    """Build the index and write it; return the exit code."""
    parser = _build_parser()

    def run() -> int:
        command = parse_command(parser, arguments)
        given = command.namespace
        if min(given.every, given.batch, given.limit or 1) < 1:
            parser.error("--every, --batch and --limit must be 1 or more")
        policy = command.load()
        if not isinstance(policy, OpenVLAPolicy):
            raise PolicyError(f"only openvla drafts from an index, got {policy.info.policy!r}")
        _write(policy, given)
        return 0

    return run_command(PROG, run)


def _build_parser() -> ArgumentParser:
    parser = CommandParser(
        prog=PROG,
        allow_abbrev=False,
        description="Store frames by what they look like, with the actions that belong to them; "
        "serve with --retrieval-index FILE to draft from them.",
    )
    parser.add_argument("data", type=Path, help="a data set: recordings, demonstrations, LeRobot's")
    add_camera_flag(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the index")
    parser.add_argument(
        "--actions",
        choices=[one.value for one in StoredActions],
        default=StoredActions.OWN.value,
        help="own: let the policy answer every frame (default); recorded: what was done",
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th frame")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many frames")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="frames per pass")
    return parser


def _write(policy: OpenVLAPolicy, given: Namespace) -> None:
    frames = islice(_frames(given), 0, None, given.every)
    chosen = islice(frames, given.limit)
    index = index_frames(policy, chosen, StoredActions(given.actions), given.batch)
    save_index(index, given.out)
    kilobytes = given.out.stat().st_size / 1e3
    sys.stdout.write(
        f"{given.out}: {len(index.keys)} frames, {kilobytes:.0f} kB\n"
        f"next: deft serve {target_flags(given)} --retrieval-index {given.out}\n"
    )


def _frames(given: Namespace) -> Iterator[StoredStep]:
    episodes = list(read_dataset(given.data, read_cameras(given)))
    for episode in tqdm(episodes, unit="episode", disable=None):  # shown on a terminal alone
        yield from (step for step in episode.steps() if step.is_example)
