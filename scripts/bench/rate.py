"""How many actions a second one arm gets: by a program that asks and moves, and by control loops.

`python -m scripts.bench rate` asks `deft serve --policy sleeping`, whose answers take 50 ms and a
little, or the server at `--url`. One way after the other, so that each has the server alone.
"""

import argparse
import logging
import os
import time
from contextlib import nullcontext

import numpy as np

from deft_client import PolicyClient
from deft_client.actions import Action, ActionRules
from deft_client.control_loop import ControlLoop, LoopSettings
from deft_core.types import ActionChunk, ActOptions, Observation, ServerInfo
from scripts.local_server import local_server

SLEEP_MS = "50"


class Robot:
    """An arm that notes its commands, and its policy, which notes how long it took."""

    def __init__(self, policy: PolicyClient, info: ServerInfo) -> None:
        self.policy = policy
        self.instruction = next(iter(info.instructions), "wait")
        self.key = info.default_statistics_key or next(iter(info.statistics_keys), None)
        self.size = info.image_height, info.image_width, 3
        self.action_dim = info.action_dim
        self.answers_ms: list[float] = []
        self.moved_at: list[float] = []
        self._random = np.random.default_rng(0)
        self._position = np.zeros(info.action_dim)

    @property
    def session_id(self) -> str:
        """The policy's."""
        return self.policy.session_id

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Ask, and note how long it took."""
        asked = ActOptions(deadline_ms=500, statistics_key=self.key)
        asked_at = time.monotonic()
        chunk = self.policy.act(observation, asked)
        self.answers_ms.append(1000 * (time.monotonic() - asked_at))
        return chunk

    def reset(self, session_id: str | None = None) -> None:
        """Say that an episode starts."""
        self.policy.reset(session_id)

    def observe(self) -> Observation:
        """Return noise."""
        return Observation(self._random.integers(0, 256, self.size, np.uint8), self.instruction)

    def position(self) -> Action | None:
        """Return zeros."""
        return self._position

    def move(self, action: Action) -> None:
        """Note the time."""
        self.moved_at.append(time.monotonic())

    def stop(self) -> None:
        """Stay; no command of the loop's."""


def block(robot: Robot, seconds: float) -> str:
    """Ask and move, without a rhythm."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        robot.move(robot.act(robot.observe()).actions[0])
    return f"{len(robot.moved_at) / seconds:.1f} actions a second"


def drive(robot: Robot, seconds: float, rate_hz: float) -> str:
    """Run a control loop."""
    settings = LoopSettings(1 / rate_hz, watchdog_s=max(0.25, 2.5 / rate_hz))
    rules = ActionRules((True,) * (robot.action_dim - 1) + (False,))
    loop = ControlLoop(robot, robot, rules, settings)
    num_periods = round(seconds * rate_hz)
    begins_s = time.monotonic()
    loop.run(num_periods)
    passed_s = time.monotonic() - begins_s
    apart_ms = 1000 * np.diff(robot.moved_at)
    status = loop.status
    return (
        f"{status.moves / passed_s:.1f} actions a second, {status.holds} of {num_periods} periods "
        f"held; commands {apart_ms.min():.0f} to {apart_ms.max():.0f} ms apart, "
        f"{status.stalls} stalls"
    )


def main(arguments: list[str]) -> int:
    """Print a line for each way of driving."""
    parser = argparse.ArgumentParser("python -m scripts.bench rate", description=__doc__)
    parser.add_argument("--url", help="a running server, in place of one of its own")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each line [20]")
    parser.add_argument("--hz", type=float, nargs="+", default=[12.5, 15.0])
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="    %(message)s")
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}")
    own = local_server("--policy", "sleeping", "--sleep-ms", SLEEP_MS)
    with nullcontext(options.url) if options.url else own as url:
        for hz in (None, *options.hz):
            with PolicyClient(url) as policy:
                robot = Robot(policy, policy.info())
                if hz is None:
                    name, said = "ask, move", block(robot, options.seconds)
                else:
                    name, said = f"loop of {hz:g} Hz", drive(robot, options.seconds, hz)
                p50, p95 = np.percentile(robot.answers_ms, (50, 95))
                print(f"{name}: answers {p50:.1f} ms p50, {p95:.1f} p95; {said}", flush=True)
    return 0
