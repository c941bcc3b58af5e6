"""`deft replay DATA`: run stored frames through a policy and compare its actions with those done.

Frames of one episode share a session, so that what a policy remembers is as it was. Recordings
know chunks, tokens and times; of other data sets the first action of an answer is compared.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from shlex import quote

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deft_core.datasets.flags import add_camera_flag, read_cameras
from deft_core.datasets.formats import find_format, find_parts, read_dataset, read_recordings
from deft_core.measures.table import share_text
from deft_core.methods import with_knobs
from deft_core.program import CommandParser
from deft_core.recordings import RecordedStep, StepReader
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_policies.base import Policy, PolicyRequest
from deft_policies.commands.parse import parse_command, run_command, target_flags
from deft_policies.errors import PolicyError
from deft_policies.memory import SessionMemory

PROG = "deft replay"


class ReplayError(PolicyError):
    """The recording and the policy cannot be compared; the message says why."""


@dataclass(frozen=True, eq=False)
class PastStep:
    """A frame and what was done then; `recorded` where a server or a robot recorded all of it."""

    episode: str
    index: int
    observation: Observation
    actions: NDArray[np.float64]  # [step, action_dim]
    statistics_key: str | None = None
    recorded: RecordedStep | None = None


@dataclass(frozen=True)
class StepComparison:
    """One frame: how far the new actions are from the recorded ones, in robot units."""

    episode: str
    step: int
    differences: tuple[float, ...]  # [action_dim], the largest over the steps of the chunk
    same_tokens: bool | None  # None where either side has no decode trace
    same_text: bool | None  # None where either side wrote nothing but the action
    recorded_ms: float | None
    replayed_ms: float
    passes: int | None

    @property
    def largest(self) -> float:
        """The largest difference of any dimension."""
        return max(self.differences)


def main(arguments: list[str]) -> int:
    """Replay; return 0, or 1 where a difference is larger than allowed."""
    parser = CommandParser(
        prog=PROG, allow_abbrev=False, description="Run a data set through a policy, compare."
    )
    parser.add_argument("data", type=Path, help="recordings, or a data set of another format")
    add_camera_flag(parser)
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many frames")
    parser.add_argument(
        "--recorded-options",
        action="store_true",
        help="decode each frame by the method, radius and plan it was recorded with, not the "
        "policy's",
    )
    parser.add_argument("--output", type=Path, metavar="JSONL", help="one line per frame")
    parser.add_argument(
        "--max-difference", type=float, metavar="X", help="exit with 1 if any number differs more"
    )

    def run() -> int:
        command = parse_command(parser, arguments)
        given = command.namespace
        steps = read_steps(given.data, read_cameras(given))
        frames = replay(command.load(), steps, given.recorded_options)
        compared = list(_write(islice(frames, given.limit), given.output))
        if not compared:
            raise ReplayError(f"{given.data}: no whole step in its episodes")
        following = f"deft bench --recording {quote(str(given.data))} {target_flags(given)}"
        sys.stdout.write(f"{describe(compared)}\nnext: {following}\n")
        differences = np.array([one.differences for one in compared])
        allowed = given.max_difference
        is_near = allowed is None or bool((differences <= allowed).all())  # NaN is not
        return int(not is_near)

    return run_command(PROG, run)


def read_steps(data: Path, cameras: Sequence[str] = ()) -> Iterator[PastStep]:
    """Yield every step of every episode, and all that is known of it."""
    if find_format(data).read is read_recordings:
        for parts in tqdm(find_parts(data), unit="episode", disable=None):  # on a terminal alone
            for step in (step for part in parts for step in StepReader(part)):
                yield PastStep(
                    episode=str(parts[0]),
                    index=step.index,
                    observation=step.observation,
                    actions=step.chunk.actions,
                    statistics_key=step.options.statistics_key,
                    recorded=step,
                )
        return
    for episode in tqdm(list(read_dataset(data, cameras)), unit="episode", disable=None):
        for index, stored in enumerate(episode.steps()):
            yield PastStep(episode.name, index, stored.observation, stored.action[None])


def replay(
    policy: Policy, steps: Iterable[PastStep], with_recorded_options: bool = False
) -> Iterator[StepComparison]:
    """Yield every step, compared; the policy remembers what came before in the same episode."""
    policy.warm_up()
    for _, episode in groupby(steps, lambda step: step.episode):
        memory = SessionMemory()
        for step in episode:
            options = _options(step, with_recorded_options)
            if not policy.info.thinks_when_asked:
                options = replace(options, want_reasoning=True)
            request = PolicyRequest(step.observation, memory, options)
            policy.check(request.observation, options)
            started_s = time.perf_counter()
            (answer,) = policy.act([request])
            spent_ms = (time.perf_counter() - started_s) * 1000
            memory = answer.memory
            yield compare(step, answer.chunk, spent_ms)


def compare(step: PastStep, chunk: ActionChunk, spent_ms: float) -> StepComparison:
    """Compare a step with what the policy says now."""
    actions = chunk.actions if step.recorded else chunk.actions[:1]
    if not len(chunk.actions):  # a text without an action: as different as can be
        actions = np.full_like(step.actions, np.inf)
    if step.actions.shape != actions.shape:
        raise ReplayError(
            f"{step.episode}, step {step.index}: recorded actions are {list(step.actions.shape)}, "
            f"the policy's are {list(actions.shape)}; was it another policy?"
        )
    was, now = step.recorded.chunk if step.recorded else None, chunk.trace
    then = was.trace if was else None
    return StepComparison(
        episode=step.episode,
        step=step.index,
        differences=tuple(np.abs(step.actions - actions).max(axis=0).tolist()),
        same_tokens=then.tokens == now.tokens if then and now else None,
        same_text=was.reasoning == chunk.reasoning if was and was.reasoning is not None else None,
        recorded_ms=was.timings.total_ms - was.timings.queue_ms - was.timings.wire_ms
        if was
        else None,
        replayed_ms=spent_ms,
        passes=now.num_passes if now else None,
    )


def describe(compared: Sequence[StepComparison]) -> str:
    """Return what a replay came to, for people."""
    differences = np.array([one.differences for one in compared])  # [step, action_dim]
    identical = (differences.max(axis=1) == 0).mean()
    lines = [
        f"{len(compared)} frames of {len({one.episode for one in compared})} episodes; "
        f"{share_text(identical)} answered with identical actions"
    ]
    same_tokens = [one.same_tokens for one in compared if one.same_tokens is not None]
    if same_tokens:
        lines.append(
            f"same tokens: {share_text(sum(same_tokens) / len(same_tokens))} of the frames"
        )
    same_text = [one.same_text for one in compared if one.same_text is not None]
    if same_text:
        lines.append(f"same text: {share_text(sum(same_text) / len(same_text))} of the frames")
    largest, mean = differences.max(axis=0), differences.mean(axis=0)
    lines.append("largest difference:  " + "  ".join(f"{one:.4g}" for one in largest))
    lines.append("mean difference:     " + "  ".join(f"{one:.4g}" for one in mean))
    recorded_ms = [one.recorded_ms for one in compared if one.recorded_ms is not None]
    then = f", {np.median(recorded_ms):.1f} ms when recorded" if recorded_ms else ""
    replayed_ms = np.median([one.replayed_ms for one in compared])
    lines.append(f"policy time, median: {replayed_ms:.1f} ms now{then}")
    passes = [one.passes for one in compared if one.passes is not None]
    if passes:
        lines.append(f"passes per action: {np.mean(passes):.2f}")
    return "\n".join(lines)


def _options(step: PastStep, with_recorded_options: bool) -> ActOptions:
    was = step.recorded.options if step.recorded and with_recorded_options else ActOptions()
    trace = step.recorded.chunk.trace if step.recorded and with_recorded_options else None
    decoding = was.decoding
    if trace is not None and trace.plan:
        decoding = with_knobs(trace.method, {"plan": trace.plan})
    return ActOptions(
        statistics_key=step.statistics_key,
        decoding=decoding,
        radius=was.radius,
        want_trace=True,
        want_reasoning=bool(step.recorded and step.recorded.chunk.reasoning),
        max_tokens=was.max_tokens,
    )


def _write(compared: Iterator[StepComparison], path: Path | None) -> Iterator[StepComparison]:
    """Pass comparisons on, each as a line of a file too if there is one."""
    if path is None:
        yield from compared
        return
    with path.open("w", buffering=1, encoding="utf-8") as file:  # line by line, for whoever watches
        for one in compared:
            file.write(json.dumps(asdict(one)) + "\n")
            yield one
