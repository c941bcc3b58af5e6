"""Policies that misbehave on purpose, and frames to send them."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deft_client.types import ActionChunk, ActOptions, Observation, ServerInfo
from deft_client.wire import msgpack_codec
from deft_client.wire.messages import ActMessage
from deft_policies.base import ActAnswer, ActionLimits, ActRequest
from deft_policies.constant import ConstantPolicy
from deft_policies.errors import DeviceError, RequestError
from deft_policies.memory import SessionMemory
from deft_server.serving.access import Caller

MSGPACK = {"content-type": msgpack_codec.CONTENT_TYPE}
PATIENCE_S = 10.0  # how long a fake waits for its test before it gives up
CALLER = Caller()
_CONSTANT = ConstantPolicy()


def frame(size: int = 4, fill: int = 0, instruction: str = "lift the cup") -> Observation:
    return Observation(np.full((size, size, 3), fill, np.uint8), instruction)


def packed(options: ActOptions | None = None, observation: Observation | None = None) -> bytes:
    return msgpack_codec.encode_request(ActMessage(observation or frame(), options or ActOptions()))


def counted(memory: SessionMemory) -> SessionMemory:
    """A memory after one more frame."""
    return replace(memory, num_steps=memory.num_steps + 1)


@dataclass(eq=False)
class FakePolicy:
    """Answers with the session's frame count, so that a test can see whose memory was used.

    Remembers every batch.
    """

    batches: list[list[ActRequest]] = field(default_factory=list)

    @property
    def info(self) -> ServerInfo:
        return _CONSTANT.info

    def check(self, observation: Observation, options: ActOptions) -> None:
        _CONSTANT.check(observation, options)

    def warm_up(self) -> None:
        """Nothing to warm."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        self.batches.append(list(batch))
        return [ActAnswer(self.answer(request), counted(request.memory)) for request in batch]

    def answer(self, request: ActRequest) -> ActionChunk:
        return ActionChunk(np.full((1, 7), float(counted(request.memory).num_steps)))

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


@dataclass(eq=False)
class GatedPolicy(FakePolicy):
    """Stays inside `act` until the test opens the gate."""

    entered: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S), "the test never opened the gate"
        return super().act(batch)


@dataclass(eq=False)
class FileGatedPolicy(FakePolicy):
    """Stays inside `act` until a file appears: a gate that another process can open."""

    gate: str = ""

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        until_s = time.monotonic() + PATIENCE_S
        while not os.path.exists(self.gate) and time.monotonic() < until_s:
            time.sleep(0.005)
        return super().act(batch)


@dataclass(eq=False)
class RaisingPolicy(FakePolicy):
    """Raises while `error` says so."""

    error: Callable[[Sequence[ActRequest]], Exception | None] = lambda _: None

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        error = self.error(batch)
        if error is not None:
            self.batches.append(list(batch))
            raise error
        return super().act(batch)


Rule = Callable[[Sequence[ActRequest]], Exception | None]  # what to raise for a batch, if anything


def fails_times(count: int, error: Exception) -> Rule:
    """Return a rule that raises in the first `count` calls."""
    left = [error] * count
    return lambda _: left.pop() if left else None


def out_of_memory_above(size: int) -> Rule:
    """Return a rule that raises for batches above a size, as a small GPU would."""

    def rule(batch: Sequence[ActRequest]) -> Exception | None:
        return DeviceError("CUDA out of memory (simulated)") if len(batch) > size else None

    return rule


def dislikes(
    instruction: str, error: Exception
) -> Callable[[Sequence[ActRequest]], Exception | None]:
    """Return a rule that raises for any batch with this instruction in it."""
    return lambda batch: (
        error if any(one.observation.instruction == instruction for one in batch) else None
    )


@dataclass(eq=False)
class LimitedFake(FakePolicy):
    """Answers with what the test puts into `next_actions`; six motions and a gripper."""

    next_actions: NDArray[np.float64] = field(default_factory=lambda: np.zeros((1, 7)))
    may_exceed: bool = False

    def answer(self, request: ActRequest) -> ActionChunk:
        return ActionChunk(self.next_actions)

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        ones = np.ones(7)
        return ActionLimits(-ones, ones, np.arange(7) < 6, self.may_exceed)


@dataclass(eq=False)
class PickyPolicy(FakePolicy):
    """Refuses a frame in `act`, which it should have refused in `check`."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        if any(one.observation.instruction == "refuse" for one in batch):
            raise RequestError("instruction", "cannot be read after all")
        return super().act(batch)
