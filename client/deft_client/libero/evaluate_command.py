"""`deft-client eval libero_object --episodes 50`: play LIBERO against a policy, keep the results.

Exit code: 0 every episode Succeeded or Failed, 1 it could not start, 2 asked wrongly, 3 episodes
are missing or Errored: the same command again plays those.
"""

import signal
import sys
from collections.abc import Callable
from types import FrameType

from deft_client.commands.connection import UsageError
from deft_client.errors import DeftError
from deft_client.libero.errors import SimulationError, UnknownSuiteError, UnknownTaskError
from deft_client.libero.evaluate import Evaluation, Limits
from deft_client.libero.evaluate_errors import (
    EvaluationStoppedError,
    ProfileError,
    ResultsMismatchError,
    ResultsWriteError,
    SelectionError,
)
from deft_client.libero.evaluate_options import EvaluationOptions, read_options
from deft_client.libero.evaluate_pool import limit_threads
from deft_client.libero.evaluate_runs import PlannedRun, plan_runs
from deft_client.libero.policy_source import describe_server
from deft_client.libero.profiles import check_chain
from deft_client.libero.progress import Progress
from deft_client.libero.report_summary import Summary, summarise
from deft_client.libero.report_tables import terminal_table
from deft_client.libero.results_store import ResultsStore, load_run

DONE, FAILED, ASKED_WRONGLY, INCOMPLETE, INTERRUPTED = 0, 1, 2, 3, 130
_WRONG = (
    UsageError,
    SelectionError,
    ProfileError,
    ResultsMismatchError,
    UnknownSuiteError,
    UnknownTaskError,
)


def main(arguments: list[str]) -> int:
    """Evaluate; return the exit code."""
    options = read_options(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _evaluate(options())
    except _WRONG as error:
        code, line = ASKED_WRONGLY, str(error)
    except (DeftError, SimulationError) as error:
        code, line = FAILED, str(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
        line = "interrupted; the finished episodes are kept, the same command goes on from there"
    sys.stderr.write(f"deft-client eval: {line}\n")
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _evaluate(options: EvaluationOptions) -> int:
    limit_threads()
    source = options.wishes.source
    info = describe_server(source)
    check_chain(source.profile, info)
    runs = plan_runs(options.wishes, info)
    problem = _first_problem(runs, lambda run: _play(run, options))
    summaries = [_summary_of(run) for run in runs if (run.settings.folder / "run.json").exists()]
    if any(summary.tasks for summary in summaries):
        sys.stdout.write("\n" + terminal_table(summaries))
        sys.stdout.write(f"results in {options.wishes.folder}; for plots and videos:\n")
        sys.stdout.write(f"  deft-client report {options.wishes.folder} --out report.html\n")
    if problem:
        sys.stderr.write(f"deft-client eval: {problem}\n")
    return INCOMPLETE if problem else DONE


def _first_problem(runs: list[PlannedRun], play: Callable[[PlannedRun], int]) -> str:
    """Play run after run; what stops one stops all, since it would stop the next as well."""
    num_errored = 0
    for run in runs:
        try:
            errored = play(run)
        except (EvaluationStoppedError, ResultsWriteError) as error:
            return f"{error}\nThe same command plays what is missing"
        num_errored += errored
    if num_errored:
        return f"{num_errored} episodes Errored; the same command plays them again"
    return ""


def _play(run: PlannedRun, options: EvaluationOptions) -> int:
    """Play what is missing of a run; return how many of its episodes Errored."""
    store = ResultsStore(run.settings.folder, run.header)
    progress = Progress(run.header.name, len(run.keys), sys.stderr)
    wanted = set(run.keys)
    progress.resume(tuple(record for record in store.resumed if record.key in wanted))
    sys.stderr.write(f"{_introduction(run, len(wanted))}\n")
    limits = Limits(patience_s=options.patience_s)
    try:
        Evaluation(store, run.settings, progress, limits).play(run.keys, options.num_workers)
    finally:
        store.close()
        progress.finish()
    return progress.num_errored


def _introduction(run: PlannedRun, num_episodes: int) -> str:
    """What is about to be played, with the conventions that go wrong silently."""
    options, server = run.header.options, run.header.server
    return (
        f"{run.header.name}: {num_episodes} episodes, {options['pacing']}, assets "
        f"{run.header.assets}; image chain: {options['image_chain_of_client']} here, "
        f"{server.get('image_chain', 'unknown')} at the server; gripper: {options['gripper']}"
    )


def _summary_of(run: PlannedRun) -> Summary:
    return summarise(load_run(run.settings.folder), frozenset(run.keys))
