"""`deft-client eval SUITE...`: its options, the runs they ask for, and how those ended."""

import argparse
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType

from deft_client.chunks import Seam
from deft_client.commands.connection import UsageError, add_connection_options, connection_settings
from deft_client.commands.methods import method_text
from deft_client.commands.program import CommandParser
from deft_client.errors import DeftError
from deft_client.libero.errors import (
    EvaluationStoppedError,
    ProfileError,
    ResultsMismatchError,
    ResultsWriteError,
    SelectionError,
    SimulationError,
    UnknownSuiteError,
    UnknownTaskError,
)
from deft_client.libero.evaluation.evaluate import Evaluation, Limits
from deft_client.libero.evaluation.local_workers import Processes
from deft_client.libero.evaluation.player import Pacing, VideoChoice
from deft_client.libero.evaluation.pool import Workplace
from deft_client.libero.evaluation.progress import ProgressLine
from deft_client.libero.evaluation.ray_workers import RayActors
from deft_client.libero.evaluation.runs import EvaluationOptions, PlannedRun, plan_runs
from deft_client.libero.evaluation.selection import LIBERO, TRAINED
from deft_client.libero.policies.profiles import (
    PROFILES,
    ClientChain,
    GripperConvention,
    Profile,
    check_chain,
)
from deft_client.libero.policies.source import PolicySource, describe_server
from deft_client.libero.processes import limit_threads
from deft_client.libero.report.summary import RunSummary, summarise
from deft_client.libero.report.tables import terminal_table
from deft_client.libero.results.store import ResultsStore, load_run
from deft_client.libero.simulator.environment import EnvironmentSettings
from deft_client.types import ActOptions


def read_options(arguments: list[str]) -> EvaluationOptions:
    """Parse the command line; exits, or raises SelectionError, if it cannot be understood."""
    options = _parser().parse_args(arguments)
    _check_numbers(options)
    pacings = [Pacing.LOCK_STEP] if options.lock_step or not options.real_time else []
    pacings += [Pacing.REAL_TIME] if options.real_time else []
    return EvaluationOptions(
        suites=tuple(dict.fromkeys(options.suites)),
        folder=options.out,
        source=_source(options),
        simulator=options.environment,
        environment=EnvironmentSettings(
            widen_metres=options.widen_cm / 100, assets_folder=options.assets
        ),
        tasks=options.tasks,
        trials=options.trials,
        num_episodes=options.episodes,
        decodings=tuple(dict.fromkeys(map(method_text, options.decoding or ()))) or (None,),
        pacings=pacings,
        seam=Seam(options.seam),
        step_limit=options.step_limit,
        seed=options.seed,
        video=VideoChoice(options.video),
        num_workers=options.workers,
        ray=options.ray,
        patience_s=options.patience,
        any_mujoco=options.any_mujoco,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "deft-client eval",
        description="Play LIBERO episodes against a policy server. Results are kept episode by "
        "episode; the same command again plays only what is missing.",
        epilog="exit code: 0 all played, 1 could not start, 2 asked wrongly, 3 some episodes are "
        "missing or Errored",
        allow_abbrev=False,
    )
    parser.add_argument(
        "suites", nargs="+", metavar="SUITE", help="libero_object, libero_goal, ..."
    )
    _add_episodes(parser.add_argument_group("which episodes"))
    group = parser.add_argument_group("who answers")
    add_connection_options(group)  # type: ignore[arg-type]
    _add_policy(group)
    _add_simulation(parser.add_argument_group("how they are played"))
    _add_work(parser.add_argument_group("how the work is done"))
    return parser


Group = argparse._ArgumentGroup


def _add_episodes(group: Group) -> None:
    group.add_argument("--tasks", metavar="0,3", help=f"numbers of tasks, or {TRAINED}: those the "
                       "policy says it was trained on (default: all)")  # fmt: skip
    group.add_argument(
        "--trials", metavar="40-49", help="numbers of initial states (default: all 50)"
    )
    group.add_argument(
        "--episodes", type=int, metavar="N",
        help="stop after N episodes per suite, spread evenly over the tasks",
    )  # fmt: skip


def _add_policy(group: Group) -> None:
    group.add_argument(
        "--profile", choices=list(PROFILES), default="deft",
        help="whose server it is, which settles protocol and conventions (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--stream", action="store_true",
        help="send observations to a Deft server through its WebSocket: shorter round trips",
    )  # fmt: skip
    group.add_argument(
        "--policy", metavar="NAME",
        help="answer in this process instead of asking a server: expert, or module:function",
    )  # fmt: skip
    group.add_argument(
        "--decoding",
        nargs="+",
        metavar="METHOD",
        help="decoding methods to compare, a run each: NAME, NAME:KNOB=VALUE,... or a .toml file",
    )
    group.add_argument("--radius", type=int, metavar="BINS", help="their acceptance radius")
    group.add_argument("--statistics-key", metavar="KEY", help="(default: the suite's)")
    group.add_argument(
        "--image-chain", choices=[chain.value for chain in ClientChain],
        help="what this side does to frames (default: as the profile says)",
    )  # fmt: skip
    group.add_argument(
        "--gripper", choices=[one.value for one in GripperConvention],
        help="what the last number of an action means (default: as the profile says)",
    )  # fmt: skip
    group.add_argument(
        "--executed-steps", type=int, metavar="N",
        help="actions of an answer to execute before asking again (default: as the profile says)",
    )  # fmt: skip


