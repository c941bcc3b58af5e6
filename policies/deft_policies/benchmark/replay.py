"""Replaying observations through several contenders in turn, and what is kept of every answer.

The observations come from a data set's episodes or listed pictures, or are generated.
"""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from deft_core.datasets.formats import read_dataset
from deft_core.types import ActionChunk, ActOptions, Image, Observation
from deft_policies.base import Policy, PolicyRequest
from deft_policies.commands.act import observe, read_cases
from deft_policies.errors import PolicyError
from deft_policies.memory import SessionMemory
from deft_policies.progress import counted

_INSTRUCTIONS = (
    "pick up the black bowl between the plate and the ramekin and place it on the plate",
    "put the white mug on the left plate",
    "open the top drawer",
)


@dataclass(frozen=True, eq=False)
class ReplayFrame:
    """An observation and the episode it belongs to: frames of one share a session."""

    observation: Observation
    episode: str
    statistics_key: str | None = None


def read_stored(data: Path, limit: int, cameras: Sequence[str] = ()) -> list[ReplayFrame]:
    """The first frames of a data set."""
    episodes = read_dataset(data, cameras)
    steps = ((episode.name, step) for episode in episodes for step in episode.steps())
    frames = [
        ReplayFrame(step.observation, name, step.statistics_key)
        for name, step in islice(steps, limit)
    ]
    if not frames:
        raise PolicyError(f"{data}: none of its episodes has a step")
    return frames


def read_pictures(path: Path, limit: int) -> list[ReplayFrame]:
    """The pictures that the lines of a file name, as for `deft act`."""
    return [
        ReplayFrame(observe(case), case.session_id or f"line {number}", case.statistics_key)
        for number, case in enumerate(read_cases(path)[:limit])
    ]


def generate_frames(count: int) -> list[ReplayFrame]:
    """Blobs that drift over a fixed background, one instruction per ten frames."""
    frames = []
    for index, image in enumerate(_scene(np.random.default_rng(0), count, 256)):
        episode = index // 10
        observation = Observation(image, _INSTRUCTIONS[episode % len(_INSTRUCTIONS)])
        frames.append(ReplayFrame(observation, f"episode {episode}"))
    return frames


def with_statistics_key(frames: Sequence[ReplayFrame], policy: Policy) -> list[ReplayFrame]:
    """Frames that name no statistics get the first there are, where the policy has no default.

    Which ones they are changes units, not times.
    """
    info = policy.info
    if info.default_statistics_key is not None:
        return list(frames)
    first = info.statistics_keys[0]
    return [replace(frame, statistics_key=frame.statistics_key or first) for frame in frames]


def _scene(rng: np.random.Generator, count: int, size: int) -> Iterator[Image]:
    across, down = np.meshgrid(np.arange(size), np.arange(size))
    background = rng.integers(60, 160, (8, 8, 3)).repeat(size // 8, 0).repeat(size // 8, 1)
    centres = rng.uniform(0.2, 0.8, (3, 2)) * size
    speeds = rng.uniform(-0.01, 0.01, (3, 2)) * size
    colours = rng.integers(0, 256, (3, 3))
    for step in range(count):
        image = background.copy()
        for centre, speed, colour in zip(centres, speeds, colours, strict=True):
            x, y = centre + speed * step
            image[(across - x) ** 2 + (down - y) ** 2 < (size * 0.08) ** 2] = colour
        noise = rng.integers(-2, 3, image.shape)
        yield np.clip(image + noise, 0, 255).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class Contender:
    """One way of answering: a policy and how it is asked."""

    name: str
    policy: Policy
    decoding: str | None = None
    radius: int | None = None
    batch_size: int = 1
    want_reasoning: bool = True  # where the policy can

    def options(self, frame: ReplayFrame) -> ActOptions:
        """How this contender asks for a frame."""
        return ActOptions(
            statistics_key=frame.statistics_key,
            decoding=self.decoding,
            radius=self.radius,
            want_reasoning=self.want_reasoning,
        )


@dataclass(frozen=True, eq=False)
class MeasuredAnswer:
    """One frame's answer, the time of the whole call and how much of it this thread worked."""

    wall_ms: float
    chunk: ActionChunk
    worked_ms: float = 0.0


@dataclass(eq=False)
class Replay:
    """Everything one contender answered, in the order of the frames."""

    contender: Contender
    answers: list[MeasuredAnswer] = field(default_factory=list)
    memories: dict[str, list[SessionMemory]] = field(default_factory=dict)


def replay(
    contenders: Sequence[Contender],
    frames: Sequence[ReplayFrame],
    num_warm_ups: int,
    *,
    may_stop: bool = False,
) -> list[Replay]:
    """Answer every frame with every contender, taking turns frame by frame.

    Taking turns spreads what else happens on the machine evenly. The first frames are answered
    `num_warm_ups` times beforehand, in sessions of their own, and not counted. With
    `may_stop`, SIGINT or SIGTERM makes it return the answers of the frames that every contender has
    answered, if there are any.
    """
    for contender in contenders:
        warm = Replay(contender)
        for frame in (list(frames) * num_warm_ups)[:num_warm_ups]:
            _answer(warm, frame)
    runs = [Replay(contender) for contender in contenders]
    name = ", ".join(contender.name for contender in contenders)
    try:
        with terminated_as_interrupted() if may_stop else nullcontext():
            for frame in counted(frames, len(frames), name, "frame"):
                for run in runs:
                    run.answers.append(_answer(run, frame))
    except KeyboardInterrupt:
        done = min(len(run.answers) for run in runs)
        if not may_stop or not done:
            raise
        for run in runs:
            del run.answers[done:]
    return runs


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which `timeout` and batch systems send, raises `KeyboardInterrupt` as SIGINT does.

    Signals reach the main thread alone; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _answer(run: Replay, frame: ReplayFrame) -> MeasuredAnswer:
    """A batch is the same frame several times, each for a robot of its own."""
    contender = run.contender
    if frame.episode not in run.memories:
        run.memories.clear()
        run.memories[frame.episode] = [SessionMemory()] * contender.batch_size
    options = contender.options(frame)
    batch = [
        PolicyRequest(frame.observation, memory, options) for memory in run.memories[frame.episode]
    ]
    is_alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    start, worked = time.perf_counter(), time.thread_time()
    answers = contender.policy.act(batch)
    wall_ms = (time.perf_counter() - start) * 1e3
    # Of several threads, or of a device, this one's share says nothing.
    worked_ms = (time.thread_time() - worked) * 1e3 if is_alone else 0.0
    run.memories[frame.episode] = [answer.memory for answer in answers]
    return MeasuredAnswer(wall_ms, answers[0].chunk, worked_ms)
