"""How many replicas a fleet needs: the scheduler runs against invented robots."""

import argparse
import math
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path

from deft_client.measures.table import markdown_table
from deft_policies.commands.parse import parse_command
from deft_policies.errors import PolicyError
from deft_server.serving.queue import QueueRules
from deft_server.settings import Settings, SettingsError
from scripts.plan.service_times import ServiceTimes, measure, parse, read_log
from scripts.plan.simulate import (
    Capacity,
    Fleet,
    FleetGoal,
    Forecast,
    fewest_replicas,
    simulate,
)

FOUND, NOT_FOUND, ASKED_WRONGLY = 0, 1, 2
_MEASURED_SIZES = (1, 2, 4, 8, 16, 32)
_EPILOG = (
    "Service times are those of the policy named by flags, measured here, unless --service-ms or "
    "--log gives others. Exit code: 0 where the goal is met, 1 where it is not."
)


def main(arguments: list[str]) -> int:
    """Plan; return the exit code."""
    try:
        given, service = _read(arguments)
        fleet, capacity = _fleet(given), _capacity(given, service)
        goal = FleetGoal(given.p99_ms / 1000, given.answered / 100)
        return _report(given, fleet, capacity, goal)
    except (SettingsError, PolicyError) as error:
        sys.stderr.write(f"python -m scripts.plan: {error}\n")
        return ASKED_WRONGLY


def _read(arguments: list[str]) -> tuple[argparse.Namespace, ServiceTimes]:
    """Parse the command line and find out the service times it speaks of."""
    parser = _parser()
    if not {"-h", "--help"} & set(arguments):  # the help is that with the policy's flags
        first, rest = parser.parse_known_args(arguments)
        if rest and (first.service_ms or first.log):
            parser.error(
                f"with --service-ms or --log nothing is loaded; leave out {' '.join(rest)}"
            )
        if first.service_ms:
            return first, parse(first.service_ms)
        if first.log:
            return first, read_log(first.log)
    command = parse_command(parser, arguments)
    given = command.namespace
    sizes = [size for size in _MEASURED_SIZES if size < given.max_batch] + [given.max_batch]
    sys.stderr.write(f"measuring {given.policy} in batches of {_words(sizes)}\n")
    return given, measure(command.load(), sizes, given.rounds)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m scripts.plan", description=__doc__, epilog=_EPILOG, allow_abbrev=False
    )
    settings, fleet = Settings(), Fleet(1, 1.0)
    group = parser.add_argument_group("the robots")
    _add(group, "--robots", _whole, None, "how many")
    _add(group, "--hz", _above_0, None, "frames per second of each")
    _add(group, "--deadline-ms", _above_0, math.inf, "of every frame")
    _add(group, "--jitter", _share, fleet.jitter, "how irregularly they send, in periods")
    _add(group, "--seconds", _above_0, fleet.seconds, "how long they are watched")
    group = parser.add_argument_group("what is wanted")
    _add(group, "--p99-ms", _above_0, None, "99 of 100 answers come within this")
    _add(group, "--answered", _above_0, 99.9, "percent of the frames that are answered")
    group = parser.add_argument_group("who answers")
    _add(group, "--replicas", _whole, 0, "forecast for so many, rather than search; 0 searches")
    _add(group, "--most-replicas", _whole, 256, "where the search ends")
    _add(group, "--max-batch", _whole, settings.max_batch, "as for deft serve")
    _add(group, "--max-waiting", _whole, settings.max_waiting, "as for deft serve")
    _add(group, "--patience-ms", _above_0, settings.patience_ms, "as for deft serve")
    _add(group, "--front-ms", float, 0.0, "processor time of the front per frame")
    _add(group, "--added-ms", float, 0.0, "what else a frame spends on its way")
    group = parser.add_argument_group("how long a batch takes")
    group.add_argument("--service-ms", metavar="MS", help="24, or by batch size: 1:24,8:60")
    group.add_argument("--log", type=Path, help="the log of a deft serve --log-batches")
    _add(group, "--rounds", _whole, 10, "measured batches of each size")
    return parser


