"""Policies that misbehave on purpose, and frames to send them."""

import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deft_core.types import ActionChunk, ActOptions, Observation, ServerInfo
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_core.wire.messages import ActMessage
from deft_policies.base import (
    ActionLimits,
    OneCallPolicy,
    Policy,
    PolicyAnswer,
    PolicyRequest,
    Running,
)
from deft_policies.constant import ConstantPolicy
from deft_policies.errors import CheckpointError, DeviceError, NoActionError, RequestError
from deft_policies.memory import SessionMemory
from deft_server.serving.access import Caller

MSGPACK = {"content-type": WireFormat.MSGPACK.value}
PATIENCE_S = 60.0  # how long a fake waits for its test before it gives up
CALLER = Caller()
_CONSTANT = ConstantPolicy()


def frame(size: int = 4, fill: int = 0, instruction: str = "lift the cup") -> Observation:
    return Observation(np.full((size, size, 3), fill, np.uint8), instruction)


def packed(options: ActOptions | None = None, observation: Observation | None = None) -> bytes:
    return codec.encode_request(ActMessage(observation or frame(), options or ActOptions()))


def counted(memory: SessionMemory) -> SessionMemory:
    """A memory after one more frame."""
    return replace(memory, num_steps=memory.num_steps + 1)


@dataclass(eq=False)
class FakePolicy(OneCallPolicy):
    """Answers with the session's frame count, so that a test can see whose memory was used.

    Remembers every batch.
    """

    batches: list[list[PolicyRequest]] = field(default_factory=list)

    @property
    def info(self) -> ServerInfo:
        return _CONSTANT.info

    def check(self, observation: Observation, options: ActOptions) -> None:
        _CONSTANT.check(observation, options)

    def warm_up(self) -> None:
        """Nothing to warm."""

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        self.batches.append(list(batch))
        return [PolicyAnswer(self.answer(request), counted(request.memory)) for request in batch]

    def answer(self, request: PolicyRequest) -> ActionChunk:
        return ActionChunk(np.full((1, 7), float(counted(request.memory).num_steps)))

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


@dataclass(eq=False)
class EchoPolicy(FakePolicy):
    """Answers with the frame's first pixel, so that a test can see whose frame it was."""

    takes_s: float = 0.0  # for a batch

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        time.sleep(self.takes_s)
        return super().act(batch)

    def answer(self, request: PolicyRequest) -> ActionChunk:
        return ActionChunk(np.full((1, 7), float(request.observation.image[0, 0, 0])))


@dataclass(eq=False)
class ThinkingPolicy(FakePolicy):
    """Writes the instruction before it acts; when told to "ponder", it writes and does nothing."""

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        answers = super().act(batch)
        for index, request in enumerate(batch):
            if request.observation.instruction == "ponder":
                error = NoActionError("0 action tokens before the stop token, 7 are needed")
                error.reasoning = " why? <b>"
                nothing = ActionChunk(np.empty((0, 7)), reasoning=error.reasoning)
                answers[index] = PolicyAnswer(nothing, answers[index].memory, error)
        return answers

    def answer(self, request: PolicyRequest) -> ActionChunk:
        text = f" {request.observation.instruction} ACTION: x"
        asked = text if request.options.want_reasoning else None
        return replace(super().answer(request), reasoning=asked)


@dataclass(eq=False)
class GatedPolicy(FakePolicy):
    """Stays inside `act` until the test opens the gate."""

    entered: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S), "the test never opened the gate"
        return super().act(batch)


@dataclass(eq=False)
class FileGatedPolicy(FakePolicy):
    """Stays inside `act` until a file appears: a gate that another process can open."""

    gate: str = ""

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        until_s = time.monotonic() + PATIENCE_S
        while not os.path.exists(self.gate) and time.monotonic() < until_s:
            time.sleep(0.005)
        return super().act(batch)


@dataclass(eq=False)
class RaisingPolicy(FakePolicy):
    """Raises while `error` says so."""

    error: Callable[[Sequence[PolicyRequest]], Exception | None] = lambda _: None

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        error = self.error(batch)
        if error is not None:
            self.batches.append(list(batch))
            raise error
        return super().act(batch)


# What to raise for a batch, if anything.
Rule = Callable[[Sequence[PolicyRequest]], Exception | None]


def fails_times(count: int, error: Exception) -> Rule:
    """Return a rule that raises in the first `count` calls."""
    left = [error] * count
    return lambda _: left.pop() if left else None


def out_of_memory_above(size: int) -> Rule:
    """Return a rule that raises for batches above a size, as a small GPU would."""

    def rule(batch: Sequence[PolicyRequest]) -> Exception | None:
        return DeviceError("CUDA out of memory (simulated)") if len(batch) > size else None

    return rule


