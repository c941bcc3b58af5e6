"""`deft-client load URL`: how well does a running server answer a fleet of robots?

Robots that do not exist send pictures of noise at a fixed rate, each in a session of its own. A
robot has one frame on its way: what falls due meanwhile is left out, and counted as not sent.
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
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from deft_client.client import PolicyClient
from deft_client.commands.connection import reported
from deft_client.commands.frames import noise_frames
from deft_client.commands.program import CommandParser
from deft_client.errors import (
    AnswerTimeoutError,
    DeadlineMissedError,
    DeftError,
    ProblemError,
    UsageError,
)
from deft_client.files import read_file
from deft_client.measures.table import markdown_table
from deft_client.settings import ClientSettings, Retries, TlsFiles, check_url
from deft_client.types import ActOptions, Observation, ServerInfo

MOST_ROBOTS = 256
MOST_SECONDS = 3600.0
MOST_RATE_HZ = 1000.0
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
    options = _parser().parse_args(arguments)
    return reported(lambda: _load(options), "load")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("deft-client load", description=__doc__)
    parser.add_argument("url", help="the server")
    parser.add_argument(
        "--robots", type=_number(int, 1, MOST_ROBOTS), default=4, metavar="N",
        help="robots (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=_number(float, 0.01, MOST_RATE_HZ), default=5.0, metavar="HZ",
        help="frames a second of each robot (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--deadline-ms", type=_number(float, 1, 1e6), metavar="MS",
        help="deadline of each frame; without one frames wait for up to 30 s",
    )  # fmt: skip
    parser.add_argument(
        "--reasoning-share", type=_number(float, 0, 1), default=0.0, metavar="F",
        help="share of the robots that ask for reasoning, without a deadline (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--keys", type=Path, metavar="FILE", help="API keys, one a line; robots take them in turn"
    )
    parser.add_argument(
        "--seconds", type=_number(float, 0.1, MOST_SECONDS), default=10.0, metavar="S",
        help="how long (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument(
        "--ca-file", type=Path, metavar="FILE",
        help="certificate (PEM) of the authority that vouches for an https server",
    )  # fmt: skip
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


def _load(options: argparse.Namespace) -> int:
    try:
        url = check_url(options.url)
        tls = None if options.ca_file is None else TlsFiles(options.ca_file)
        if tls is not None:
            tls.context()
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not options.yes_i_own_it:
        require_private(url)
    settings = [
        # One attempt: what a server refuses is to be seen.
        ClientSettings(retries=Retries(attempts=1), api_key=key, tls=tls)
        for key in _read_keys(options.keys)
    ]
    with PolicyClient(url, settings[0]) as policy:
        info = policy.info()
    robots, seconds = _play(url, settings, info, options)
    result = {
        "url": url,
        "policy": info.policy,
        "rate_hz": options.rate,
        "deadline_ms": options.deadline_ms,
        "reasoning_share": options.reasoning_share,
        "seconds": seconds,
        "robots": [robot.as_json() for robot in robots],
    }
    sys.stdout.write(summary(robots, seconds))
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {options.json}: {error}") from error
    return 0 if any(robot.answered for robot in robots) else 1


def require_private(url: str) -> None:
    """Raise `UsageError` for a server that may be somebody else's."""
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"cannot find the address of {host}: {error}") from error
    for address in {str(entry[4][0]) for entry in found}:
        known = ip_address(address.partition("%")[0])
        if not (known.is_private or known.is_loopback):
            raise UsageError(
                f"{host} has the public address {address}; a load on a server of somebody else is "
                "an attack: give --yes-i-own-it if it is yours"
            )


def _read_keys(path: Path | None) -> list[str | None]:
    if path is None:
        return [None]
    try:
        lines = read_file(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the API keys: {error}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise UsageError(f"{path} holds no API key")
    return [*keys]


def _play(
    url: str,
    settings: Sequence[ClientSettings],
    info: ServerInfo,
    options: argparse.Namespace,
) -> tuple[list[Robot], float]:
    """Let the robots run, and return what became of their frames and the seconds it took."""
    wanted = max(1, math.floor(options.seconds * options.rate))
    num_reasoning = round(options.robots * options.reasoning_share)
    stopped = threading.Event()
    robots = []
    prepared = []
    for number in range(options.robots):
        reasons = number < num_reasoning
        robot = Robot(f"{number} (reasoning)" if reasons else f"{number}", wanted)
        asked = ActOptions(
            statistics_key=info.default_statistics_key or next(iter(info.statistics_keys), None),
            deadline_ms=None if reasons else options.deadline_ms,
            want_reasoning=reasons,
        )
        policy = PolicyClient(url, settings[number % len(settings)])
        robots.append(robot)
        prepared.append((robot, policy, noise_frames(info, number, PICTURES_KEPT), asked))
    begins = time.monotonic()
    threads = []
    for number, one in enumerate(prepared):
        first = begins + random.Random(number).random() / options.rate
        arguments = (*one, first, options.rate, stopped)
        threads.append(threading.Thread(target=_run, args=arguments, name=f"robot-{number}"))
        threads[-1].start()
    try:
        while any(thread.is_alive() for thread in threads):
            left_s = begins + options.seconds - time.monotonic()
            if left_s <= 0:
                break
            stopped.wait(min(PROGRESS_S, left_s))
            _show_progress(robots, time.monotonic() - begins, options.seconds)
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; what was measured until now:\n")
    finally:
        seconds = time.monotonic() - begins
        stopped.set()
        for thread in threads:
            thread.join()
    return robots, min(seconds, options.seconds)


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
