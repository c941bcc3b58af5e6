"""`deft-client eval SUITE...`: its options, the runs they ask for, and how those ended."""

import argparse
import signal
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any, NoReturn

from deft_client.commands.connection import (
    add_connection_options,
    connection_settings,
    parse_connected,
    reported,
)
from deft_core.methods import method_text
from deft_core.peers.conventions import ClientChain, Convention, Gripper
from deft_core.program import CommandParser
from deft_core.types import ActOptions, ChunkBlending, ServerInfo
from deft_libero.errors import EvaluationStoppedError, PlanError, ResultsWriteError, SelectionError
from deft_libero.evaluation.evaluate import Evaluation
from deft_libero.evaluation.plan import Entry, Ledger, Plan, differences, load_plan, require_apart
from deft_libero.evaluation.ray_workers import RayActors
from deft_libero.evaluation.runs import DEFAULT_SEED, RunConfig, VideoChoice, in_turn, plan_runs
from deft_libero.evaluation.selection import LIBERO, TRAINED
from deft_libero.evaluation.workers import Processes, Workplace
from deft_libero.policies.source import PROFILES, PolicySource, check_chain, describe_server
from deft_libero.processes import limit_threads
from deft_libero.report.summary import summarise
from deft_libero.report.tables import terminal_table
from deft_libero.results.store import HEADER_FILE, load_run


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; exits, or raises SelectionError, if it cannot be understood."""
    parser = _parser(CommandParser("deft-client eval", **_DESCRIBED))
    options = parse_connected(parser, arguments)
    if options.plan is not None:
        _refuse_beside_plan(parser, options)
        return options
    if not options.suites:
        parser.error("the following arguments are required: SUITE")
    if options.decoding == []:
        parser.error("argument --decoding: expected at least one METHOD")
    return _complete(options)


def _complete(options: argparse.Namespace) -> argparse.Namespace:
    _check_numbers(options)
    options.suites = tuple(dict.fromkeys(options.suites))
    # Without a method the server chooses.
    options.decoding = tuple(dict.fromkeys(map(method_text, options.decoding or ()))) or (None,)
    options.video, options.source = VideoChoice(options.video), _source(options)
    options.blending = ChunkBlending(options.blending or options.source.profile.blending)
    return options


_DESCRIBED: dict[str, Any] = {
    "description": "Play LIBERO episodes against a policy server. Results are kept episode by "
    "episode; the same command again plays only what is missing.",
    "epilog": "exit code: 0 all played, 1 could not start, 2 asked wrongly, 3 some episodes are "
    "missing or Errored",
    "allow_abbrev": False,
}


def _parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.set_defaults(held_out_attempt=None, plan_notes={})
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help="libero_object, libero_goal, ...; the server's URL may stand among them, as --url",
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
    group.add_argument(
        "--plan", type=Path, metavar="FILE",
        help="play what a committed plan lists, in place of suites and options: the one way to "
        "play the initial states that a policy holds out, once",
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
        "--local-policy", metavar="MODULE:FUNCTION",
        help="answer in this process instead of asking a server",
    )  # fmt: skip
    group.add_argument(
        "--decoding",
        nargs="+",
        metavar="METHOD",
        help="decoding methods to compare, a run each: NAME, NAME:KNOB=VALUE,... or a .toml file",
    )
    group.add_argument("--radius", type=int, metavar="BINS", help="their acceptance radius")
    group.add_argument(
        "--reasoning", action="store_true",
        help="have a policy that acts at once think aloud first, where it can",
    )  # fmt: skip
    group.add_argument("--statistics-key", metavar="KEY", help="(default: the suite's)")
    group.add_argument(
        "--image-chain", choices=[chain.value for chain in ClientChain],
        help="what this side does to frames (default: as the profile says)",
    )  # fmt: skip
    group.add_argument(
        "--gripper", choices=[one.value for one in Gripper],
        help="what the last number of an action means (default: as the profile says)",
    )  # fmt: skip
    group.add_argument(
        "--wrist", action="store_true",
        help="show the wrist camera, too (default: as the profile says)",
    )  # fmt: skip
    group.add_argument(
        "--executed-steps", type=int, metavar="N",
        help="actions of an answer to execute before asking again (default: as the profile says)",
    )  # fmt: skip


def _add_simulation(group: Group) -> None:
    group.add_argument(
        "--real-time", action="store_true",
        help="the simulator goes on at 20 Hz, and the arm holds until an answer comes",
    )  # fmt: skip
    group.add_argument(
        "--blending", "--seam", choices=[one.value for one in ChunkBlending],
        help="how one chunk of actions gives way to the next (default: as the profile says)",
    )  # fmt: skip
    group.add_argument(
        "--lock-step", action="store_true",
        help="the simulator waits for answers: the default, or beside --real-time a run of its own",
    )  # fmt: skip
    group.add_argument(
        "--network-delay-ms", type=float, default=0.0, metavar="MS", help="added to every answer"
    )
    group.add_argument("--seed", type=int, default=DEFAULT_SEED, help="(default: %(default)s)")
    group.add_argument("--step-limit", type=int, metavar="N", help="(default: the suite's)")
    group.add_argument(
        "--widen-cm", type=float, default=0.0, metavar="CM",
        help="move things by up to this far from where the initial states have them",
    )  # fmt: skip
    group.add_argument(
        "--assets", type=Path, metavar="FOLDER",
        help="other assets than LIBERO's own",
    )  # fmt: skip
    group.add_argument(
        "--any-mujoco", action="store_true",
        help="play also suites that the installed MuJoCo is known to upset",
    )  # fmt: skip
    group.add_argument(
        "--fast", action="store_true",
        help="step the physics by a shorter way than robosuite's, the same up to the solver's "
        "tolerance",
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
    for name, least in (
        ("workers", 1),
        ("step_limit", 1),
        ("executed_steps", 1),
        ("radius", 0),
    ):
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
    profile = _profile(options)
    if profile.name == "openpi" and options.url.startswith("ws"):
        options.url = "http" + options.url.removeprefix("ws")  # as openpi's own clients write it
    return PolicySource(
        url=options.url,
        profile=profile,
        options=act_options,
        settings=connection_settings(options),
        stream=options.stream,
        factory=options.local_policy or "",
        network_delay_ms=options.network_delay_ms,
    )


def _profile(options: argparse.Namespace) -> Convention:
    profile = PROFILES[options.profile]
    if options.image_chain is not None:
        profile = replace(profile, client_chain=ClientChain(options.image_chain))
    if options.gripper is not None:
        profile = replace(profile, gripper=Gripper(options.gripper))
    if options.wrist:
        profile = replace(profile, wrist_camera=True)
    if options.executed_steps is not None:
        profile = replace(profile, executed_steps=options.executed_steps)
    return profile


DONE, INCOMPLETE, INTERRUPTED = 0, 3, 130


def main(arguments: list[str]) -> int:
    """Evaluate; return the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return reported(lambda: _evaluate(read_options(arguments)), "eval")
    except KeyboardInterrupt:
        sys.stderr.write(
            "deft-client eval: interrupted; the finished episodes are kept, the same command goes "
            "on from there\n"
        )
        return INTERRUPTED


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _evaluate(options: argparse.Namespace) -> int:
    limit_threads()
    if options.plan is not None:
        return _evaluate_plan(load_plan(options.plan), options)
    info = describe_server(options.source)
    runs = _plan_runs(options, info)
    with closing(_workplace(options)) as place:
        problem = _play(runs, info, place, options)
    return _conclude(runs, problem, options)


