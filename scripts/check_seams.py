"""What each seam costs, and how smoothly chunks meet: `python -m scripts.check_seams`.

Plays pairs of episodes of `point_world_grasp` with its policy `plan`: in lock-step, and in real
time with every kind of seam, at answers of exactly 200 ms (four periods) and a little more (five,
as by any wall clock). Time passes only where somebody waits, so any machine finds the same numbers.
Then recorded chunks are executed with the same delay. Fails where the default seam loses over a
tenth of the pairs to lock-step, net, or steps further than 1.5 times what chunks do inside.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deft_client.actions import ActionQueue
from deft_core.measures.statistics import mcnemar_exact
from deft_core.measures.table import Column, column_table, markdown_table
from deft_core.types import ActionChunk, ChunkBlending, Observation
from deft_libero.evaluation import point_world
from deft_libero.evaluation.episode import (
    BackgroundCalls,
    Clock,
    EpisodeLog,
    EpisodePlayer,
    largest_change,
)
from deft_libero.evaluation.runs import Pacing, RunConfig
from deft_libero.evaluation.selection import select_episodes
from deft_libero.policies.source import EpisodePolicy
from deft_libero.report.summary import largest_seams
from deft_libero.results.records import SeamSizes, TrialKey
from deft_libero.simulator import conventions
from deft_libero.simulator.environment import EnvironmentSettings

CHUNKS = Path(__file__).parents[1] / "tests/golden/chunks/oft_tiny.npz"
DELAYS_MS = (200.0, 201.0)
_FRAMES = EnvironmentSettings(frame_size=8)  # the policy reads the state
_ROUNDING_S = 1e-9
_WORST_LOSS, _WORST_RATIO = 0.1, 1.5


@dataclass
class VirtualClock(Clock):
    """Time that passes only when somebody sleeps."""

    seconds: float = 0.0

    def now_s(self) -> float:
        """Seconds since the start."""
        return self.seconds

    def sleep_until(self, moment_s: float) -> None:
        """Be there."""
        self.seconds = max(self.seconds, moment_s)


class DelayedCalls(BackgroundCalls):
    """Answers that come after a fixed virtual time."""

    def __init__(self, policy: EpisodePolicy, clock: VirtualClock, delay_s: float) -> None:
        self._policy, self._clock, self._delay_s = policy, clock, delay_s
        self._waiting: tuple[float, Observation] | None = None

    def send(self, observation: Observation) -> None:
        """Take an observation."""
        self._waiting = (self._clock.now_s(), observation)

    def collect(self) -> tuple[ActionChunk, float] | None:
        """The answer, once its time has come."""
        if self._waiting is None:
            return None
        sent_s, observation = self._waiting
        if self._clock.now_s() - sent_s < self._delay_s - _ROUNDING_S:
            return None
        self._waiting = None
        return self._policy.act(observation), self._delay_s

    def close(self) -> None:
        """Nothing runs."""


@dataclass(frozen=True)
class SeamRow:
    """One way of executing chunks; losses and wins are against lock-step on the same trials.

    `delay_ms` is how long an answer takes where anybody notices: in lock-step the world waits.
    """

    seam: str
    delay_ms: float
    pairs: int
    succeeded: int
    losses: int
    wins: int
    mcnemar_p: float
    mean_steps: float
    held_steps: int
    largest_step: float
    largest_step_inside: float

    @property
    def holds(self) -> bool:
        """Whether success and smoothness are what they must be."""
        is_smooth = self.largest_step <= _WORST_RATIO * self.largest_step_inside
        return is_smooth and self.losses - self.wins <= _WORST_LOSS * self.pairs


def play(key: TrialKey, seam: ChunkBlending | None, delay_s: float) -> EpisodeLog:
    """Play one episode, without a seam in lock-step."""
    suite = point_world.find_suite(key.suite)
    world = point_world.open_environment(suite.task(key.task), _FRAMES)
    policy = point_world.plan(world)
    config = RunConfig(
        key.suite,
        pacing=Pacing.LOCK_STEP if seam is None else Pacing.REAL_TIME,
        blending=seam or ChunkBlending.WAIT,
        step_limit=suite.step_limit,
    )
    clock = VirtualClock()
    calls = DelayedCalls(policy, clock, delay_s)
    return EpisodePlayer(world, policy, config).play(key.trial, str(key), clock, calls)


def compare(num_pairs: int, delay_s: float) -> Iterator[SeamRow]:
    """Lock-step, then each kind of seam."""
    suite = point_world.find_suite(point_world.GRASP_SUITE)
    keys = select_episodes(suite, None, None, num_pairs)
    paced = [play(key, None, 0.0) for key in keys]
    for seam in (None, *ChunkBlending):
        logs = paced if seam is None else [play(key, seam, delay_s) for key in keys]
        outcomes = [
            (one.has_succeeded, other.has_succeeded) for one, other in zip(paced, logs, strict=True)
        ]
        losses, wins = outcomes.count((True, False)), outcomes.count((False, True))
        sizes = largest_seams(log.seams for log in logs)
        yield SeamRow(
            seam="lock-step" if seam is None else seam.value,
            delay_ms=1000 * delay_s,
            pairs=len(keys),
            succeeded=sum(log.has_succeeded for log in logs),
            losses=losses,
            wins=wins,
            mcnemar_p=mcnemar_exact(losses, wins),
            mean_steps=float(np.mean([len(log.actions) for log in logs])),
            held_steps=sum(log.held_steps for log in logs),
            largest_step=sizes.commanded,
            largest_step_inside=sizes.inside,
        )


def load_chunks(path: Path) -> NDArray[np.float64]:
    """Read `chunks` [frame, step, action_dim] of an .npz."""
    with np.load(path) as arrays:
        chunks: NDArray[np.float64] = arrays["chunks"].astype(np.float64)
    return chunks


def replay(chunks: NDArray[np.float64], seam: ChunkBlending, delay_periods: int) -> SeamSizes:
    """Execute them in order, each `delay_periods` after its frame. Nothing moves the frames."""
    queue = ActionQueue(conventions.ACTION_RULES, seam)
    asked: int | None = None
    actions: list[NDArray[np.float64]] = []  # since the last hold
    commanded = inside = 0.0
    for period in range(len(chunks)):
        if asked is not None and period - asked >= delay_periods:
            queue.refill(ActionChunk(chunks[asked]))
            inside, asked = max(inside, largest_change(chunks[asked])), None
        if asked is None and queue.is_due:
            queue.ask()
            asked = period
        action = queue.next()
        actions = [] if action is None else [*actions, action][-2:]
        if len(actions) == 2:
            commanded = max(commanded, largest_change(np.stack(actions)))
    return SeamSizes(commanded, inside)


_COLUMNS = (
    Column[SeamRow]("seam", lambda one: one.seam),
    Column[SeamRow]("success", lambda one: f"{one.succeeded}/{one.pairs}"),
    Column[SeamRow]("losses", lambda one: str(one.losses)),
    Column[SeamRow]("wins", lambda one: str(one.wins)),
    Column[SeamRow]("McNemar p", lambda one: f"{one.mcnemar_p:.3g}"),
    Column[SeamRow]("steps", lambda one: f"{one.mean_steps:.1f}"),
    Column[SeamRow]("held", lambda one: str(one.held_steps)),
    Column[SeamRow]("largest step", lambda one: f"{one.largest_step:.3f}"),
    Column[SeamRow]("inside", lambda one: f"{one.largest_step_inside:.3f}"),
    Column[SeamRow](
        "ratio", lambda one: f"{one.largest_step / (one.largest_step_inside or math.inf):.2f}"
    ),
)


def _recorded_table(path: Path, delay_s: float) -> str:
    """The same of chunks that were recorded at LIBERO's rate."""
    chunks, delay = load_chunks(path), math.ceil(delay_s * conventions.CONTROL_HZ)
    found = {seam: replay(chunks, seam, delay) for seam in ChunkBlending}
    rows = [
        [seam.value, f"{one.commanded:.3f}", f"{one.inside:.3f}"] for seam, one in found.items()
    ]
    columns = [f"{path.name}, {len(chunks)} frames", "largest step", "inside"]
    return markdown_table(columns, rows, aligned=True)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where the default seam does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--delay-ms", type=float, nargs="+", default=DELAYS_MS)
    parser.add_argument("--chunks", type=Path, default=CHUNKS, help="recorded chunks, .npz")
    parser.add_argument("--lines", type=Path, help="write a line of JSON per kind of seam")
    given = parser.parse_args(arguments)
    lines: list[SeamRow] = []
    for delay_ms in given.delay_ms:
        found = list(compare(given.pairs, delay_ms / 1000))
        print(f"answers after {delay_ms:g} ms\n{column_table(_COLUMNS, found, aligned=True)}")
        print(_recorded_table(given.chunks, delay_ms / 1000))
        lines += found
    if given.lines is not None:
        text = "".join(json.dumps(asdict(one)) + "\n" for one in lines)
        given.lines.write_text(text)
    return 0 if all(one.holds for one in lines if one.seam == ChunkBlending.WAIT.value) else 1


if __name__ == "__main__":
    sys.exit(main())
