"""`deft-client load [URL]`: how well does a running server answer a fleet of robots?

Robots that do not exist send pictures of noise, or recorded frames, at a fixed rate, each in a
session of its own. A robot has one frame on its way: what falls due meanwhile is left out, and
counted as not sent. With --find: how many such robots does the server carry?
"""

import argparse
import json
import math
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from deft_client.client import PolicyClient
from deft_client.commands.connection import (
    add_connection_options,
    add_url_word,
    connection_settings,
    parse_connected,
    read_api_keys,
    reported,
)
from deft_client.commands.frames import noise_frames, recorded_frames, usual_options
from deft_client.errors import AnswerTimeoutError, DeadlineMissedError, ProblemError
from deft_client.settings import ClientSettings, Retries
from deft_core.datasets.flags import add_camera_flag, read_cameras
from deft_core.errors import DeftError, UsageError
from deft_core.measures.table import markdown_table
from deft_core.program import CommandParser
from deft_core.types import ActOptions, Observation, ServerInfo

MOST_ROBOTS = 256
MOST_SECONDS = 3600.0
MOST_RATE_HZ = 1000.0
ROBOTS, SECONDS = 4, 10.0
FIND_SECONDS = 5.0  # for each number of robots
CARRIED_SHARE = 0.99  # of the frames must be answered in time
PROGRESS_S = 2.0
PICTURES_KEPT = 8  # of each robot; it sends them in turn
LATE = "late"