def _plan_runs(options: argparse.Namespace, info: ServerInfo | None) -> list[RunConfig]:
    source: PolicySource = options.source
    check_chain(source.profile, info)
    if thinks_aloud(options.reasoning, info):
        asked = replace(source.options, want_reasoning=True)
        options.source = replace(source, options=asked)
    return plan_runs(options, info)


def _workplace(options: argparse.Namespace) -> Workplace:
    return Processes() if options.ray is None else RayActors(options.ray)


def _conclude(runs: list[RunConfig], problem: str, options: argparse.Namespace) -> int:
    """Print what was played, and what went wrong; return the exit code."""
    played = [run for run in runs if (run.folder / HEADER_FILE).exists()]
    summaries = [summarise(load_run(run.folder), frozenset(run.keys)) for run in played]
    if any(summary.tasks for summary in summaries):
        sys.stdout.write("\n" + terminal_table(summaries))
        sys.stdout.write(f"next: deft-client report {quote(str(options.out))} --out report.html\n")
    if problem:
        sys.stderr.write(f"deft-client eval: {problem}\n")
    return INCOMPLETE if problem else DONE


def thinks_aloud(is_asked: bool, info: ServerInfo | None) -> bool:
    """Whether answers are to come with a reasoning: one that always thinks is never asked not to.

    Raises `SelectionError` where it is asked of a policy that writes none.
    """
    if info is None or info.max_tokens is None:
        if is_asked:
            raise SelectionError("--reasoning: the policy there writes none; leave it out")
        return False
    return is_asked or not info.thinks_when_asked


