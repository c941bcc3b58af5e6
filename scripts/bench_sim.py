"""How fast episodes run: `python -m scripts.bench_sim`.

One step is physics and one 256x256 agent view, on one core. The last column is the processor time
of a step, which other programs on the machine disturb less. Then episodes per minute of one and of
two worker processes, the expert acting.
"""

import argparse
import multiprocessing
import os
import statistics
import time

import numpy as np

from deft_client.libero.simulator.conventions import WAIT_STEPS, wait_action
from deft_client.libero.simulator.environment import EnvironmentSettings, open_environment
from deft_client.libero.simulator.suites import SUITE_NAMES, find_suite, find_task
from scripts.tiny_libero.expert.expert import Expert

SUITES = [name for name in SUITE_NAMES if name != "libero_90"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="measured steps per suite")
    parser.add_argument("--seconds", type=float, default=30.0, help="per number of workers")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("| suite | physics ms | frame ms | step ms, median | p95 | restart ms | step CPU ms |")
    print("|---|---|---|---|---|---|---|")
    for suite in SUITES:
        print(step_row(suite, options.steps), flush=True)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    rates = [episodes_per_minute(workers, options.seconds) for workers in (1, 2)]
    print(f"\nepisodes per minute (libero_object 0, expert acting, every step rendered): "
          f"{rates[0]:.1f} with one worker, {rates[1]:.1f} with two, "
          f"{rates[1] / rates[0]:.2f} times")  # fmt: skip


def step_row(suite: str, num_steps: int) -> str:
    environment = open_environment(find_task(suite, 0))
    environment.reset(0)
    started = time.perf_counter()
    environment.reset(1)
    restart_ms = (time.perf_counter() - started) * 1e3
    rng = np.random.default_rng(0)
    physics, frames, processor = [], [], []
    for _ in range(num_steps):
        action = np.append(rng.uniform(-0.3, 0.3, 6), 1.0)
        begun, spent = time.perf_counter(), time.process_time()
        environment.advance(action)
        moved = time.perf_counter()
        environment.frame()
        frames.append((time.perf_counter() - moved) * 1e3)
        physics.append((moved - begun) * 1e3)
        processor.append((time.process_time() - spent) * 1e3)
    environment.close()
    steps = [a + b for a, b in zip(physics, frames, strict=True)]
    return (
        f"| {suite} | {statistics.median(physics):.1f} | {statistics.median(frames):.1f} | "
        f"{statistics.median(steps):.1f} | {np.percentile(steps, 95):.1f} | {restart_ms:.0f} | "
        f"{statistics.median(processor):.1f} |"
    )


def episodes_per_minute(num_workers: int, seconds: float) -> float:
    context = multiprocessing.get_context("spawn")
    gate, counts = context.Barrier(num_workers), context.Queue()
    workers = [
        context.Process(target=play, args=(number, gate, counts, seconds))
        for number in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    total = sum(counts.get() for _ in workers)
    for worker in workers:
        worker.join()
    return float(total * 60 / seconds)


def play(number: int, gate, counts, seconds: float) -> None:  # type: ignore[no-untyped-def]
    """Play until the time is up; an unfinished episode counts by its share of a whole one."""
    environment = open_environment(find_task("libero_object", 0), EnvironmentSettings())
    environment.reset(0)
    gate.wait()
    ends, num_steps, limit = (
        time.perf_counter() + seconds,
        0,
        find_suite("libero_object").step_limit,
    )
    episodes, trial = 0.0, number
    while True:
        environment.reset(trial % environment.num_trials)
        for _ in range(WAIT_STEPS):
            environment.step(wait_action())
        expert, steps = Expert.for_episode(environment), 0
        for steps in range(1, limit + 1):
            if time.perf_counter() > ends:
                counts.put(episodes + steps * episodes / max(num_steps, 1))
                return
            if environment.step(expert.label(environment.scene()).action).done:
                break
        episodes, num_steps, trial = episodes + 1, num_steps + steps, trial + 2


if __name__ == "__main__":
    main()
