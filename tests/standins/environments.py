"""Fakes of everything around an episode: simulator, policy, clock and the way to the policy."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deft_core.types import ActionChunk, DecodeTrace, Observation, PassTrace, StageTimings
from deft_libero.evaluation.episode import BackgroundCalls, Clock
from deft_libero.simulator.environment import Frame, StepResult
from deft_libero.simulator.suites import Task

TASK = Task("libero_object", 3, "pick_up_the_soup")


class CountingEnvironment:
    """Its frames show how many steps were made; the goal holds from `done_at` steps on."""

    def __init__(self, done_at: int | None = None) -> None:
        self.task = TASK
        self.num_trials = 50
        self.done_at = done_at
        self.trials: list[int] = []
        self.actions: list[NDArray[np.float64]] = []

    def reset(self, trial: int) -> Frame:
        self.trials.append(trial)
        self.actions.clear()
        return self._frame()

    def step(self, action: NDArray[np.float64]) -> StepResult:
        self.actions.append(action)
        done = self.done_at is not None and len(self.actions) >= self.done_at
        return StepResult(self._frame(), done)

    def close(self) -> None:
        pass

    def _frame(self) -> Frame:
        image = np.full((8, 8, 3), len(self.actions) % 256, dtype=np.uint8)
        return Frame(image, np.zeros(8, dtype=np.float32))


class EchoPolicy:
    """Answers with `chunk_length` actions whose first number is what the frame shows."""

    def __init__(self, chunk_length: int = 1, trace: DecodeTrace | None = None) -> None:
        self.chunk_length = chunk_length
        self.trace = trace
        self.sessions: list[str] = []
        self.seen: list[Observation] = []

    def start(self, session_id: str) -> None:
        self.sessions.append(session_id)

    def act(self, observation: Observation) -> ActionChunk:
        self.seen.append(observation)
        return echo(observation, self.chunk_length, self.trace)

    def close(self) -> None:
        pass


def echo(
    observation: Observation, chunk_length: int = 1, trace: DecodeTrace | None = None
) -> ActionChunk:
    actions = np.zeros((chunk_length, 7))
    actions[:, 0] = observation.image[0, 0, 0]
    actions[:, 1] = np.arange(chunk_length)
    return ActionChunk(actions, StageTimings(total_ms=5.0, round_trip_ms=6.0), trace)


@dataclass
class FakeClock(Clock):
    """Time that passes only when somebody sleeps or works."""

    seconds: float = 100.0

    def now_s(self) -> float:
        return self.seconds

    def sleep_until(self, moment_s: float) -> None:
        self.seconds = max(self.seconds, moment_s)


@dataclass
class ScriptedCalls(BackgroundCalls):
    """Delivers echoes after scripted latencies of fake time; the last one repeats."""

    clock: FakeClock
    latencies_s: list[float]
    chunk_length: int = 1
    sent: list[int] = field(default_factory=list)  # what the frames showed
    _pending: tuple[float, float, Observation] | None = None

    def send(self, observation: Observation) -> None:
        assert self._pending is None
        latency_s = self.latencies_s[min(len(self.sent), len(self.latencies_s) - 1)]
        self.sent.append(int(observation.image[0, 0, 0]))
        self._pending = (self.clock.now_s() + latency_s, latency_s, observation)

    def collect(self) -> tuple[ActionChunk, float] | None:
        if self._pending is None or self.clock.now_s() < self._pending[0] - 1e-9:
            return None
        _, latency_s, observation = self._pending
        self._pending = None
        return echo(observation, self.chunk_length), latency_s

    def close(self) -> None:
        pass


class SlowEnvironment(CountingEnvironment):
    """Takes fake time for every step."""

    def __init__(self, clock: FakeClock, step_s: float, done_at: int | None = None) -> None:
        super().__init__(done_at)
        self._clock = clock
        self._step_s = step_s

    def step(self, action: NDArray[np.float64]) -> StepResult:
        self._clock.seconds += self._step_s
        return super().step(action)


def trace_of(accepted: tuple[int, ...], relaxed: int = 0) -> DecodeTrace:
    """A trace of 7 tokens whose passes accepted that many drafts each."""
    passes = tuple(
        PassTrace(
            is_prefill=number == 0,
            tokens=tuple(range(length + 1)),
            parents=tuple(range(-1, length)),
            sources=("",) * (length + 1),
            predictions=tuple(range(1, length + 2)),
            path=tuple(range(1, length + 1)),
            bonus=length + 1,
        )
        for number, length in enumerate(accepted)
    )
    predicted = tuple(range(7))
    tokens = tuple(token + (token < relaxed) for token in predicted)
    return DecodeTrace("lossless", tokens, predicted, (1.0,) * 7, passes)
