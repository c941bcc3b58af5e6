"""`deft-client assets`: look at a task's scene, check that all tasks run.

`record` writes what `check` compares with; it is for those who change Deft.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_client.commands.connection import reported
from deft_core.program import CommandParser
from deft_libero.errors import GraphicsError
from deft_libero.evaluation.selection import parse_numbers
from deft_libero.processes import end_with_parent
from deft_libero.simulator.assets import find_assets
from deft_libero.simulator.assets_check import check_task, pack_poses, settle_task
from deft_libero.simulator.conventions import WAIT_STEPS, wait_action
from deft_libero.simulator.environment import EnvironmentSettings, open_environment
from deft_libero.simulator.graphics import Renderer, find_renderer
from deft_libero.simulator.mujoco_version import installed_mujoco, warning
from deft_libero.simulator.suites import NUM_TRIALS, PRO_SUITES, Task, find_suite

ResultT = TypeVar("ResultT")
CHECKED_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")


def main(arguments: list[str]) -> int:
    """Run one of the jobs; 1 if something is wrong with the assets, 2 if asked wrongly."""
    options = _parser().parse_args(arguments)
    return reported(lambda: options.job(options), "assets")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("deft-client assets", description=__doc__)
    jobs = parser.add_subparsers(required=True, metavar="JOB")

    one = jobs.add_parser("show", help="render the scene of a task to a PNG file")
    one.add_argument("task", help="suite and number, such as libero_goal/3")
    one.add_argument("--out", type=Path, default=Path("scene.png"), help="default: %(default)s")
    one.add_argument("--trial", type=int, default=0, help="initial state (default: %(default)s)")
    one.add_argument("--size", type=int, default=512, help="pixels (default: %(default)s)")
    _add_assets(one)
    one.set_defaults(job=_show)

    one = jobs.add_parser("check", help="load tasks, take initial states, see that things stand")
    _add_selection(one)
    _add_assets(one)
    one.set_defaults(job=_check)

    one = jobs.add_parser("record", help="write where everything rests, for check to compare with")
    one.add_argument("file", type=Path)
    _add_selection(one)
    _add_assets(one)
    one.set_defaults(job=_record)
    return parser


def _add_assets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--assets", type=Path, metavar="DIR",
                        help="default: LIBERO's own")  # fmt: skip


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", choices=(*CHECKED_SUITES, *PRO_SUITES), metavar="SUITE",
                        help="default: all four of LIBERO's; LIBERO-PRO's by name")  # fmt: skip
    parser.add_argument("--tasks", metavar="LIST", help="task numbers (default: all)")
    parser.add_argument("--trials", default=f"0-{NUM_TRIALS - 1}", metavar="LIST",
                        help="initial states (default: %(default)s)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, help="processes (default: %(default)s)")


def _show(options: argparse.Namespace) -> int:
    name, _, number = options.task.partition("/")
    suite = find_suite(name)
    task = suite.task(parse_numbers(number or "0", len(suite.tasks), "the task")[0])
    settings = EnvironmentSettings(frame_size=options.size, assets_folder=options.assets)
    environment = open_environment(task, settings)
    try:
        environment.restart(options.trial)
        for _ in range(WAIT_STEPS):
            environment.advance(wait_action())
        PillowImage.fromarray(environment.frame().image).save(options.out)
    finally:
        environment.close()
    sys.stdout.write(f"{task.instruction} ({environment.assets.label}): {options.out}\n")
    return 0


def _check(options: argparse.Namespace) -> int:
    """Say what episodes would be played with here, then what is wrong with the tasks."""
    version = installed_mujoco()
    if version is not None and (text := warning(version)):
        sys.stdout.write(f"{text}\n")
    try:
        sys.stdout.write(f"renders with {find_renderer(Renderer.AUTO).value}\n")
    except GraphicsError as error:  # the check itself draws nothing
        sys.stdout.write(f"{error}\n")
    num_problems = 0
    for task, problems in _for_each_task(options, check_task):
        sys.stdout.write(f"{task.suite}/{task.number} {'ok' if not problems else ''}\n")
        sys.stdout.writelines(f"  {problem}\n" for problem in problems)
        sys.stdout.flush()
        num_problems += len(problems)
    sys.stdout.write(f"{num_problems} problems\n")
    return 1 if num_problems else 0


def _record(options: argparse.Namespace) -> int:
    members: dict[str, NDArray[np.integer]] = {}
    for task, settled in _for_each_task(options, settle_task):
        members |= pack_poses(task, [poses for _, poses in settled])
        sys.stdout.write(f"{task.suite}/{task.number}\n")
    np.savez_compressed(options.file, **members)  # type: ignore[arg-type]
    return 0


Work = Callable[[Task, Sequence[int], EnvironmentSettings], ResultT]


def _for_each_task(
    options: argparse.Namespace, work: Work[ResultT]
) -> Iterator[tuple[Task, ResultT]]:
    """Do the same with every selected task and its trials, in their order."""
    trials = parse_numbers(options.trials, NUM_TRIALS, "--trials")
    tasks: list[Task] = []
    for name in [options.suite] if options.suite else CHECKED_SUITES:
        suite = find_suite(name)
        numbers = options.tasks or f"0-{len(suite.tasks) - 1}"
        tasks += [suite.task(one) for one in parse_numbers(numbers, len(suite.tasks), "--tasks")]
    settings = EnvironmentSettings(renderer=Renderer.NONE, assets_folder=options.assets)
    label = find_assets(options.assets).label
    sys.stdout.write(f"{label} assets, MuJoCo {installed_mujoco()}, ")
    sys.stdout.write(f"{len(tasks)} tasks, {len(trials)} initial states each\n")
    with ProcessPoolExecutor(options.workers, get_context("spawn"), end_with_parent) as executor:
        futures = {task: executor.submit(work, task, trials, settings) for task in tasks}
        for task, future in futures.items():
            yield task, future.result()
