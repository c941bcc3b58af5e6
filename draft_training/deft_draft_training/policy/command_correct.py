"""`deft train correct`: let a policy play in LIBERO and store what the expert would have done.

The episodes it writes are demonstrations like any other (DAgger): pass them to `deft train policy`
beside the first ones, with `--warm-start` and `--tokens-of`. A killed run goes on.
"""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from deft_client.libero.demos import DemosSettings, episode_keys
from deft_client.libero.demos_pool import DemoResult, DemosJob, missing_keys, record
from deft_client.libero.environment import EnvironmentSettings
from deft_client.libero.errors import SimulationError
from deft_client.libero.evaluate_errors import SelectionError
from deft_client.libero.evaluate_selection import parse_numbers
from deft_client.libero.suites import NUM_TRIALS, SUITE_NAMES, find_suite
from deft_draft_training.errors import ConfigError, DataError
from deft_draft_training.policy.learner import LearnerFactory, TakeoverSettings
from deft_policies.errors import PolicyError
from deft_policies.openvla.checkpoint_config import load_config


def main(arguments: list[str]) -> int:
    """Record what is missing."""
    given = _parser().parse_args(arguments)
    try:
        job = _job(given)
        _record(job)
    except SelectionError as error:
        raise ConfigError(str(error)) from error
    except (SimulationError, PolicyError) as error:
        raise DataError(str(error)) from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deft train correct", description=__doc__)
    add = parser.add_argument
    add("suite", choices=SUITE_NAMES)
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="the policy that plays")
    add("--statistics-key", metavar="KEY", help="default: the suite's name")
    add("--out", type=Path, required=True, metavar="DIR", help="where the episodes go")
    add("--tasks", metavar="LIST", help="task numbers such as 0,3-5 (default: all)")
    add("--trials", default="0-39", metavar="LIST", help="initial states (default: %(default)s)")
    add("--episodes", type=int, default=40, help="per task (default: %(default)s)")
    add("--workers", type=int, default=1, help="processes (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--widen", type=float, default=0.0, metavar="METRES", help="as for deft-client demos")
    add("--size", type=int, default=256, help="pixels of a frame's side (default: %(default)s)")
    add(
        "--lead",
        type=float,
        default=TakeoverSettings().chance,
        metavar="CHANCE",
        help="per step, of the expert leading for a moment (default: %(default)s)",
    )
    add("--assets", type=Path, metavar="DIR", help="as for deft-client demos")
    return parser


def _job(given: argparse.Namespace) -> DemosJob:
    key = given.statistics_key or given.suite
    statistics = load_config(given.checkpoint).statistics
    if key not in statistics:
        known = ", ".join(statistics)
        raise ConfigError(f"{given.checkpoint} has no statistics {key!r}; it has {known}")
    for name in ("episodes", "workers", "size"):
        if getattr(given, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(given, name)}")
    count = len(find_suite(given.suite).tasks)
    tasks = parse_numbers(given.tasks, count, "--tasks") if given.tasks else tuple(range(count))
    settings = DemosSettings(
        suite=given.suite,
        tasks=tasks,
        episodes=given.episodes,
        trials=parse_numbers(given.trials, NUM_TRIALS, "--trials"),
        seed=given.seed,
        widen_metres=given.widen,
        frame_size=given.size,
        actor=f"{given.checkpoint.resolve().name} ({key})",
    )
    environment = EnvironmentSettings(frame_size=given.size, assets_folder=given.assets)
    takeover = TakeoverSettings(chance=given.lead)
    learner = LearnerFactory(given.checkpoint.resolve(), key, takeover)
    return DemosJob(settings, given.out, environment, given.workers, learner)


def _record(job: DemosJob) -> None:
    total, missing = len(episode_keys(job.settings)), len(missing_keys(job))
    results: list[DemoResult] = []
    with tqdm(total=total, initial=total - missing, unit="episode", file=sys.stderr) as bar:

        def report(result: DemoResult) -> None:
            results.append(result)
            bar.update()
            bar.set_postfix(succeeded=f"{sum(one.succeeded for one in results)}/{len(results)}")

        record(job, report)
    steps = sum(one.num_steps for one in results)
    succeeded = sum(one.succeeded for one in results)
    sys.stdout.write(
        f"{len(results)} new episodes with {steps} labelled frames in {job.folder}; the policy, "
        f"led on where it stood still, succeeded in {succeeded}\n"
    )