def _add(
    group: argparse._ArgumentGroup,
    flag: str,
    read: Callable[[str], float],
    default: float | None,
    about: str,
) -> None:
    """Add a number; one without a default must be given."""
    shown = about if default is None else f"{about} [%(default)s]"
    needed = default is None
    group.add_argument(flag, type=read, default=default, required=needed, metavar="N", help=shown)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def _above_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    value = _above_0(text)
    if value > 1:
        raise ArgumentTypeError(f"{text!r} is above 1")
    return value


def _fleet(given: argparse.Namespace) -> Fleet:
    if not given.robots or given.robots * given.hz * given.seconds < 100:
        raise SettingsError("fewer than 100 frames tell nothing; give more robots or --seconds")
    return Fleet(
        num_robots=given.robots,
        rate_hz=given.hz,
        deadline_s=given.deadline_ms / 1000,
        jitter=given.jitter,
        seconds=given.seconds,
        warm_up_s=given.seconds / 10,
    )


def _capacity(given: argparse.Namespace, service: ServiceTimes) -> Capacity:
    if given.max_batch > service.max_batch:
        raise SettingsError(
            f"--max-batch {given.max_batch}, but no batch above {service.max_batch} was timed: "
            f"give its time too, or --max-batch {service.max_batch}"
        )
    rules = QueueRules(
        max_batch=given.max_batch,
        max_waiting=given.max_waiting,
        patience_s=given.patience_ms / 1000,
        num_replicas=max(1, given.replicas),
    )
    return Capacity(service, rules, given.front_ms / 1000, given.added_ms / 1000)


def _report(given: argparse.Namespace, fleet: Fleet, capacity: Capacity, goal: FleetGoal) -> int:
    """Print the forecast of one number of replicas, or the search for the fewest."""
    sys.stdout.write(describe_service(capacity.service) + "\n")
    if given.replicas:
        forecast = simulate(fleet, capacity)
        sys.stdout.write(table({given.replicas: forecast}) + "\n")
        sys.stdout.write(f"the goal is {'met' if goal.is_met(forecast) else 'missed'}\n")
        return FOUND if goal.is_met(forecast) else NOT_FOUND
    search = fewest_replicas(fleet, capacity, goal, given.most_replicas)
    sys.stdout.write(table(search.forecasts) + "\n")
    if search.num_replicas is None:
        tried = max(search.forecasts)
        why = limit_of(search.forecasts[tried], goal)
        sys.stdout.write(f"not met with {tried} replicas: {why}\n")
        return NOT_FOUND
    share = fleet.num_robots / search.num_replicas
    sys.stdout.write(f"{search.num_replicas} replicas, {share:.1f} robots each\n")
    return FOUND


def describe_service(service: ServiceTimes) -> str:
    """Return the times of a batch in one line."""
    parts = [
        f"{size}: {service.at(size, 0.5) * 1000:.1f} ({service.at(size, 0.99) * 1000:.1f})"
        for size in sorted(service.seconds)
    ]
    return "ms per batch, p50 (p99), by size: " + ", ".join(parts)


_COLUMNS: dict[str, Callable[[Forecast], str]] = {
    "p50 ms": lambda one: f"{one.at(0.5) * 1000:.1f}",
    "p99 ms": lambda one: f"{one.at(0.99) * 1000:.1f}",
    "answered": lambda one: f"{one.answered_share:.2%}",
    "superseded": lambda one: str(one.num_superseded),
    "refused": lambda one: str(one.num_refused),
    "missed": lambda one: str(one.num_missed),
    "batch": lambda one: f"{one.mean_batch:.2f}",
    "busy": lambda one: f"{one.replica_load:.0%}",
    "front": lambda one: f"{one.front_load:.0%}",
}


def table(forecasts: dict[int, Forecast]) -> str:
    """Return one line per number of replicas."""
    rows = [
        [str(count), *(cell(one) for cell in _COLUMNS.values())]
        for count, one in sorted(forecasts.items())
    ]
    return markdown_table(["replicas", *_COLUMNS], rows, aligned=True).rstrip()


def limit_of(forecast: Forecast, goal: FleetGoal) -> str:
    """Say what stands between a forecast and the goal."""
    if forecast.front_load >= 1:
        return f"the front is {forecast.front_load:.1f} times too busy; use several"
    if forecast.answered_share < goal.answered_share:
        return f"only {forecast.answered_share:.2%} of the frames are answered"
    return f"p99 is {forecast.at(0.99) * 1000:.1f} ms; a batch alone takes as long"


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
