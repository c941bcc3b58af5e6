"""What a policy in a process of its own costs, and what killing it costs.

`python -m scripts.bench_server.policy_process` asks one policy on a thread and in a
process in turn, frame by frame, so that what else happens on the machine meets both alike; then it
kills the process under load. `--policy "module:function arguments"` measures another one.
"""

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deft_client.types import ActOptions, Observation
from deft_policies.base import ActAnswer, ActRequest
from deft_policies.constant import ConstantPolicy
from deft_server.errors import RefusedFrameError
from deft_server.hosting.allocator import keep_freed_memory
from deft_server.hosting.host import PolicyRecipe
from deft_server.hosting.process import PolicyProcess
from deft_server.serving.access import Caller
from deft_server.serving.readiness import ServerPhase
from deft_server.serving.service import Service
from deft_server.settings import Settings

SIZE = 256  # pixels
ROBOTS = 4
CALLER = Caller()


@dataclass
class Counts:
    """What robots met while the policy was killed."""

    answered: int = 0
    refused: int = 0
    longest_refusal_ms: float = 0.0
    longest_turn_ms: float = 0.0  # of the event loop, which answers /healthz
    ready_again_s: list[float] = field(default_factory=list)


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="scripts.bench_server.policy_process:QuickPolicy")
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=5)
    keep_freed_memory()
    asyncio.run(_measure(parser.parse_args()))
    return 0


class QuickPolicy(ConstantPolicy):
    """Takes no time, but does not say so: it is never called on the event loop."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        """Answer as ever."""
        return super().act(batch)


async def _measure(given: argparse.Namespace) -> None:
    words = given.policy.split()
    recipe = PolicyRecipe(words[0], tuple(words[1:]))
    services = [Service(recipe, Settings(policy_process=alone)) for alone in (False, True)]
    started_s = time.perf_counter()
    for service in services:
        service.start()
        await service.scheduler.settled()
    print(f"both loaded in {time.perf_counter() - started_s:.1f} s")
    spent: list[list[float]] = [[], []]
    frames = np.random.default_rng(0).integers(0, 256, (8, SIZE, SIZE, 3), np.uint8)
    for number in range(given.frames):
        for index, service in enumerate(services):
            observation = Observation(frames[number % 8], "lift the cup")
            before_s = time.perf_counter()
            await service.act(observation, ActOptions(session_id="robot"), CALLER)
            spent[index].append((time.perf_counter() - before_s) * 1000)
    for name, times in zip(("thread", "process"), spent, strict=True):
        told = ", ".join(f"p{p} {np.percentile(times, p):.3f}" for p in (50, 95, 99))
        print(f"{name:8}{told} ms over {len(times)} frames")
    added = [alone - shared for shared, alone in zip(*spent, strict=True)]
    print(f"added    median of the differences {statistics.median(added):.3f} ms")
    counts = await _kill(services[1], given.kills)
    print(
        f"killed {given.kills} times under {ROBOTS} robots: {counts.answered} answers, "
        f"{counts.refused} refusals (503), the slowest after {counts.longest_refusal_ms:.1f} ms; "
        f"longest turn of the event loop {counts.longest_turn_ms:.1f} ms; ready again after "
        + ", ".join(f"{one:.2f}" for one in counts.ready_again_s)
        + " s"
    )
    for service in services:
        await service.close()


async def _kill(service: Service, kills: int) -> Counts:
    counts, is_over = Counts(), asyncio.Event()
    tasks = [asyncio.create_task(_robot(service, n, counts, is_over)) for n in range(ROBOTS)]
    tasks.append(asyncio.create_task(_watch(counts, is_over)))
    for _ in range(kills):
        await asyncio.sleep(0.5)
        host = service.scheduler._host
        assert isinstance(host, PolicyProcess)
        killed_s = time.perf_counter()
        os.kill(host._process.pid, signal.SIGKILL)
        while service.readiness.phase is ServerPhase.READY:
            await asyncio.sleep(0.001)
        while service.readiness.phase is not ServerPhase.READY:
            await asyncio.sleep(0.005)
        counts.ready_again_s.append(time.perf_counter() - killed_s)
    is_over.set()
    await asyncio.gather(*tasks)
    return counts


async def _robot(service: Service, number: int, counts: Counts, is_over: asyncio.Event) -> None:
    observation = Observation(np.full((SIZE, SIZE, 3), number, np.uint8), "lift the cup")
    while not is_over.is_set():
        before_s = time.perf_counter()
        try:
            await service.act(observation, ActOptions(session_id=f"r{number}"), CALLER)
            counts.answered += 1
        except RefusedFrameError:
            counts.refused += 1
            spent_ms = (time.perf_counter() - before_s) * 1000
            counts.longest_refusal_ms = max(counts.longest_refusal_ms, spent_ms)
        await asyncio.sleep(0.02)


async def _watch(counts: Counts, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        before_s = time.perf_counter()
        await asyncio.sleep(0)
        turn_ms = (time.perf_counter() - before_s) * 1000
        counts.longest_turn_ms = max(counts.longest_turn_ms, turn_ms)
        await asyncio.sleep(0.002)


if __name__ == "__main__":
    raise SystemExit(main())