@dataclass
class Robot:
    """What became of one robot's frames."""

    name: str
    wanted: int
    outcomes: Counter[str] = field(default_factory=Counter)  # answered, late, or why refused
    latencies_ms: list[float] = field(default_factory=list)  # of the answered ones

    @property
    def answered(self) -> int:
        """How many frames got their actions in time."""
        return self.outcomes["answered"]

    @property
    def refused(self) -> dict[str, int]:
        """How many frames were refused, by reason."""
        known = ("answered", LATE)
        return {reason: count for reason, count in self.outcomes.items() if reason not in known}

    def answered_within(self, deadline_ms: float) -> int:
        """How many frames got their actions within a time, on the robot's clock."""
        return sum(one <= deadline_ms for one in self.latencies_ms)

    def percentile_ms(self, percent: float) -> float | None:
        """Return a percentile of the time to an answer; None where nothing was answered."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else None

    def as_json(self) -> dict[str, object]:
        """Return one entry of the list that `--json` writes."""
        return {
            "robot": self.name,
            "wanted": self.wanted,
            "sent": self.outcomes.total(),
            "answered": self.answered,
            "late": self.outcomes[LATE],
            "refused": self.refused,
            **{f"p{percent}_ms": self.percentile_ms(percent) for percent in (50, 95, 99)},
        }


def main(arguments: list[str]) -> int:
    """Print what became of the frames; 1 where none was answered."""
    options = parse_connected(_parser(), arguments)
    return reported(lambda: _load(options), "load")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("deft-client load", description=__doc__)
    add_url_word(parser)
    add_connection_options(parser, keys="; of several, one a line, robots take them in turn")
    parser.add_argument(
        "--robots", type=_number(int, 1, MOST_ROBOTS), metavar="N",
        help=f"robots (default: {ROBOTS}); with --find, at most so many (default: {MOST_ROBOTS})",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=_number(float, 0.01, MOST_RATE_HZ), default=5.0, metavar="HZ",
        help="frames a second of each robot (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--deadline-ms", type=_number(float, 1, 1e6), metavar="MS",
        help="deadline of each frame; without one frames wait as --timeout says, and with --find "
        "for a period",
    )  # fmt: skip
    parser.add_argument(
        "--find", action="store_true",
        help=f"find how many robots get {100 * CARRIED_SHARE:g}%% of their answers in the deadline",
    )  # fmt: skip
    parser.add_argument(
        "--recording", type=Path, metavar="DATA",
        help="send the frames of a data set of any known format, an episode to each robot",
    )  # fmt: skip
    add_camera_flag(parser)
    parser.add_argument(
        "--reasoning-share", type=_number(float, 0, 1), default=0.0, metavar="F",
        help="share of the robots that ask for reasoning, without a deadline (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=_number(float, 0.1, MOST_SECONDS), metavar="S",
        help=f"how long (default: {SECONDS:g}; with --find {FIND_SECONDS:g} for each number)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument(
        "--yes-i-own-it", action="store_true",
        help="allow a server whose address is neither private nor of this machine",
    )  # fmt: skip
    return parser


def _number(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    """Return a reader of numbers within a range, for argparse."""

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:  # NaN, too
            raise argparse.ArgumentTypeError(f"must be {least:g} to {most:g}, got {text}")
        return value

    read.__name__ = "number"
    return read


@dataclass(frozen=True)
class Fleet:
    """What the robots of one command have in common."""

    url: str
    settings: Sequence[ClientSettings]  # of the robots in turn
    asked: ActOptions
    frames: Callable[[int], Sequence[Observation]]  # of a robot by its number
    rate_hz: float
    seconds: float
    reasoning_share: float


def _load(options: argparse.Namespace) -> int:
    if options.find and options.reasoning_share:
        raise UsageError("--find counts frames in their deadline; reasoning robots have none")
    # One attempt: what a server refuses is to be seen. But first it may load its policy.
    one_try = Retries(attempts=1, loading_s=0.0)
    settings = [
        replace(connection_settings(options, api_key=key), retries=one_try)
        for key in read_api_keys(options)
    ]
    if not options.yes_i_own_it:
        require_private(options.url)
    with PolicyClient(options.url, replace(settings[0], retries=Retries())) as policy:
        info = policy.info()
    deadline_ms = options.deadline_ms
    if options.find and deadline_ms is None:
        deadline_ms = 1000 / options.rate
    fleet = Fleet(
        url=options.url,
        settings=settings,
        asked=replace(usual_options(info), deadline_ms=deadline_ms),
        frames=_frames(options, info),
        rate_hz=options.rate,
        seconds=options.seconds or (FIND_SECONDS if options.find else SECONDS),
        reasoning_share=options.reasoning_share,
    )
    result = {
        "url": fleet.url,
        "policy": info.policy,
        "rate_hz": fleet.rate_hz,
        "deadline_ms": deadline_ms,
        "frames": "noise" if options.recording is None else str(options.recording),
    }
    outcome = _find(fleet, options) if options.find else _play_once(fleet, options)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps({**result, **outcome}, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {options.json}: {error}") from error
    return 0 if outcome.get("carries", outcome.get("answered")) else 1


def _frames(
    options: argparse.Namespace, info: ServerInfo
) -> Callable[[int], Sequence[Observation]]:
    if options.recording is None:
        return lambda number: noise_frames(info, number, PICTURES_KEPT)
    episodes = recorded_frames(options.recording, read_cameras(options))
    return lambda number: episodes[number % len(episodes)]


def _play_once(fleet: Fleet, options: argparse.Namespace) -> dict[str, object]:
    robots, seconds = _play(fleet, options.robots or ROBOTS, is_shown=True)
    sys.stdout.write(summary(robots, seconds))
    return {
        "reasoning_share": fleet.reasoning_share,
        "seconds": seconds,
        "answered": sum(robot.answered for robot in robots),
        "robots": [robot.as_json() for robot in robots],
    }


def _find(fleet: Fleet, options: argparse.Namespace) -> dict[str, object]:
    """Find the most robots that the server carries: doubled while it does, then halved apart."""
    shares: dict[int, float] = {}
    most, deadline_ms = options.robots or MOST_ROBOTS, fleet.asked.deadline_ms or math.inf

    def carries(num_robots: int) -> bool:
        shares[num_robots] = _share_in_time(fleet, num_robots, deadline_ms)
        if shares[num_robots] < CARRIED_SHARE:  # something else may have wanted the machine
            again = _share_in_time(fleet, num_robots, deadline_ms)
            shares[num_robots] = max(shares[num_robots], again)
        return shares[num_robots] >= CARRIED_SHARE

    carried = largest(carries, most)
    sys.stdout.write(found_text(carried, shares, most, fleet.rate_hz, deadline_ms))
    return {"carries": carried, "shares_in_time": {str(num): shares[num] for num in sorted(shares)}}


def largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` of which something holds, or 0.

    It is asked about few numbers, as if what holds of one held of every smaller one.
    """
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def found_text(
    carried: int, shares: dict[int, float], most: int, rate_hz: float, deadline_ms: float
) -> str:
    """Return what may be said of the most robots that were carried."""
    what = f"at {rate_hz:g} Hz with {100 * CARRIED_SHARE:g}% in {deadline_ms:g} ms"
    if not carried:
        return f"carries      not one robot {what}: {100 * shares[1]:.1f}% were in time\n"
    text = f"carries      {carried} robots {what}"
    if carried + 1 in shares:
        return f"{text}; of {carried + 1} robots {100 * shares[carried + 1]:.1f}% were in time\n"
    return f"{text}; {most} are the most that were asked for\n"


def _share_in_time(fleet: Fleet, num_robots: int, deadline_ms: float) -> float:
    """Return the share of the frames that fell due and were answered in time."""
    robots, _ = _play(fleet, num_robots)
    in_time = sum(robot.answered_within(deadline_ms) for robot in robots)
    share = in_time / sum(robot.wanted for robot in robots)
    sys.stderr.write(f"{num_robots} robots: {100 * share:.1f}% in {deadline_ms:g} ms\n")
    return share


def require_private(url: str) -> None:
    """Raise `UsageError` for a server that may be somebody else's."""
    host = urlsplit(url).hostname or ""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"cannot find the address of {host}: {error}") from error
    for address in {str(entry[4][0]) for entry in entries}:
        ip = ip_address(address.partition("%")[0])
        if not (ip.is_private or ip.is_loopback):
            raise UsageError(
                f"{host} has the public address {address}; a load on a server of somebody else is "
                "an attack: give --yes-i-own-it if it is yours"
            )


