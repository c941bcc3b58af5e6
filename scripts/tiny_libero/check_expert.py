"""How often the expert succeeds in each task of a suite, without rendering.

FILE gets one line of JSON per episode; a killed run goes on where it stopped.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from deft_client.commands.program import CommandParser
from deft_client.libero.errors import SelectionError, SimulationError, UnstableError
from deft_client.libero.evaluation.selection import parse_numbers
from deft_client.libero.processes import end_with_parent
from deft_client.libero.results.statistics import wilson_interval
from deft_client.libero.simulator.conventions import WAIT_STEPS, wait_action
from deft_client.libero.simulator.environment import EnvironmentSettings, LiberoEnvironment
from deft_client.libero.simulator.graphics import Renderer
from deft_client.libero.simulator.suites import NUM_TRIALS, SUITE_NAMES, find_suite
from scripts.tiny_libero.expert.expert import Expert, Watch, check_tasks
from scripts.tiny_libero.expert.motion import Disturbance, Manner, NoiseSettings


@dataclass(frozen=True)
class CheckedEpisode:
    """What became of one episode; steps do not count the idle ones."""

    suite: str
    task: int
    trial: int
    succeeded: bool
    num_steps: int
    assets: str


@dataclass(frozen=True)
class CheckJob:
    """Episodes of one task, played one after the other by one process."""

    suite: str
    task: int
    trials: tuple[int, ...]
    noise: NoiseSettings
    settings: EnvironmentSettings


def play_all(job: CheckJob) -> list[CheckedEpisode]:
    """Play the trials of a job."""
    suite = find_suite(job.suite)
    environment = LiberoEnvironment(suite.task(job.task), job.settings)
    try:
        return [_play(environment, job, trial, suite.step_limit) for trial in job.trials]
    finally:
        environment.close()


def _play(environment: LiberoEnvironment, job: CheckJob, trial: int, limit: int) -> CheckedEpisode:
    environment.restart(trial)
    for _ in range(WAIT_STEPS):
        environment.advance(wait_action())
    generator = np.random.default_rng((job.settings.seed, job.task, trial))
    expert, watch = Expert.for_episode(environment, Manner.draw(generator)), Watch()
    disturbance = Disturbance(job.noise, generator)
    succeeded, num_steps = False, 0
    while not succeeded and num_steps < limit:
        scene = environment.scene()
        action = expert.label(scene, watch.see(scene)).action
        num_steps += 1
        try:
            succeeded = environment.advance(disturbance.disturb(action))
        except UnstableError:
            break
    assets = environment.assets.label
    return CheckedEpisode(job.suite, job.task, trial, succeeded, num_steps, assets)


def main(arguments: list[str]) -> int:
    """Play what is missing from --out, then print a table."""
    options = _parser().parse_args(arguments)
    suite = find_suite(options.suite)
    try:
        tasks = parse_numbers(options.tasks, len(suite.tasks), "--tasks")
        check_tasks(map(suite.task, tasks))
    except (SelectionError, SimulationError) as error:
        raise SystemExit(f"check_expert: {error}") from None
    before = _read(options.out)
    done = {(one.suite, one.task, one.trial) for one in before}
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(options.workers, context, end_with_parent) as executor,
        options.out.open("a", encoding="utf-8") as file,
    ):
        futures = [executor.submit(play_all, job) for job in _jobs(options, tasks, done)]
        for future in as_completed(futures):
            for played in future.result():
                file.write(json.dumps(asdict(played)) + "\n")
            file.flush()
    _print_table(_read(options.out), options.suite)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("python -m scripts.tiny_libero check-expert", description=__doc__)
    parser.add_argument("suite", choices=SUITE_NAMES)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--tasks", default="0-9")
    parser.add_argument("--trials", default=f"0-{NUM_TRIALS - 1}")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--assets", type=Path, help="default: LIBERO's own")
    parser.add_argument("--noise", type=float, default=0.0, help="sigma (default: %(default)s)")
    parser.add_argument("--pushes", type=float, default=0.0, help="chance (default: %(default)s)")
    parser.add_argument("--widen", type=float, default=0.0, help="metres (default: %(default)s)")
    return parser


def _jobs(
    options: argparse.Namespace, tasks: Iterable[int], done: set[tuple[str, int, int]]
) -> Iterator[CheckJob]:
    noise = NoiseSettings(options.noise, options.pushes, slip_chance=0.0)
    settings = EnvironmentSettings(
        renderer=Renderer.NONE, widen_metres=options.widen, assets_folder=options.assets
    )
    for task in tasks:
        numbers = parse_numbers(options.trials, NUM_TRIALS, "--trials")
        missing = [trial for trial in numbers if (options.suite, task, trial) not in done]
        for start in range(0, len(missing), 10):
            trials = tuple(missing[start : start + 10])
            yield CheckJob(options.suite, task, trials, noise, settings)


def _read(path: Path) -> list[CheckedEpisode]:
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
    names = [field.name for field in fields(CheckedEpisode)]
    return [CheckedEpisode(**{name: line[name] for name in names}) for line in lines]


def _print_table(played: list[CheckedEpisode], suite: str) -> None:
    say = sys.stdout.write
    say("| task | succeeded | 95% interval | mean steps | failed trials |\n|---|---|---|---|---|\n")
    rows = [one for one in played if one.suite == suite]
    groups = [(str(task), [one for one in rows if one.task == task]) for task in range(10)]
    for name, group in [*groups, ("all", rows)]:
        if not group:
            continue
        good = [one for one in group if one.succeeded]
        interval = wilson_interval(len(good), len(group))
        steps = np.mean([one.num_steps for one in good]) if good else 0.0
        failed = ", ".join(str(one.trial) for one in group if not one.succeeded)
        say(
            f"| {name} | {len(good)} of {len(group)} | {100 * interval.low:.0f}-"
            f"{100 * interval.high:.0f}% | {steps:.0f} | {failed if name != 'all' else ''} |\n"
        )
