"""`deft-client datasets`: what a data set holds, and any data set as a LeRobot one."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

import numpy as np
from numpy.typing import NDArray

from deft_client.commands.connection import reported
from deft_core.datasets.episodes import DatasetError, StoredEpisode
from deft_core.datasets.flags import add_camera_flag, read_cameras
from deft_core.datasets.formats import find_format, read_dataset
from deft_core.datasets.lerobot_export import write_lerobot
from deft_core.program import CommandParser


def main(arguments: list[str]) -> int:
    """Show or export; 1 if the data set cannot be used."""
    given = _parser().parse_args(arguments)
    job = _show if given.action == "show" else _export
    return reported(lambda: job(given), f"datasets {given.action}")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("deft-client datasets", description=__doc__, allow_abbrev=False)
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


def _show(given: argparse.Namespace) -> int:
    """Read every step, and say what they are together."""
    lengths: list[int] = []
    states: Counter[int] = Counter()  # episodes by how many numbers their state has; 0: none
    instructions: Counter[str] = Counter()
    actions: list[NDArray[np.float64]] = []
    first = None
    for episode in _episodes(given):
        steps = 0
        for steps, step in enumerate(episode.steps(), start=1):
            first = first or step.observation
            if steps == 1:
                instructions[step.observation.instruction] += 1
                states[0 if step.observation.state is None else len(step.observation.state)] += 1
            actions.append(step.action)
        lengths.append(steps)
    if first is None:
        raise DatasetError("none of the episodes has a step")
    (height, width), cameras = first.image.shape[:2], ", ".join(first.cameras)
    state = _states(states)
    low, high = np.min(actions, axis=0), np.max(actions, axis=0)
    q01, q99 = np.quantile(actions, (0.01, 0.99), axis=0)
    lines = [
        f"{find_format(given.data).name}: {len(lengths)} episodes, {len(actions)} steps "
        f"({min(lengths)} to {max(lengths)} each)",
        f"pictures of {width} x {height} pixels{f', with {cameras}' if cameras else ''}; {state}",
        "action      smallest        q01        q99    largest",
    ]
    for number, row in enumerate(np.stack((low, q01, q99, high), axis=1)):
        lines.append(f"{number:6}    " + " ".join(f"{value:10.4f}" for value in row))
    lines += [f"{count:6} x  {text}" for text, count in instructions.most_common()]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


def _states(episodes: Counter[int]) -> str:
    """`no state`, or of how many numbers it is and, where episodes differ, in how many of them."""
    names = {size: f"state of {size} numbers" if size else "no state" for size in episodes}
    if len(names) == 1:
        return names[next(iter(names))]
    return ", ".join(f"{names[size]} in {count} episodes" for size, count in episodes.items())


def _export(given: argparse.Namespace) -> int:
    written = write_lerobot(_episodes(given), given.out, given.fps, given.robot)
    for one in written:
        features = f": {one.features}" if len(written) > 1 else ""
        counts = f"{one.num_episodes} episodes, {one.num_steps} steps"
        sys.stdout.write(f"{one.folder}: {counts}{features}\n")
    largest = max(written, key=lambda one: one.num_steps)
    sys.stdout.write(f"next: deft train record {quote(str(largest.folder))} --out features\n")
    return 0


def _episodes(given: argparse.Namespace) -> Iterator[StoredEpisode]:
    """Count episodes on a terminal as they are asked for."""
    for number, episode in enumerate(read_dataset(given.data, read_cameras(given))):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{number + 1} episodes")
        yield episode
    if sys.stderr.isatty():
        sys.stderr.write("\n")
