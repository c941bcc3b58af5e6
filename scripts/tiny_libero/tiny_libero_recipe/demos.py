"""Records demonstrations of a suite with the scripted expert."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from shlex import quote

from deft_core.datasets.demonstrations import find_demonstrations, load_header
from deft_core.datasets.episodes import DemonstrationError
from deft_core.program import CommandParser
from deft_libero.errors import SelectionError, SimulationError
from deft_libero.evaluation.selection import parse_numbers
from deft_libero.simulator.environment import EnvironmentSettings
from deft_libero.simulator.suites import NUM_TRIALS, SUITE_NAMES, find_suite
from tiny_libero_recipe.expert.motion import NoiseSettings
from tiny_libero_recipe.play import HELD_OUT, DemosSettings
from tiny_libero_recipe.pool import DemosJob, record_visibly


def main(arguments: list[str]) -> int:
    """Record what is missing; 1 if something broke, 2 if asked wrongly."""
    options = _parser().parse_args(arguments)
    try:
        job = _job(options)
        record_visibly(job)
        _summarise(job)
    except SelectionError as error:
        sys.stderr.write(f"python -m tiny_libero_recipe demos: {error}\n")
        return 2
    except (SimulationError, DemonstrationError) as error:
        sys.stderr.write(f"python -m tiny_libero_recipe demos: {error}\n")
        return 1
    sys.stdout.write(
        f"next: python -m tiny_libero_recipe train {quote(str(options.out))} --run runs/policy "
        "--out checkpoints/my-policy\n"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("python -m tiny_libero_recipe demos", description=__doc__)
    add_recording_flags(parser)
    add = parser.add_argument
    noise = NoiseSettings()
    add(
        "--noise",
        type=float,
        default=noise.sigma,
        metavar="SIGMA",
        help="largest standard deviation of an episode's jitter, in action units "
        "(default: %(default)s)",
    )
    add(
        "--pushes",
        type=float,
        default=noise.push_chance,
        metavar="CHANCE",
        help="chance per step that a random push begins (default: %(default)s)",
    )
    add(
        "--slips",
        type=float,
        default=noise.slip_chance,
        metavar="CHANCE",
        help="chance per step that the gripper errs for a moment (default: %(default)s)",
    )
    add(
        "--encoding",
        choices=("jpeg", "png"),
        default="jpeg",
        help="jpeg (quality 95) or lossless png (default: %(default)s)",
    )
    return parser  # fmt: skip


def add_recording_flags(parser: argparse.ArgumentParser) -> None:
    """What every recording of demonstrations asks for, whoever plays."""
    add = parser.add_argument
    add("suite", choices=SUITE_NAMES, help="which suite's tasks to play")
    add("--out", type=Path, required=True, metavar="DIR", help="where the episodes go")
    add("--tasks", metavar="LIST", help="task numbers such as 0,3-5 (default: all)")
    add(
        "--trials",
        default="0-24",
        metavar="LIST",
        help="initial states to start from; others are for choosing and for evaluation "
        "(default: %(default)s)",
    )
    add("--episodes", type=int, default=40, help="episodes per task (default: %(default)s)")
    add("--workers", type=int, default=1, help="processes (default: %(default)s)")
    add("--seed", type=int, default=0, help="of noise and placements (default: %(default)s)")
    add(
        "--move",
        type=float,
        default=0.0,
        metavar="METRES",
        help="move things by up to this much in three of four episodes (default: %(default)s)",
    )
    add(
        "--rearrange",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of episodes in which two things have changed places, or another one is asked for "
        "(default: %(default)s)",
    )
    add("--vary-words", action="store_true", help="ask for things in different sentences")
    add("--size", type=int, default=256, help="pixels of a frame's side (default: %(default)s)")
    add(
        "--assets",
        type=Path,
        metavar="DIR",
        help="other assets than LIBERO's own",
    )


def read_recording_flags(options: argparse.Namespace) -> DemosJob:
    """The recording they ask for, played by the expert; raises SelectionError."""
    suite = find_suite(options.suite)
    for name in ("episodes", "workers", "size"):
        if getattr(options, name) < 1:
            raise SelectionError(f"--{name} must be at least 1, got {getattr(options, name)}")
    trials = parse_numbers(options.trials, NUM_TRIALS, "--trials")
    if held := set(trials) & set(parse_numbers(HELD_OUT, NUM_TRIALS, "--trials")):
        raise SelectionError(
            f"--trials {options.trials}: states {HELD_OUT} are held out, and {min(held)} is one of "
            "them; what is recorded there could be trained on, or chosen by. Leave them out"
        )
    count = len(suite.tasks)
    tasks = f"0-{count - 1}" if options.tasks is None else options.tasks
    settings = DemosSettings(
        suite=suite.name,
        tasks=parse_numbers(tasks, count, "--tasks"),
        episodes=options.episodes,
        trials=trials,
        seed=options.seed,
        moved_metres=options.move,
        rearranged=options.rearrange,
        varied_words=options.vary_words,
        frame_size=options.size,
    )
    environment = EnvironmentSettings(
        frame_size=options.size, assets_folder=options.assets, fast=True
    )
    return DemosJob(settings, options.out, environment, options.workers)


def _job(options: argparse.Namespace) -> DemosJob:
    job = read_recording_flags(options)
    noise = NoiseSettings(options.noise, options.pushes, slip_chance=options.slips)
    return replace(job, settings=replace(job.settings, noise=noise, encoding=options.encoding))


def _summarise(job: DemosJob) -> None:
    for task in job.settings.tasks:
        paths = list(find_demonstrations(job.folder, [task]))
        succeeded = sum(load_header(path).succeeded for path in paths)
        size = sum(path.stat().st_size for path in paths) / 2**20
        sys.stdout.write(
            f"task {task}: {succeeded} of {len(paths)} episodes succeeded, {size:.1f} MB\n"
        )
