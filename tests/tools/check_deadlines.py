"""Does the arm get a command in every period, whatever becomes of the server? `python -m` this.

A loop at 10 Hz drives a made-up arm from a real server, which is killed, started again and stopped
for a while; then the camera dies for 5 s, and at last the robot's own process is stopped for 3 s.
Each command tells which frame it goes back to: none may be late by more than a period, but while
the robot's process was ready to run and had no processor (Linux counts that); none outside the
rules; none older than a chunk and a deadline, so none from before a stall. Exits with 1 where one
is. What servers that misbehave can do to a call is in tests/client/test_deadlines.py.
"""

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deft_client.actions import Action, ActionRules
from deft_client.control_loop import ControlLoop, LoopSettings
from deft_client.stream import StreamClient
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_policies.constant import ConstantPolicy

DEADLINE_MS = 500.0
PERIOD_S = 0.1
OBSERVATION = Observation(np.zeros((256, 256, 3), np.uint8), "lift the cup")
OPTIONS = ActOptions(deadline_ms=DEADLINE_MS)

CHUNK = 8
LIMITED = ActionRules(
    is_motion=(True,) * 6 + (False,),
    max_step=(0.05,) * 6 + (np.inf,),
    max_change=(0.02,) * 6 + (np.inf,),
)
OUTAGE_S, BLIND_S, MAX_FRAME_AGE_S = 3.0, 5.0, 0.3
# Of a frame whose answer comes in the last moment, and whose last action is executed in time.
OLDEST_S = MAX_FRAME_AGE_S + DEADLINE_MS / 1000 + (CHUNK + 2) * PERIOD_S


class NumberingPolicy(ConstantPolicy):
    """Answers frame n with motions that need limits, and 8 n, 8 n + 1 ... for the last number."""

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        """Read n from the instruction."""
        return [
            PolicyAnswer(ActionChunk(self._chunk(one.observation)), one.memory) for one in batch
        ]

    def _chunk(self, observation: Observation) -> Action:
        actions = np.full((CHUNK, 7), 0.5)
        actions[:, 6] = CHUNK * int(observation.instruction) + np.arange(CHUNK)
        return actions


class NumberedArm:
    """Numbers its frames; the camera gives the same one again while it is dead."""

    def __init__(self, dead_from: float) -> None:
        self.commands: list[list[float]] = []
        self.taken_s: list[float] = [0.0]  # by number; there is no frame 0
        self._dead_from = dead_from

    def observe(self) -> Observation:
        """Return a frame whose instruction is its number."""
        if not self._dead_from < time.monotonic() < self._dead_from + BLIND_S:
            self.taken_s.append(time.monotonic())
        number = len(self.taken_s) - 1
        return Observation(OBSERVATION.image, str(number), taken_s=self.taken_s[number])

    def position(self) -> Action | None:
        """Return zeros: the gripper is closed."""
        return np.zeros(7)

    def move(self, action: Action) -> None:
        """Note the time, how long this process has waited for a processor, and the action."""
        self.commands.append([time.monotonic(), waited_s(), *action.tolist()])

    def stop(self) -> None:
        """Stay; no command of the loop's."""


def waited_s() -> float:
    """Return how long the threads of this process were ready to run and did not, by Linux."""
    tasks = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(one.read_text().split()[1]) for one in tasks) / 1e9


def serve_numbers(port: int) -> int:
    """Be the server."""
    from deft_server.app import create_app
    from deft_server.commands import serve
    from deft_server.settings import Settings

    policy = NumberingPolicy(np.zeros((CHUNK, 7)))
    return serve.run(create_app(policy, Settings(port=port)))


def drive_numbered(url: str, seconds: float) -> int:
    """Be the robot; print what was commanded, and when each frame was taken."""
    settings = LoopSettings(PERIOD_S, options=OPTIONS, max_frame_age_s=MAX_FRAME_AGE_S)
    with StreamClient(url) as policy:
        arm = NumberedArm(time.monotonic() + 0.5 * seconds)
        loop = ControlLoop(policy, arm, LIMITED, settings)
        ending = threading.Timer(seconds, loop.stop)
        ending.start()
        loop.run()
    status = loop.status
    told = {"moves": status.moves, "holds": status.holds, "stalls": status.stalls}
    print(json.dumps({"commands": arm.commands, "taken_s": arm.taken_s, **told}))
    return 0


