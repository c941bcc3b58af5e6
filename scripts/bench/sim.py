"""How long steps of the simulator take: `python -m scripts.bench sim`.

One step is physics and one 256x256 agent view, on one core. The last column is the processor time
of a step, which other programs on the machine disturb less.
"""

import argparse
import os
import statistics
import time

import numpy as np

from deft_core.measures.table import markdown_table
from deft_libero.simulator.environment import EnvironmentSettings, open_environment
from deft_libero.simulator.suites import SUITE_NAMES, find_task

SUITES = [name for name in SUITE_NAMES if name != "libero_90"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m scripts.bench sim", description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="measured steps per suite")
    parser.add_argument("--fast", action="store_true", help="as `deft-client eval`")
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    columns = ["median ms", "physics", "frame", "step", "step, p95", "restart", "step's CPU time"]
    rows = [step_row(suite, options.steps, options.fast) for suite in SUITES]
    print(markdown_table(columns, rows, aligned=True))
    return 0


def step_row(suite: str, num_steps: int, fast: bool) -> list[str]:
    environment = open_environment(find_task(suite, 0), EnvironmentSettings(fast=fast))
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
    medians = [statistics.median(one) for one in (physics, frames, steps)]
    tail = [float(np.percentile(steps, 95)), restart_ms, statistics.median(processor)]
    return [suite, *(f"{value:.1f}" for value in (*medians, *tail))]
