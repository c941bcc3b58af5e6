"""`deft replay DIR`: run recorded frames through a policy and compare its actions with those done.

Frames of one episode share a session, so that what a policy remembers is as it was.
"""

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from deft_client.recordings import (
    RecordedStep,
    find_episodes,
    iterate_steps,
    read_header,
)
from deft_client.types import ActionChunk, ActOptions
from deft_policies.base import ActRequest, Policy
from deft_policies.commands.parse import parse_command, run_command
from deft_policies.errors import PolicyError
from deft_policies.memory import SessionMemory

PROG = "deft replay"


class ReplayError(PolicyError):
    """The recording and the policy cannot be compared; the message says why."""


@dataclass(frozen=True)
class StepComparison:
    """One frame: how far the new actions are from the recorded ones, in robot units."""

    episode: str
    step: int
    differences: tuple[float, ...]  # [action_dim], the largest over the steps of the chunk
    same_tokens: bool | None  # None where either side has no decode trace
    recorded_ms: float
    replayed_ms: float
    passes: int | None

    @property
    def largest(self) -> float:
        """The largest difference of any dimension."""
        return max(self.differences)


@dataclass(frozen=True)
class ReplaySummary:
    """All frames of a replay."""

    episodes: int
    steps: int
    identical_share: float
    same_tokens_share: float | None
    largest: tuple[float, ...]  # [action_dim]
    mean: tuple[float, ...]  # [action_dim]
    recorded_p50_ms: float
    replayed_p50_ms: float
    passes_per_action: float | None


def main(arguments: list[str]) -> int:
    """Replay; return 0, or 1 where a difference is larger than allowed."""
    parser = ArgumentParser(
        prog=PROG, allow_abbrev=False, description="Run a recording through a policy, compare."
    )
    parser.add_argument("recording", type=Path, help="a file, or a directory of recordings")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many frames")
    parser.add_argument(
        "--recorded-options",
        action="store_true",
        help="decode each frame by the method and radius it was recorded with, not the policy's",
    )
    parser.add_argument("--output", type=Path, metavar="JSONL", help="one line per frame")
    parser.add_argument(
        "--max-difference", type=float, metavar="X", help="exit with 1 if any number differs more"
    )

    def run() -> int:
        command = parse_command(parser, arguments)
        given = command.namespace
        episodes = find_episodes(given.recording)
        if not episodes:
            raise ReplayError(f"{given.recording}: no recordings below it")
        frames = replay(command.load(), episodes, given.recorded_options)
        compared = list(_write(islice(frames, given.limit), given.output))
        if not compared:
            raise ReplayError(f"{given.recording}: no whole step in {len(episodes)} recordings")
        summary = summarise(compared)
        sys.stdout.write(describe(summary) + "\n")
        allowed = given.max_difference
        return int(allowed is not None and max(summary.largest) > allowed)

    return run_command(PROG, run)


def replay(
    policy: Policy, episodes: Sequence[Path], with_recorded_options: bool = False
) -> Iterator[StepComparison]:
    """Yield every step of every episode, compared."""
    policy.warm_up()
    memory: SessionMemory | None = None
    for path in episodes:
        # A later part of a long episode goes on with the same memory.
        if memory is None or read_header(path).part == 0:
            memory = SessionMemory()
        for step in iterate_steps(path):
            options = _options(step, with_recorded_options)
            request = ActRequest(step.observation, memory, options)
            policy.check(request.observation, options)
            started_s = time.perf_counter()
            (answer,) = policy.act([request])
            spent_ms = (time.perf_counter() - started_s) * 1000
            memory = answer.memory
            yield compare(path.stem, step, answer.chunk, spent_ms)


def compare(
    episode: str, step: RecordedStep, chunk: ActionChunk, spent_ms: float
) -> StepComparison:
    """Compare a recorded step with what the policy says now."""
    was, now = step.chunk, chunk
    if was.actions.shape != now.actions.shape:
        raise ReplayError(
            f"{episode}, step {step.index}: recorded actions are {list(was.actions.shape)}, "
            f"the policy's are {list(now.actions.shape)}; was it another policy?"
        )
    known = was.trace is not None and now.trace is not None
    return StepComparison(
        episode=episode,
        step=step.index,
        differences=tuple(np.abs(was.actions - now.actions).max(axis=0).tolist()),
        same_tokens=was.trace.tokens == now.trace.tokens if known else None,  # type: ignore[union-attr]
        recorded_ms=was.timings.total_ms - was.timings.queue_ms - was.timings.wire_ms,
        replayed_ms=spent_ms,
        passes=None if now.trace is None else now.trace.num_passes,
    )


def summarise(compared: Sequence[StepComparison]) -> ReplaySummary:
    """Add up the comparisons of a replay."""
    differences = np.array([one.differences for one in compared])  # [step, action_dim]
    tokens = [one.same_tokens for one in compared if one.same_tokens is not None]
    passes = [one.passes for one in compared if one.passes is not None]
    return ReplaySummary(
        episodes=len({one.episode for one in compared}),
        steps=len(compared),
        identical_share=float((differences.max(axis=1) == 0).mean()),
        same_tokens_share=float(np.mean(tokens)) if tokens else None,
        largest=tuple(differences.max(axis=0).tolist()),
        mean=tuple(differences.mean(axis=0).tolist()),
        recorded_p50_ms=float(np.median([one.recorded_ms for one in compared])),
        replayed_p50_ms=float(np.median([one.replayed_ms for one in compared])),
        passes_per_action=float(np.mean(passes)) if passes else None,
    )


def describe(summary: ReplaySummary) -> str:
    """Return a summary for people."""
    lines = [
        f"{summary.steps} frames of {summary.episodes} recordings; "
        f"{summary.identical_share:.1%} answered with identical actions"
    ]
    if summary.same_tokens_share is not None:
        lines.append(f"same tokens: {summary.same_tokens_share:.1%} of the frames")
    lines.append("largest difference:  " + "  ".join(f"{one:.4g}" for one in summary.largest))
    lines.append("mean difference:     " + "  ".join(f"{one:.4g}" for one in summary.mean))
    lines.append(
        f"policy time, median: {summary.replayed_p50_ms:.1f} ms now, "
        f"{summary.recorded_p50_ms:.1f} ms when recorded"
    )
    if summary.passes_per_action is not None:
        lines.append(f"passes per action: {summary.passes_per_action:.2f}")
    return "\n".join(lines)


def _options(step: RecordedStep, with_recorded_options: bool) -> ActOptions:
    was = step.options
    return ActOptions(
        statistics_key=was.statistics_key,
        decoding=was.decoding if with_recorded_options else None,
        radius=was.radius if with_recorded_options else None,
        want_trace=True,
    )


def _write(compared: Iterator[StepComparison], path: Path | None) -> Iterator[StepComparison]:
    """Pass comparisons on, each as a line of a file too if there is one."""
    if path is None:
        yield from compared
        return
    with path.open("w", encoding="utf-8") as file:
        for one in compared:
            _write_line(file, one)
            yield one


def _write_line(file: TextIO, one: StepComparison) -> None:
    file.write(json.dumps(asdict(one)) + "\n")
    file.flush()
