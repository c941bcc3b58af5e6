"""Records demonstrations of a suite with the scripted expert."""

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deft_client.commands.program import CommandParser
from deft_client.datasets.demonstrations import (
    Demonstration,
    find_demonstrations,
    load_demonstration,
    load_header,
)
from deft_client.files import replacing
from deft_client.libero.errors import DemonstrationError, SelectionError, SimulationError
from deft_client.libero.evaluation.selection import parse_numbers
from deft_client.libero.simulator.conventions import to_robosuite
from deft_client.libero.simulator.environment import EnvironmentSettings
from deft_client.libero.simulator.suites import NUM_TRIALS, SUITE_NAMES, find_suite, find_task
from scripts.tiny_libero.expert.motion import NoiseSettings
from scripts.tiny_libero.play import DemosSettings
from scripts.tiny_libero.pool import DemosJob, record_visibly


def main(arguments: list[str]) -> int:
    """Record what is missing; 1 if something broke, 2 if asked wrongly."""
    options = _parser().parse_args(arguments)
    try:
        job = _job(options)
        record_visibly(job)
        _summarise(job)
        if options.hdf5 is not None:
            _convert(job, options.hdf5)
    except SelectionError as error:
        sys.stderr.write(f"python -m scripts.tiny_libero demos: {error}\n")
        return 2
    except SimulationError as error:
        sys.stderr.write(f"python -m scripts.tiny_libero demos: {error}\n")
        return 1
    sys.stdout.write(
        f"next: python -m scripts.tiny_libero train {options.out} --run runs/policy "
        "--out checkpoints/my-policy\n"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("python -m scripts.tiny_libero demos", description=__doc__)
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
    add("--hdf5", type=Path, metavar="DIR", help="also write LIBERO's HDF5 files there")
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
    count = len(suite.tasks)
    tasks = f"0-{count - 1}" if options.tasks is None else options.tasks
    settings = DemosSettings(
        suite=suite.name,
        tasks=parse_numbers(tasks, count, "--tasks"),
        episodes=options.episodes,
        trials=parse_numbers(options.trials, NUM_TRIALS, "--trials"),
        seed=options.seed,
        moved_metres=options.move,
        rearranged=options.rearrange,
        varied_words=options.vary_words,
        frame_size=options.size,
    )
    environment = EnvironmentSettings(frame_size=options.size, assets_folder=options.assets)
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


def _convert(job: DemosJob, folder: Path) -> None:
    for task in job.settings.tasks:
        path = write_hdf5(job.folder, job.settings.suite, task, folder)
        sys.stdout.write(f"{path}\n")


def write_hdf5(demonstrations: Path, suite: str, task: int, folder: Path) -> Path:
    """Write the succeeded episodes of a task as `<task name>_demo.hdf5`; the path written.

    As in LIBERO's files, pictures are upside down and mirrored, actions are robosuite's, and the
    gripper's value is -1 open, +1 close. Executed actions are stored, and clean ones beside them.
    """
    try:
        h5py = importlib.import_module("h5py")
    except ImportError as error:
        raise DemonstrationError("HDF5 needs the package h5py: pip install h5py") from error
    wanted = find_task(suite, task)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{wanted.name}_demo.hdf5"
    with replacing(path) as beside, h5py.File(beside, "w") as file:
        data = file.create_group("data")
        number = total = 0
        for source in find_demonstrations(demonstrations, [task]):
            demonstration = load_demonstration(source)
            if demonstration.header.succeeded:
                _write_episode(data.create_group(f"demo_{number}"), demonstration)
                number, total = number + 1, total + len(demonstration)
        data.attrs["num_demos"], data.attrs["total"] = number, total
        data.attrs["bddl_file_name"] = f"{suite}/{wanted.bddl_file}"
        data.attrs["problem_info"] = f'{{"language_instruction": "{wanted.instruction}"}}'
    return path


def _write_episode(group: Any, demonstration: Demonstration) -> None:
    steps = len(demonstration)
    group.attrs["num_samples"] = steps
    group.attrs["init_state"] = demonstration.simulator[0]
    group["actions"] = _robosuite(demonstration.executed)
    group["clean_actions"] = _robosuite(demonstration.labels)
    group["states"] = demonstration.simulator
    group["dones"] = np.arange(steps) == steps - 1
    group["rewards"] = (np.arange(steps) == steps - 1).astype(np.uint8)
    observed = group.create_group("obs")
    frames = demonstration.frames()[:, ::-1, ::-1]
    observed.create_dataset("agentview_rgb", data=frames, compression="gzip", compression_opts=4)
    observed["ee_pos"] = demonstration.state[:, :3]
    observed["ee_ori"] = demonstration.state[:, 3:6]
    observed["ee_states"] = demonstration.state[:, :6]
    observed["gripper_states"] = demonstration.state[:, 6:]


def _robosuite(actions: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    return np.stack([to_robosuite(action.astype(np.float64)) for action in actions])
