"""Policies that another process loads by name; what they do, the instruction says."""

import ctypes
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deft_client.types import ActionChunk
from deft_policies.base import ActAnswer, ActionLimits, ActRequest, Policy
from deft_policies.errors import CheckpointError, DeviceError, RequestError
from tests.server.fakes import FakePolicy, counted

HELD_MS = 300


class ObedientPolicy(FakePolicy):
    """Answers with a sum over the frame and the number of the session's step."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        for request in batch:
            obey(request.observation.instruction)
        return [ActAnswer(self.answer(one), counted(one.memory)) for one in batch]

    def answer(self, request: ActRequest) -> ActionChunk:
        observation = request.observation
        pictures = [observation.image, *observation.cameras.values()]
        action = np.zeros((1, 7))
        action[0, 0] = checksum(*(one.tobytes() for one in pictures)) / 2**32
        action[0, 1] = (request.memory.num_steps + 1) / 1000
        return ActionChunk(action)

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        return ActionLimits(np.full(7, -1.0), np.full(7, 1.0), np.arange(7) < 6)


def checksum(*parts: bytes) -> int:
    return zlib.crc32(b"".join(parts))


def obey(instruction: str) -> None:
    if instruction == "crash":
        os.abort()
    if instruction == "hang":
        time.sleep(60)
    if instruction == "hold the interpreter":
        ctypes.PyDLL(None).usleep(HELD_MS * 1000)  # unlike CDLL, it does not let go meanwhile
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


def dies_twice(folder: str) -> Policy:
    """The process ends while it loads, but for the third time."""
    count = len(list(Path(folder).iterdir()))
    (Path(folder) / str(count)).touch()
    if count in (0, 1):
        os._exit(9)
    return ObedientPolicy()