def ordeal(seconds: float, port: int) -> bool:
    """Kill, stop and blind; print what came of it, and tell whether it is what was promised."""
    part = [sys.executable, "-m", "tests.tools.check_deadlines", "--port", str(port)]
    serving, driving = [*part, "--serve"], [*part, "--drive", "--seconds", str(seconds)]
    server = subprocess.Popen(serving, stderr=subprocess.DEVNULL)
    robot = subprocess.Popen(driving, stdout=subprocess.PIPE, text=True)
    try:
        time.sleep(0.15 * seconds)
        server.kill()
        server.wait()
        time.sleep(OUTAGE_S)
        server = subprocess.Popen(serving, stderr=subprocess.DEVNULL)
        time.sleep(0.15 * seconds)
        server.send_signal(signal.SIGSTOP)
        time.sleep(OUTAGE_S)
        server.send_signal(signal.SIGCONT)
        time.sleep(0.45 * seconds - 2 * OUTAGE_S)  # the camera is dead meanwhile
        stopped_s = time.monotonic()
        robot.send_signal(signal.SIGSTOP)
        time.sleep(OUTAGE_S)
        robot.send_signal(signal.SIGCONT)
        went_on_s = time.monotonic()
        said, _ = robot.communicate()
    finally:
        for process in (server, robot):
            process.kill()
            process.wait()
    return judge(json.loads(said), stopped_s, went_on_s)


def judge(said: dict[str, list[list[float]]], stopped_s: float, went_on_s: float) -> bool:
    """Print what the commands were; are they what they should be?"""
    commands, taken_s = np.array(said["commands"]), np.array(said["taken_s"])
    at_s, waited, actions = commands[:, 0], np.diff(commands[:, 1]), commands[:, 2:]
    gaps_s = np.diff(at_s)
    stopped = np.clip(np.minimum(at_s[1:], went_on_s) - np.maximum(at_s[:-1], stopped_s), 0, None)
    own_s = gaps_s - stopped - waited  # while the robot's process could run
    late = own_s > 2 * PERIOD_S
    motions = np.abs(actions[:, :6])
    # Between two commands that are too far apart the watchdog stops the arm, which is no motion.
    changes = np.abs(np.diff(actions[:, :6], axis=0))[gaps_s < LoopSettings().watchdog_s]
    outside = int((motions > 0.05 + 1e-9).any(axis=1).sum() + (changes > 0.02 + 1e-9).any(1).sum())
    outside += int((~np.isfinite(actions)).any(axis=1).sum())
    is_new = np.diff(actions[:, 6], prepend=0.0) != 0  # a hold repeats the number
    ages_s = at_s[is_new] - taken_s[(actions[is_new, 6] // CHUNK).astype(int)]
    is_from_before = (at_s[is_new] > went_on_s) & (at_s[is_new] - ages_s < stopped_s)
    print(
        f"{len(commands)} commands in {at_s[-1] - at_s[0]:.0f} s: {said['moves']} moves, "
        f"{said['holds']} holds, {said['stalls']} stalls; the robot waited for a processor for "
        f"{waited.sum():.1f} s, {(waited > PERIOD_S).sum()} times for over a period\n"
        f"longest gap {gaps_s.max():.3f} s, {own_s.max():.3f} s while its process could run\n"
        f"late by more than a period: {late.sum()}; outside the rules: {outside}; "
        f"from before the stall: {is_from_before.sum()}; oldest frame {ages_s.max():.2f} s "
        f"of {OLDEST_S:.2f}"
    )
    return not (late.any() or outside or is_from_before.any() or ages_s.max() > OLDEST_S)


def main(arguments: list[str]) -> int:
    """Print what came of it; 1 where a promise was broken."""
    parser = argparse.ArgumentParser("check_deadlines", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="(%(default)s)")
    parser.add_argument("--port", type=int, default=8765, help="of its server (%(default)s)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        return serve_numbers(given.port)
    if given.drive:
        return drive_numbered(f"http://127.0.0.1:{given.port}", given.seconds)
    return 0 if ordeal(given.seconds, given.port) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
