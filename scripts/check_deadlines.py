"""Does every call end in time, and does the arm get a command in every period? `python -m` this.

Servers of `scripts/hostile_servers.py` hold up the clients, blocking and asynchronous, over HTTP
and the WebSocket. Prints the longest of each, and exits with 1 where a promise is broken.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from deft_client.actions import Action, ActionRules
from deft_client.client import AsyncPolicyClient, PolicyClient
from deft_client.control_loop import ControlLoop, LoopSettings
from deft_client.errors import DeftError
from deft_client.stream import AsyncStreamClient, StreamClient
from deft_client.types import ActOptions, Observation
from scripts.hostile_servers import HTTP_MANNERS, STREAM_MANNERS, Manner, holding_up, withholding

DEADLINE_MS = 500.0
CALL_MAY_TAKE_S = 0.7
ARM_MAY_WAIT_S = 0.25
PERIOD_S = 0.1
OBSERVATION = Observation(np.zeros((256, 256, 3), np.uint8), "lift the cup")
OPTIONS = ActOptions(deadline_ms=DEADLINE_MS)
RULES = ActionRules((True,) * 6 + (False,))


class TimedArm:
    """Remembers when it was commanded."""

    def __init__(self) -> None:
        self.commanded_at = [time.monotonic()]

    def observe(self) -> Observation:
        """Return an empty picture."""
        return OBSERVATION

    def position(self) -> Action | None:
        """Return zeros: the gripper is closed."""
        return np.zeros(7)

    def move(self, action: Action) -> None:
        """Note the time."""
        self.commanded_at.append(time.monotonic())

    def stop(self) -> None:
        """Note the time."""
        self.commanded_at.append(time.monotonic())


def blocking_s(kind: type[PolicyClient], url: str) -> float:
    """Return how long acting in vain and closing take."""
    policy = kind(url)
    started = time.monotonic()
    with policy, contextlib.suppress(DeftError):
        policy.act(OBSERVATION, OPTIONS)
    return time.monotonic() - started


def asynchronous_s(kind: type[AsyncPolicyClient], url: str) -> float:
    """The same with asyncio."""

    async def visit() -> float:
        policy = kind(url)
        started = time.monotonic()
        async with policy:
            with contextlib.suppress(DeftError):
                await policy.act(OBSERVATION, OPTIONS)
        return time.monotonic() - started

    return asyncio.run(visit())


def call_s(manner: Manner, way: Callable[[str], float]) -> float:
    """Return how long a call takes that cannot succeed."""
    with holding_up(manner) as server:
        return way(server.url)


def longest_gap_s(manner: Manner, kind: type[PolicyClient], num_periods: int) -> float:
    """Return the longest time without a command in a loop at 10 Hz."""
    with holding_up(manner) as server, kind(server.url) as policy:
        settings = LoopSettings(PERIOD_S, options=OPTIONS)
        arm = TimedArm()  # from here on: making a client takes half a period or more
        ControlLoop(policy, arm, RULES, settings).run(num_periods)
    return float(np.diff(arm.commanded_at).max())


WAYS: dict[str, Callable[[str], float]] = {
    "http": lambda url: blocking_s(PolicyClient, url),
    "http async": lambda url: asynchronous_s(AsyncPolicyClient, url),
    "stream": lambda url: blocking_s(StreamClient, url),
    "stream async": lambda url: asynchronous_s(AsyncStreamClient, url),
}


def endurance(num_periods: int) -> Iterator[tuple[str, dict[str, float], float]]:
    """Yield for each manner of a server how long calls took, by way, and the arm's longest wait."""
    for manner in (*STREAM_MANNERS, withholding):
        is_http = manner in (*HTTP_MANNERS, withholding)
        taken_s = {
            way: call_s(manner, act)
            for way, act in WAYS.items()
            if is_http or way.startswith("stream")
        }
        kind = PolicyClient if is_http else StreamClient
        yield manner.__name__, taken_s, longest_gap_s(manner, kind, num_periods)


def main(arguments: list[str]) -> int:
    """Print a line for each manner; 1 where one took too long."""
    parser = argparse.ArgumentParser("check_deadlines", description=__doc__)
    parser.add_argument("--periods", type=int, default=20, help="of each loop (%(default)s)")
    periods = parser.parse_args(arguments).periods
    logging.disable(logging.WARNING)
    is_kept = True
    print(f"{'seconds':<18}" + "".join(f"{way:>14}" for way in (*WAYS, "loop gap")))
    for manner, taken, gap_s in endurance(periods):
        cells = [f"{taken[way]:>14.3f}" if way in taken else f"{'-':>14}" for way in WAYS]
        print(f"{manner:<18}" + "".join(cells) + f"{gap_s:>14.3f}", flush=True)
        is_kept &= max(taken.values()) < CALL_MAY_TAKE_S and gap_s < ARM_MAY_WAIT_S
    print(f"within {CALL_MAY_TAKE_S} s and {ARM_MAY_WAIT_S} s: {'yes' if is_kept else 'NO'}")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
