"""Robots behind a bad network: who misses deadlines, and does any arm wait for a command?

`python -m scripts.bench network` runs eight robots at 5 Hz for a minute against `deft
serve` with a policy that takes 20 ms, through a proxy that delays whatever it carries by 5 to 60 ms
and cuts one connection in a hundred: as it is made, or when a message begins on one that is kept.
"""

import argparse
import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from deft_client import PolicyClient
from deft_client.actions import Action, ActionRules
from deft_client.control_loop import ControlLoop, LoopSettings, LoopStatus
from deft_client.stream import StreamClient
from deft_core.errors import DeftError
from deft_core.types import ActionChunk, ActOptions, Observation
from scripts.bench.server import frame
from scripts.local_server import local_server, port_of

DELAY_S = (0.005, 0.06)
CUT_SHARE = 0.01
SILENCE_S = 0.02  # whatever comes after it begins a message
DEADLINE_MS = 200.0
CHUNK = 65536
SIZE = 256  # pixels
RULES = ActionRules((True,) * 6 + (False,))


class BadNetwork:
    """A proxy in front of a port: late, and now and then gone."""

    def __init__(self, port: int, seed: int) -> None:
        self.num_connections = self.num_cut = 0
        self._port = port
        self._rng = random.Random(seed)

    async def carry(self, caller: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Carry one connection until either side ends it, or we do."""
        self.num_connections += 1
        if self._is_cut():
            back.transport.abort()
            return
        answers, onward = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [self._carry_on(caller, onward, True), self._carry_on(answers, back, False)]
        tasks = [asyncio.create_task(one) for one in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in (onward, back):
            writer.transport.abort()

    async def _carry_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, may_cut: bool
    ) -> None:
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering = asyncio.create_task(self._deliver(late, sink))
        heard_s = -1.0
        try:
            while data := await source.read(CHUNK):
                now_s = time.monotonic()
                if may_cut and now_s - heard_s > SILENCE_S and self._is_cut():
                    return
                heard_s = now_s
                late.put_nowait((now_s + self._rng.uniform(*DELAY_S), data))
        finally:
            delivering.cancel()

    async def _deliver(
        self, late: "asyncio.Queue[tuple[float, bytes]]", sink: asyncio.StreamWriter
    ) -> None:
        while True:
            due_s, data = await late.get()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            sink.write(data)
            await sink.drain()

    def _is_cut(self) -> bool:
        is_cut = self._rng.random() < CUT_SHARE
        self.num_cut += is_cut
        return is_cut


@contextmanager
def behind(network: BadNetwork) -> Iterator[str]:
    """Run a proxy on a thread of its own; yields its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    started = asyncio.start_server(network.carry, "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(started, loop).result()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@dataclass
class Robot:
    """One arm and what it met; the policy of its own loop."""

    policy: PolicyClient
    answers_ms: list[float] = field(default_factory=list)
    num_missed: int = 0
    commanded_s: list[float] = field(default_factory=list)

    @property
    def session_id(self) -> str:
        """The policy's."""
        return self.policy.session_id

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Ask, and note how long it took or that it was in vain."""
        started_s = time.monotonic()
        try:
            chunk = self.policy.act(observation, options)
        except DeftError:
            self.num_missed += 1
            raise
        self.answers_ms.append((time.monotonic() - started_s) * 1000)
        return chunk

    def reset(self, session_id: str | None = None) -> None:
        """Say that an episode starts."""
        self.policy.reset(session_id)

    def observe(self) -> Observation:
        """Return noise."""
        return frame(SIZE)

    def position(self) -> Action | None:
        """Return zeros: the gripper is closed."""
        return np.zeros(7)

    def move(self, action: Action) -> None:
        """Note the time."""
        self.commanded_s.append(time.monotonic())

    def stop(self) -> None:
        """Stay; no command of the loop's."""

    def drive(self, period_s: float, num_periods: int) -> LoopStatus:
        """Run the loop that docs/robot_loop.md shows."""
        options = ActOptions(deadline_ms=DEADLINE_MS)
        loop = ControlLoop(self, self, RULES, LoopSettings(period_s, 2.5 * period_s, options))
        with suppress(DeftError):
            self.policy.info()  # the first connection is not on the clock
        loop.run(num_periods)
        return loop.status


def run(kind: type[PolicyClient], options: argparse.Namespace) -> bool:
    """Drive the robots by one kind of client; print what they met; did all get every command?"""
    period_s, num_periods = 1 / options.hz, int(options.seconds * options.hz)
    with (
        local_server("--policy", "sleeping", "--sleep-ms", "20") as url,
        behind(network := BadNetwork(port_of(url), options.seed)) as proxy,
        ThreadPoolExecutor(options.robots) as threads,
    ):
        robots = [Robot(kind(proxy)) for _ in range(options.robots)]
        drives = [threads.submit(one.drive, period_s, num_periods) for one in robots]
        statuses = [one.result() for one in drives]
        for one in robots:
            one.policy.close()
    answers = np.concatenate([one.answers_ms for one in robots])
    missed = sum(one.num_missed for one in robots)
    gap_s = max(float(np.diff(one.commanded_s).max()) for one in robots)
    is_kept = gap_s < 2 * period_s and all(len(r.commanded_s) == num_periods for r in robots)
    p50, p99, p999 = np.percentile(answers, (50, 99, 99.9))
    print(
        f"{kind.__name__}: {len(answers) + missed} frames of {options.robots} robots at "
        f"{options.hz:g} Hz, {network.num_cut} connections cut; {missed} missed "
        f"{DEADLINE_MS:g} ms ({missed / (len(answers) + missed):.2%}); answers p50 {p50:.1f}, "
        f"p99 {p99:.1f}, p99.9 {p999:.1f} ms; {sum(one.holds for one in statuses)} holds; "
        f"longest wait for a command {gap_s * 1000:.0f} ms of {2000 * period_s:.0f} | "
        f"{'PASS' if is_kept else 'FAIL'}",
        flush=True,
    )
    return is_kept


def main(arguments: list[str]) -> int:
    """Print a line for each kind of client; 1 where an arm waited for longer than a period."""
    parser = argparse.ArgumentParser("python -m scripts.bench network", description=__doc__)
    parser.add_argument("--robots", type=int, default=8)
    parser.add_argument("--hz", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind of client [60]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)  # each miss is counted
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}, seed {options.seed}")
    kept = [run(kind, options) for kind in (PolicyClient, StreamClient)]
    return 0 if all(kept) else 1
