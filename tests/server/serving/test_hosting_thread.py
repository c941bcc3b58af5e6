"""A policy on its thread: every frame gets its own answer, or fails alone for its own reason."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest

from deft_core.types import ActionChunk, ActOptions, Observation
from deft_policies.base import Policy
from deft_policies.errors import DeviceError, RequestError, UnknownStatisticsKeyError
from deft_policies.progress import doing
from deft_server.errors import NotReadyError, PolicyFailedError
from deft_server.serving import scheduler
from deft_server.serving.hosting import LoadPolicy
from deft_server.serving.lifecycle import ServerPhase
from deft_server.serving.service import Service
from deft_server.settings import Settings
from tests.standins.policies import CALLER, broken, checksum, frame, obedient


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        async def limited() -> None:
            await asyncio.wait_for(test(**fixtures), 120)

        asyncio.run(limited())

    return run


async def started(load: LoadPolicy = obedient, **settings: Any) -> Service:
    service = Service(load, Settings(**settings))
    service.start()
    await service.scheduler.settled()
    return service


async def act(
    service: Service, observation: Observation, session_id: str | None = None
) -> ActionChunk:
    return await service.act(observation, ActOptions(session_id=session_id), CALLER)


@on_a_loop
async def test_while_a_policy_loads_the_log_and_callers_hear_what_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The log was silent for 20 s, and a caller heard no more than that it loads."""
    may_go_on = threading.Event()

    def load() -> Policy:
        doing("reading the weights", 0.25)
        assert may_go_on.wait(60)
        doing("")
        return obedient()

    monkeypatch.setattr(scheduler, "LOG_PROGRESS_EVERY_S", 0.01)
    caplog.set_level("INFO")
    service = Service(load, Settings())
    service.start()
    while not any("the policy is loading: reading" in one for one in caplog.messages):
        await asyncio.sleep(0.005)
    with pytest.raises(NotReadyError, match=r"is loading: reading the weights, 25%, about \d+ s"):
        await act(service, frame())
    may_go_on.set()
    await service.scheduler.settled()
    num_lines = len(caplog.messages)
    await asyncio.sleep(0.05)
    assert not any("is loading" in one for one in caplog.messages[num_lines:])
    await service.close()


@on_a_loop
async def test_every_frame_is_answered_as_it_was_sent_and_with_its_own_memory():
    service = await started()
    rng = np.random.default_rng(0)
    for step in range(3):
        for robot in ("a", "b"):
            images = [rng.integers(0, 256, (9, 7, 3), np.uint8) for _ in range(3)]
            cameras = {"left": images[1], "right": images[2]}
            observation = Observation(images[0], "lift it ✓", cameras, np.ones(3, np.float32))
            chunk = await act(service, observation, robot)
            expected = checksum(*(one.tobytes() for one in images)) / 2**32
            assert chunk.actions[0, :2].tolist() == [expected, (step + 1) / 1000]
    await service.close()


@on_a_loop
async def test_frames_of_a_batch_fail_alone_and_for_their_own_reasons():
    service = await started()
    asked = ["refuse", "good", "leave"]
    found = await asyncio.gather(
        *(act(service, frame(instruction=one), one) for one in asked), return_exceptions=True
    )
    kinds = [RequestError, ActionChunk, PolicyFailedError]
    assert [type(one) for one in found] == kinds
    with pytest.raises(DeviceError):
        await act(service, frame(instruction="exhaust"))
    with pytest.raises(UnknownStatisticsKeyError):
        await service.act(frame(), ActOptions(statistics_key="nobody's"), CALLER)
    with pytest.raises(RequestError, match="decoding"):
        await service.act(frame(), ActOptions(decoding="unheard of"), CALLER)
    await service.close()


@pytest.mark.parametrize(
    ("how", "told"), [("files", "config.json"), ("exit", "3"), ("bug", "unforeseen")]
)
@on_a_loop
async def test_a_policy_that_cannot_be_loaded_is_given_up(how: str, told: str):
    service = await started(partial(broken, how))
    assert service.readiness.phase is ServerPhase.BROKEN
    assert told in service.readiness.sentence
    await service.close()
