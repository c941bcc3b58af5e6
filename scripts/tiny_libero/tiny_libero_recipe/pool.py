"""Records many demonstrations with several processes; a killed run goes on where it stopped.

Every episode is one file that is written whole, so what is there is done. Workers end with their
parent, however that ends.
"""

import fcntl
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from deft_core.datasets.episodes import DemonstrationError
from deft_core.files import write_atomically
from deft_libero.processes import end_with_parent
from deft_libero.simulator.environment import EnvironmentSettings, LiberoEnvironment
from deft_libero.simulator.suites import find_task
from tiny_libero_recipe.demonstration_writer import save_demonstration
from tiny_libero_recipe.expert.expert import check_tasks
from tiny_libero_recipe.play import (
    ActorFactory,
    DemoKey,
    DemosSettings,
    episode_keys,
    noisy_expert,
    play,
)

SETTINGS_FILE = "recording.json"


@dataclass(frozen=True)
class DemoResult:
    """What became of one episode."""

    key: DemoKey
    succeeded: bool
    num_steps: int
    num_bytes: int


@dataclass(frozen=True)
class DemosJob:
    """A recording: what, where, in which environment, with how many processes, who plays.

    `new_actor` travels to the workers, so it must be a function or an object that pickles.
    """

    settings: DemosSettings
    folder: Path
    environment: EnvironmentSettings
    num_workers: int = 1
    new_actor: ActorFactory = noisy_expert


def missing_keys(job: DemosJob) -> list[DemoKey]:
    """Episodes that have no file yet."""
    return [key for key in episode_keys(job.settings) if not key.path(job.folder).is_file()]


def record(job: DemosJob, report: Callable[[DemoResult], None]) -> None:
    """Record every missing episode; `report` hears of each as it is written.

    Tasks the expert cannot do are refused before the first one.
    """
    check_tasks(find_task(job.settings.suite, number) for number in job.settings.tasks)
    with _claimed(job):
        keys = missing_keys(job)
        if not keys:
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(job.num_workers, context, initializer=end_with_parent) as executor:
            futures: list[Future[DemoResult]] = [
                executor.submit(_record_one, job, key) for key in keys
            ]
            try:
                for future in as_completed(futures):
                    report(future.result())
            except BrokenProcessPool as error:
                raise DemonstrationError(
                    "a worker died (out of memory, or killed); run the same command again to go on"
                ) from error
            finally:
                for future in futures:
                    future.cancel()


def record_visibly(job: DemosJob) -> list[DemoResult]:
    """The same with a bar on the terminal; what became of the new episodes."""
    total, missing = len(episode_keys(job.settings)), len(missing_keys(job))
    results: list[DemoResult] = []
    with tqdm(total=total, initial=total - missing, unit="episode", smoothing=0) as bar:

        def report(result: DemoResult) -> None:
            results.append(result)
            bar.update()
            bar.set_postfix(succeeded=f"{sum(one.succeeded for one in results)}/{len(results)}")

        record(job, report)
    return results


def _record_one(job: DemosJob, key: DemoKey) -> DemoResult:
    environment = _opened(job.settings.suite, key.task, job.environment)
    demonstration = play(environment, job.settings, key, job.new_actor)
    path = key.path(job.folder)
    save_demonstration(path, demonstration)
    header = demonstration.header
    return DemoResult(key, header.succeeded, len(demonstration), path.stat().st_size)


class _Open:
    """The environment this process has open; building one takes a second."""

    environment: LiberoEnvironment | None = None


def _opened(suite: str, task: int, settings: EnvironmentSettings) -> LiberoEnvironment:
    wanted = find_task(suite, task)
    current = _Open.environment
    if current is not None and (current.task != wanted or current.settings != settings):
        current.close()
        current = None
    if current is None:
        current = LiberoEnvironment(wanted, settings)
        _Open.environment = current
    return current


@contextmanager
def _claimed(job: DemosJob) -> Iterator[None]:
    """Hold the folder for this run alone, and make sure it holds the same recording."""
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        lock = (job.folder / ".lock").open("w")
    except OSError as error:
        raise DemonstrationError(f"cannot write to {job.folder}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DemonstrationError(f"another run is recording into {job.folder}") from error
        _check_settings(job)
        for leftover in job.folder.glob("task*/.episode*"):
            leftover.unlink(missing_ok=True)
        yield


def _check_settings(job: DemosJob) -> None:
    """A folder keeps to one recording; only the number of episodes and the tasks may grow."""
    path = job.folder / SETTINGS_FILE
    now = json.loads(json.dumps(asdict(job.settings)))
    if path.is_file():
        try:
            before = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise DemonstrationError(f"{path} is damaged: {error}") from error
        different = {
            name: (before.get(name), value)
            for name, value in now.items()
            if name not in ("episodes", "tasks") and before.get(name) != value
        }
        if different:
            changes = "; ".join(f"{name}: {a} -> {b}" for name, (a, b) in different.items())
            raise DemonstrationError(
                f"{job.folder} holds a recording made otherwise ({changes}); give another --out"
            )
    write_atomically(path, (json.dumps(now, indent=1) + "\n").encode())