def _play(
    runs: list[RunConfig], info: ServerInfo | None, place: Workplace, options: argparse.Namespace
) -> str:
    """Play what is missing, the runs in turn; return what went wrong.

    What stops one run stops all, since it would stop the next as well.
    """
    evaluations: dict[Path, Evaluation] = {}
    try:
        for run, keys in in_turn(runs):
            if run.folder not in evaluations:
                evaluations[run.folder] = Evaluation(run, info, options.patience)
            evaluations[run.folder].play(keys, place, options.workers)
    except (EvaluationStoppedError, ResultsWriteError) as error:
        return f"{error}\nThe same command plays what is missing"
    finally:
        for one in evaluations.values():
            one.close()
    num_errored = sum(one.num_errored for one in evaluations.values())
    if num_errored:
        return f"{num_errored} episodes Errored; the same command plays them again"
    return ""


# What the command line says beside a plan: where the work is done, not what is played.
_BESIDE_PLAN = (
    *("plan", "url", "timeout", "api_key_file", "ca_file", "workers", "ray", "out", "video"),
    "patience",
)


class _EntryParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SelectionError(message)


def _refuse_beside_plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name, value in vars(options).items():
        if name not in _BESIDE_PLAN and value not in (parser.get_default(name), []):
            flag = "SUITE" if name == "suites" else "--" + name.replace("_", "-")
            raise SelectionError(f"{flag} cannot be given beside --plan: the plan says it")


def _evaluate_plan(plan: Plan, options: argparse.Namespace) -> int:
    """Play the entries that fit the server; the ledger notes each before its first episode."""
    ledger = Ledger(plan, options.out)
    planned: list[tuple[Entry, list[RunConfig], ServerInfo | None]] = []
    left = []
    for entry in plan.entries:
        with plan.naming(entry):
            asked = _entry_options(plan, entry, options)
            info = describe_server(asked.source)
            if differing := differences(entry, info):
                if not ledger.is_complete(entry):
                    left.append(f"entry {entry.name!r} is not of this server: {differing}")
                continue
            runs = _plan_runs(asked, info)
            ledger.check(entry, runs)
            planned.append((entry, runs, info))
    if left and not planned:
        raise PlanError("\n".join([f"{plan.path}: nothing was played", *left]))
    require_apart(plan, {entry.name: runs for entry, runs, _ in planned})
    problem = ""
    with closing(_workplace(options)) as place:
        for entry, runs, info in planned:
            ledger.begin(entry, runs)
            if problem := _play(runs, info, place, options):
                break
            ledger.complete(entry)
    if left and not problem:
        problem = "\n".join([*left, "Give the same command with the server of these entries"])
    code = _conclude([run for _, runs, _ in planned for run in runs], problem, options)
    sys.stdout.write(f"next: commit {ledger.path}\n")
    return code


def _entry_options(plan: Plan, entry: Entry, given: argparse.Namespace) -> argparse.Namespace:
    """The options of an entry, with those of the command line that say where it is played."""
    options = _parser(_EntryParser(allow_abbrev=False)).parse_args(entry.words())
    for name in _BESIDE_PLAN:
        setattr(options, name, getattr(given, name))
    options.held_out_attempt = plan.attempt
    options.plan_notes = {"plan": f"{plan.path.name} sha256 {plan.digest}", "entry": entry.name}
    return _complete(options)