def dislikes(
    instruction: str, error: Exception
) -> Callable[[Sequence[PolicyRequest]], Exception | None]:
    """Return a rule that raises for any batch with this instruction in it."""
    return lambda batch: (
        error if any(one.observation.instruction == instruction for one in batch) else None
    )


@dataclass(eq=False)
class LimitedFake(FakePolicy):
    """Answers with what the test puts into `next_actions`; six motions and a gripper."""

    next_actions: NDArray[np.float64] = field(default_factory=lambda: np.zeros((1, 7)))
    may_exceed: bool = False
    limit: float = 1.0

    def answer(self, request: PolicyRequest) -> ActionChunk:
        return ActionChunk(self.next_actions)

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        high = np.full(7, self.limit)
        return ActionLimits(-high, high, self.may_exceed)


@dataclass(eq=False)
class PickyPolicy(FakePolicy):
    """Refuses a frame in `act`, which it should have refused in `check`."""

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        _refuse(batch)
        return super().act(batch)


@dataclass(eq=False)
class SteppedFake(FakePolicy):
    """Needs as many rounds for a frame as its instruction says; `rounds` has who was in each.

    With a `turnstile` a round begins when the test lets it. `error` may end a round.
    """

    joins_midway = True
    rounds: list[list[str]] = field(default_factory=list)
    turnstile: threading.Semaphore | None = None
    error: Callable[[list[str]], Exception | None] = lambda _: None
    left: dict[Running, int] = field(default_factory=dict)

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        _refuse(batch)
        return super().act(batch)

    def start(self, batch: Sequence[PolicyRequest]) -> list[Running]:
        _refuse(batch)
        started = [Running(one) for one in batch]
        self.left.update((one, int(_name_of(one).split()[0])) for one in started)
        return started

    def step(self, first: Collection[Running] = ()) -> list[Running]:
        if self.turnstile is not None:
            assert self.turnstile.acquire(timeout=PATIENCE_S), "the test let no round begin"
        played = [one for one in self.left if one in first] or list(self.left)
        names = [_name_of(one) for one in played]
        self.rounds.append(names)
        error = self.error(names)
        if error is not None:
            self.left.clear()
            raise error
        self.left.update((one, self.left[one] - 1) for one in played)
        ended = [one for one, left in self.left.items() if not left]
        for one in ended:
            del self.left[one]
            one.answer = PolicyAnswer(self.answer(one.request), counted(one.request.memory))
        return ended

    def cancel(self, running: Running) -> None:
        self.left.pop(running, None)


@dataclass(eq=False)
class RowByRowPolicy(SteppedFake):
    """Commits a row of its answer in every round, as many as its instruction says.

    Where the instruction names a problem the answer turns out to be none.
    """

    def step(self, first: Collection[Running] = ()) -> list[Running]:
        ended = super().step(first)
        for one in (*self.left, *ended):
            if one.request.on_actions is not None:
                one.request.on_actions(self.rows(one, self.left.get(one, 0)))
        for one in ended:
            error = NoActionError("57 numbers") if "problem" in _name_of(one) else None
            one.answer = PolicyAnswer(ActionChunk(self.rows(one, 0)), error=error)
        return ended

    def rows(self, running: Running, left: int) -> NDArray[np.float64]:
        num_rows = int(_name_of(running).split()[0]) - left
        return np.repeat(np.arange(num_rows, dtype=np.float64)[:, None], 7, axis=1)


def _refuse(batch: Sequence[PolicyRequest]) -> None:
    if any(one.observation.instruction == "refuse" for one in batch):
        raise RequestError("instruction", "cannot be read after all")


def _name_of(running: Running) -> str:
    return running.request.observation.instruction


# Loaded by name; what they do, the instruction says.


class ObedientPolicy(FakePolicy):
    """Answers with a sum over the frame and the number of the session's step."""

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        for request in batch:
            obey(request.observation.instruction)
        return [PolicyAnswer(self.answer(one), counted(one.memory)) for one in batch]

    def answer(self, request: PolicyRequest) -> ActionChunk:
        observation = request.observation
        pictures = [observation.image, *observation.cameras.values()]
        action = np.zeros((1, 7))
        action[0, 0] = checksum(*(one.tobytes() for one in pictures)) / 2**32
        action[0, 1] = (request.memory.num_steps + 1) / 1000
        return ActionChunk(action)

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        return ActionLimits(np.full(7, -1.0), np.full(7, 1.0))


def checksum(*parts: bytes) -> int:
    return zlib.crc32(b"".join(parts))


def obey(instruction: str) -> None:
    if instruction == "leave":
        raise SystemExit(3)
    if instruction == "exhaust":
        raise DeviceError("no memory")
    if instruction == "refuse":
        raise RequestError("instruction", "is not liked")


def obedient() -> Policy:
    return ObedientPolicy()


def broken(how: str) -> Policy:
    if how == "files":
        raise CheckpointError("config.json is missing")
    if how == "exit":
        raise SystemExit(3)
    raise ValueError("unforeseen")