def _play(fleet: Fleet, num_robots: int, is_shown: bool = False) -> tuple[list[Robot], float]:
    """Let the robots run, and return what became of their frames and the seconds it took."""
    wanted = max(1, math.floor(fleet.seconds * fleet.rate_hz))
    num_reasoning = round(num_robots * fleet.reasoning_share)
    stopped = threading.Event()
    robots = []
    prepared = []
    for number in range(num_robots):
        reasons = number < num_reasoning
        robot = Robot(f"{number} (reasoning)" if reasons else f"{number}", wanted)
        asked = replace(fleet.asked, deadline_ms=None, want_reasoning=True) if reasons else None
        policy = PolicyClient(fleet.url, fleet.settings[number % len(fleet.settings)])
        with suppress(DeftError):  # a robot is connected before it moves
            policy.ping()
        robots.append(robot)
        prepared.append((robot, policy, fleet.frames(number), asked or fleet.asked))
    begins = time.monotonic()
    threads = []
    for number, one in enumerate(prepared):
        first = begins + random.Random(number).random() / fleet.rate_hz
        arguments = (*one, first, fleet.rate_hz, stopped)
        threads.append(threading.Thread(target=_run, args=arguments, name=f"robot-{number}"))
        threads[-1].start()
    try:
        while any(thread.is_alive() for thread in threads):
            left_s = begins + fleet.seconds - time.monotonic()
            if left_s <= 0:
                break
            stopped.wait(min(PROGRESS_S, left_s))
            if is_shown:
                _show_progress(robots, time.monotonic() - begins, fleet.seconds)
    except KeyboardInterrupt:
        if not is_shown:
            raise
        sys.stderr.write("\nstopped; what was measured until now:\n")
    finally:
        seconds = time.monotonic() - begins
        stopped.set()
        for thread in threads:
            thread.join()
    return robots, min(seconds, fleet.seconds)


def _show_progress(robots: Sequence[Robot], seconds: float, of_seconds: float) -> None:
    total = sum((robot.outcomes for robot in robots), Counter[str]())
    refused = total.total() - total["answered"] - total[LATE]
    sys.stderr.write(
        f"{seconds:4.0f} of {of_seconds:g} s: {total['answered']} answered, "
        f"{total[LATE]} late, {refused} refused\n"
    )


def _run(
    robot: Robot,
    policy: PolicyClient,
    frames: Sequence[Observation],
    asked: ActOptions,
    first: float,
    rate_hz: float,
    stopped: threading.Event,
) -> None:
    """Send a robot's frames, each when it is due, but never two at a time."""
    number = 0
    with policy:
        while number < robot.wanted:
            if stopped.wait(max(0.0, first + number / rate_hz - time.monotonic())):
                return
            robot.outcomes[_send(robot, policy, frames[number % len(frames)], asked)] += 1
            passed = math.ceil((time.monotonic() - first) * rate_hz)
            number = max(number + 1, passed)


def _send(robot: Robot, policy: PolicyClient, frame: Observation, asked: ActOptions) -> str:
    """Send one frame, and return what became of it."""
    started = time.perf_counter()
    try:
        policy.act(frame, asked)
    except (DeadlineMissedError, AnswerTimeoutError):
        return LATE
    except ProblemError as error:
        return error.title
    except DeftError as error:
        return type(error).__name__
    robot.latencies_ms.append(1000 * (time.perf_counter() - started))
    return "answered"


def summary(robots: Sequence[Robot], seconds: float) -> str:
    """Return the table by robot, and what it says of them together."""
    columns = ("robot", "wanted", "not sent", "answered", LATE, "refused",
               "p50 ms", "p95 ms", "p99 ms")  # fmt: skip
    rows = []
    for robot in robots:
        not_sent = robot.wanted - robot.outcomes.total()
        counts = (robot.wanted, not_sent, robot.answered, robot.outcomes[LATE],
                  sum(robot.refused.values()))  # fmt: skip
        times = [robot.percentile_ms(percent) for percent in (50, 95, 99)]
        shown = ["–" if value is None else f"{value:.0f}" for value in times]
        rows.append([robot.name, *map(str, counts), *shown])
    total = sum((robot.outcomes for robot in robots), Counter[str]())
    answered = [robot.answered for robot in robots]
    lines = [
        markdown_table(columns, rows, aligned=True),
        f"answered     {total['answered']} of {sum(robot.wanted for robot in robots)} wanted, "
        f"{total['answered'] / seconds:.1f} a second\n",
        f"of a robot   {min(answered)} at least, {max(answered)} at most\n",
    ]
    reasons = Counter({name: count for name, count in total.items() if name != "answered"})
    lines += [f"not answered {count} x {name}\n" for name, count in reasons.most_common()]
    return "".join(lines)
