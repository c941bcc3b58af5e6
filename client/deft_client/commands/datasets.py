"""`deft-client datasets`: what a data set holds, and any data set as a LeRobot one."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deft_client.commands.program import CommandParser
from deft_client.datasets.episodes import DatasetError, StoredEpisode
from deft_client.datasets.flags import add_camera_flag, read_cameras
from deft_client.datasets.formats import find_format, read_dataset
from deft_client.datasets.lerobot_export import write_lerobot
from deft_client.errors import DeftError

PROG = "deft-client datasets"


@dataclass(frozen=True, eq=False)
class DatasetSummary:
    """What all its episodes say together."""

    lengths: tuple[int, ...]  # steps of each episode
    instructions: tuple[str, ...]  # the first of each episode
    size: tuple[int, ...]  # height and width of the first picture
    cameras: tuple[str, ...]  # that go along
    state_dim: int | None
    actions: NDArray[np.float64]  # [step, action_dim]


def main(arguments: list[str]) -> int:
    """Show or export; 1 if the data set cannot be used."""
    given = _parser().parse_args(arguments)
    try:
        episodes = _shown(read_dataset(given.data, read_cameras(given)))
        if given.action == "show":
            name = find_format(given.data).name
            sys.stdout.write(describe(name, summarise(episodes)) + "\n")
        else:
            _export(episodes, given)
    except DeftError as error:
        sys.stderr.write(f"{PROG} {given.action}: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(PROG, description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="episodes, pictures, instructions, range of actions")
    export = actions.add_parser("export", help="write a LeRobot data set (format v3)")
    for each in (show, export):
        each.add_argument("data", type=Path, help="a data set of any known format")
        add_camera_flag(each)
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument("--fps", type=int, required=True, metavar="N", help="steps per second")
    export.add_argument("--robot", default="unknown", metavar="NAME", help="which kind it was")
    return parser


def summarise(episodes: Iterable[StoredEpisode]) -> DatasetSummary:
    """Read every step; `DatasetError` if there is none."""
    lengths, instructions, actions = [], [], []
    first = None
    for episode in episodes:
        length = 0
        for step in episode.steps():
            if length == 0:
                instructions.append(step.observation.instruction)
            first, length = first or step.observation, length + 1
            actions.append(step.action)
        lengths.append(length)
    if first is None:
        raise DatasetError("none of the episodes has a step")
    return DatasetSummary(
        lengths=tuple(lengths),
        instructions=tuple(instructions),
        size=first.image.shape[:2],
        cameras=tuple(first.cameras),
        state_dim=None if first.state is None else len(first.state),
        actions=np.stack(actions),
    )


def describe(name: str, summary: DatasetSummary) -> str:
    """Return a summary for people."""
    height, width = summary.size
    further = f", with {', '.join(summary.cameras)}" if summary.cameras else ""
    state = "no state" if summary.state_dim is None else f"state of {summary.state_dim} numbers"
    lines = [
        f"{name}: {len(summary.lengths)} episodes, {sum(summary.lengths)} steps "
        f"({min(summary.lengths)} to {max(summary.lengths)} each)",
        f"pictures of {width} x {height} pixels{further}; {state}",
        "action      smallest        q01        q99    largest",
    ]
    low, high = summary.actions.min(axis=0), summary.actions.max(axis=0)
    q01, q99 = np.quantile(summary.actions, (0.01, 0.99), axis=0)
    for number, row in enumerate(np.stack((low, q01, q99, high), axis=1)):
        lines.append(f"{number:6}    " + " ".join(f"{value:10.4f}" for value in row))
    counted = Counter(summary.instructions)
    lines += [f"{count:6} x  {text}" for text, count in counted.most_common()]
    return "\n".join(lines)


def _export(episodes: Iterator[StoredEpisode], given: argparse.Namespace) -> None:
    result = write_lerobot(episodes, given.out, given.fps, given.robot)
    sys.stdout.write(
        f"{given.out}: {result.num_episodes} episodes, {result.num_steps} steps\n"
        f"next: deft train record {given.out} --out features\n"
    )


def _shown(episodes: Iterator[StoredEpisode]) -> Iterator[StoredEpisode]:
    """Count episodes on a terminal as they are asked for."""
    for number, episode in enumerate(episodes):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{number + 1} episodes")
        yield episode
    if sys.stderr.isatty():
        sys.stderr.write("\n")
