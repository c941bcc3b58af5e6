"""Replaying frames through several contenders in turn, and what is kept of every answer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from deft_client.types import ActionChunk, ActOptions
from deft_policies.base import ActRequest, Policy, Session
from deft_policies.benchmark.frames import Frame

_GPU_COPY_BYTES = 1 << 31
_CPU_COPY_BYTES = 1 << 27
_GPU_SIDE = 8192
_CPU_SIDE = 1024
_ROUNDS = 5


@dataclass(frozen=True)
class DeviceRates:
    """Best of a few rounds; bytes count both what a copy reads and what it writes."""

    bytes_per_s: float
    flops_per_s: float
    description: str


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Measure copy bandwidth and the rate of a large matrix product in this number format."""
    is_cuda = device.type == "cuda"
    num_bytes = _GPU_COPY_BYTES if is_cuda else _CPU_COPY_BYTES
    side = _GPU_SIDE if is_cuda else _CPU_SIDE
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copied_s = _best_s(lambda: target.copy_(source), device)
    first = torch.ones(side, side, device=device, dtype=dtype)
    second = torch.ones_like(first)
    multiplied_s = _best_s(lambda: first @ second, device)
    return DeviceRates(2 * num_bytes / copied_s, 2 * side**3 / multiplied_s, describe(device))


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_ROUNDS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


@dataclass(frozen=True, eq=False)
class Contender:
    """One way of answering: a policy and how it is asked."""

    name: str
    policy: Policy
    decoding: str | None = None
    radius: int | None = None
    batch_size: int = 1

    def options(self, frame: Frame) -> ActOptions:
        """How this contender asks for a frame."""
        return ActOptions(
            statistics_key=frame.statistics_key, decoding=self.decoding, radius=self.radius
        )


@dataclass(frozen=True, eq=False)
class Answer:
    """One frame's answer and the wall-clock time of the whole call."""

    wall_ms: float
    chunk: ActionChunk


@dataclass(eq=False)
class Run:
    """Everything one contender answered, in the order of the frames."""

    contender: Contender
    answers: list[Answer] = field(default_factory=list)
    sessions: dict[str, list[Session]] = field(default_factory=dict)


def replay(
    contenders: Sequence[Contender],
    frames: Sequence[Frame],
    num_warm_ups: int,
    progress: Callable[[int], None],
) -> list[Run]:
    """Answer every frame with every contender, taking turns frame by frame.

    Taking turns spreads what else happens on the machine evenly. The first frames are answered
    `num_warm_ups` times beforehand, in sessions of their own, and not counted.
    """
    for contender in contenders:
        warm = Run(contender)
        for frame in (list(frames) * num_warm_ups)[:num_warm_ups]:
            _answer(warm, frame)
    runs = [Run(contender) for contender in contenders]
    for index, frame in enumerate(frames):
        for run in runs:
            run.answers.append(_answer(run, frame))
        progress(index + 1)
    return runs


def _answer(run: Run, frame: Frame) -> Answer:
    """A batch is the same frame several times, each for a robot of its own."""
    contender = run.contender
    if frame.episode not in run.sessions:
        run.sessions.clear()
        opened = [contender.policy.open_session() for _ in range(contender.batch_size)]
        run.sessions[frame.episode] = opened
    options = contender.options(frame)
    batch = [
        ActRequest(frame.observation, session, options) for session in run.sessions[frame.episode]
    ]
    start = time.perf_counter()
    chunks = contender.policy.act(batch)
    return Answer((time.perf_counter() - start) * 1e3, chunks[0])