def _add_simulation(group: Group) -> None:
    group.add_argument(
        "--real-time", action="store_true",
        help="the simulator goes on at 20 Hz and holds the last action until an answer comes",
    )  # fmt: skip
    group.add_argument(
        "--seam", choices=[one.value for one in Seam], default=Seam.FREEZE.value,
        help="in real time, how one chunk of actions gives way to the next (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--lock-step", action="store_true",
        help="the simulator waits for answers: the default, or beside --real-time a run of its own",
    )  # fmt: skip
    group.add_argument(
        "--network-delay-ms", type=float, default=0.0, metavar="MS", help="added to every answer"
    )
    group.add_argument("--seed", type=int, default=7, help="(default: %(default)s)")
    group.add_argument("--step-limit", type=int, metavar="N", help="(default: the suite's)")
    group.add_argument(
        "--widen-cm", type=float, default=0.0, metavar="CM",
        help="move things by up to this far from where the initial states have them",
    )  # fmt: skip
    group.add_argument(
        "--assets", type=Path, metavar="FOLDER",
        help=f"other assets than LIBERO's own; stand-in: scenes of boxes and cylinders; {TRAINED}: "
        "whichever of the two the policy says it was trained on",
    )  # fmt: skip
    group.add_argument(
        "--any-mujoco", action="store_true",
        help="play also suites that the installed MuJoCo is known to upset",
    )  # fmt: skip
    group.add_argument(
        "--environment", default=LIBERO, metavar="MODULE:FUNCTION", help="another simulator"
    )


def _add_work(group: Group) -> None:
    group.add_argument(
        "--workers", type=int, default=1, metavar="N",
        help="episodes at the same time; with more than one, latency is that of a busy server "
        "and a busy machine (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--ray", metavar="ADDRESS",
        help="have the workers on a Ray cluster, a CPU each; the server's URL must be reachable "
        "from there",
    )  # fmt: skip
    group.add_argument(
        "--out", type=Path, default=Path("results"), metavar="DIR",
        help="folder of the results, a folder per run in it (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--video", choices=[choice.value for choice in VideoChoice], default="none",
        help="(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--patience", type=float, default=30.0, metavar="SECONDS",
        help="how long to wait for a server that went away (default: %(default)s)",
    )  # fmt: skip


def _check_numbers(options: argparse.Namespace) -> None:
    for name, least in (("workers", 1), ("step_limit", 1), ("executed_steps", 1), ("radius", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            flag = "--" + name.replace("_", "-")
            raise SelectionError(f"{flag} must be at least {least}, got {value}")
    if options.network_delay_ms < 0:
        raise SelectionError(
            f"--network-delay-ms must be 0 or more, got {options.network_delay_ms}"
        )


def _source(options: argparse.Namespace) -> PolicySource:
    act_options = ActOptions(
        statistics_key=options.statistics_key, radius=options.radius, want_trace=True
    )
    return PolicySource(
        url=options.url,
        profile=_profile(options),
        options=act_options,
        settings=connection_settings(options),
        stream=options.stream,
        factory=options.policy or "",
        name=(options.policy or "").rpartition(":")[2],
        network_delay_ms=options.network_delay_ms,
    )


def _profile(options: argparse.Namespace) -> Profile:
    profile = PROFILES[options.profile]
    if options.image_chain is not None:
        profile = replace(profile, client_chain=ClientChain(options.image_chain))
    if options.gripper is not None:
        profile = replace(profile, gripper=GripperConvention(options.gripper))
    if options.executed_steps is not None:
        profile = replace(profile, executed_steps=options.executed_steps)
    return profile


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
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _evaluate(read_options(arguments))
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
    source = options.source
    info = describe_server(source)
    check_chain(source.profile, info)
    runs = plan_runs(options, info)
    with closing(Processes() if options.ray is None else RayActors(options.ray)) as place:
        problem = _first_problem(runs, lambda run: _play(run, options, place))
    summaries = [_summary_of(run) for run in runs if (run.settings.folder / "run.json").exists()]
    if any(summary.tasks for summary in summaries):
        sys.stdout.write("\n" + terminal_table(summaries))
        sys.stdout.write(f"next: deft-client report {options.folder} --out report.html\n")
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


def _play(run: PlannedRun, options: EvaluationOptions, place: Workplace) -> int:
    """Play what is missing of a run; return how many of its episodes Errored."""
    store = ResultsStore(run.settings.folder, run.header)
    wanted = set(run.keys)
    sys.stderr.write(f"{_introduction(run, len(wanted))}\n")
    sys.stderr.writelines(f"{warning}\n" for warning in run.warnings)
    progress = ProgressLine(run.header.name, len(wanted), sys.stderr)
    progress.resume([record for record in store.resumed if record.key in wanted])
    limits = Limits(patience_s=options.patience_s)
    try:
        evaluation = Evaluation(store, run.settings, progress, limits)
        evaluation.play(run.keys, place, options.num_workers)
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


def _summary_of(run: PlannedRun) -> RunSummary:
    return summarise(load_run(run.settings.folder), frozenset(run.keys))
