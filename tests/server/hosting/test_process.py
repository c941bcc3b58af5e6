"""A policy on a thread or in a process of its own: the same from the robot's side, until it dies.

Killed, crashed, hanging or holding the interpreter, the policy takes nothing along but the frames
it had in hand.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deft_client.recordings import find_episodes, iterate_steps
from deft_client.types import ActionChunk, ActOptions, Observation
from deft_policies.errors import DeviceError, RequestError, UnknownStatisticsKeyError
from deft_server.errors import NotReadyError, PolicyFailedError, UnsafeAnswerError
from deft_server.hosting.host import PolicyRecipe
from deft_server.hosting.process import PolicyProcess
from deft_server.recording.writer import build_recording
from deft_server.serving.readiness import ServerPhase
from deft_server.serving.service import Service
from deft_server.settings import Settings, SettingsError
from tests.server.fakes import CALLER, FakePolicy, frame
from tests.server.hosting.policies import HELD_MS, checksum

OBEDIENT = PolicyRecipe("tests.server.hosting.policies:obedient")
either = pytest.mark.parametrize("in_process", [False, True], ids=["thread", "process"])


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        async def limited() -> None:
            await asyncio.wait_for(test(**fixtures), 120)

        asyncio.run(limited())

    return run


async def started(
    recipe: PolicyRecipe = OBEDIENT, in_process: bool = True, **settings: Any
) -> Service:
    service = Service(recipe, Settings(policy_process=in_process, **settings))
    service.start()
    await service.scheduler.settled()
    return service


async def act(
    service: Service, observation: Observation, session_id: str | None = None
) -> ActionChunk:
    return await service.act(observation, ActOptions(session_id=session_id), CALLER)


def process_of(service: Service) -> int:
    host = service.scheduler._host
    assert isinstance(host, PolicyProcess)
    return host._process.pid


async def ready_again(service: Service) -> None:
    while service.readiness.phase is not ServerPhase.READY:
        await asyncio.sleep(0.01)


@either
@on_a_loop
async def test_every_frame_is_answered_as_it_was_sent_and_with_its_own_memory(in_process: bool):
    service = await started(in_process=in_process)
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


@either
@on_a_loop
async def test_frames_of_a_batch_fail_alone_and_for_their_own_reasons(in_process: bool):
    service = await started(in_process=in_process, max_wait_ms=0)
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


@on_a_loop
async def test_a_frame_larger_than_any_before_it_fits():
    service = await started()
    for size in (4, 700, 1100, 4):
        observation = replace(frame(), image=np.full((size, size, 3), 7, np.uint8))
        expected = checksum(observation.image.tobytes()) / 2**32
        assert (await act(service, observation)).actions[0, 0] == expected
    await service.close()


@on_a_loop
async def test_the_event_loop_turns_while_the_policy_holds_the_interpreter():
    service = await started()
    answer = asyncio.create_task(act(service, frame(instruction="hold the interpreter")))
    turns = 0
    while not answer.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > HELD_MS / 30
    await answer
    await service.close()


@pytest.mark.parametrize("instruction", ["crash", "hang"])
@on_a_loop
async def test_a_policy_that_crashes_or_hangs_is_loaded_again(instruction: str):
    service = await started(hang_after_s=0.2)
    await act(service, frame(), "a")
    with pytest.raises(NotReadyError, match="lost") as refused:
        await act(service, frame(instruction=instruction), "a")
    assert refused.value.retry_after_s >= 1
    with pytest.raises(NotReadyError, match="loading: again, because"):
        await act(service, frame())
    await ready_again(service)
    chunk = await act(service, frame(), "a")
    assert chunk.actions[0, 1] == 2 / 1000, "the session's memory is the server's"
    await service.close()


@on_a_loop
async def test_kill_9_under_load_loses_no_recording_and_answers_nothing_wrongly(tmp_path: Path):
    service = await started(record=tmp_path)
    recording = build_recording(service)
    assert recording is not None
    recording.start()
    answered = refused = kills = 0

    async def robot(number: int) -> None:
        nonlocal answered, refused
        step = 0
        while kills < 2 or step < 5 or service.readiness.phase is not ServerPhase.READY:
            observation = frame(fill=(number * 50 + step) % 256)
            try:
                chunk = await act(service, observation, f"robot-{number}")
            except NotReadyError:
                refused += 1
                await asyncio.sleep(0.005)
                continue
            step += 1
            expected = [checksum(observation.image.tobytes()) / 2**32, step / 1000]
            assert chunk.actions[0, :2].tolist() == expected
            answered += 1

    async def killer() -> None:
        nonlocal kills
        for _ in range(2):
            await asyncio.sleep(0.05)
            os.kill(process_of(service), signal.SIGKILL)
            kills += 1
            await asyncio.sleep(0.01)
            await ready_again(service)

    await asyncio.gather(killer(), *(robot(number) for number in range(4)))
    assert refused > 0
    service.reset_all()
    await service.close()
    await asyncio.to_thread(recording.stop)
    episodes = find_episodes(tmp_path)
    assert len(episodes) == 4
    assert sum(len(list(iterate_steps(path))) for path in episodes) == answered


@either
@pytest.mark.parametrize(
    ("how", "told"), [("files", "config.json"), ("exit", "3"), ("bug", "unforeseen")]
)
@on_a_loop
async def test_a_policy_that_cannot_be_loaded_is_given_up(how: str, told: str, in_process: bool):
    recipe = PolicyRecipe("tests.server.hosting.policies:broken", (how,))
    service = await started(recipe, in_process)
    assert service.readiness.phase is ServerPhase.BROKEN
    assert told in service.readiness.sentence
    await service.close()


@on_a_loop
async def test_a_process_that_dies_while_it_loads_is_started_again(tmp_path: Path):
    recipe = PolicyRecipe("tests.server.hosting.policies:dies_twice", (str(tmp_path),))
    service = await started(recipe)
    assert service.readiness.phase is ServerPhase.READY
    assert len(list(tmp_path.iterdir())) == 3
    await service.close()


@on_a_loop
async def test_nothing_is_left_of_the_process_when_the_service_closes():
    service = await started()
    number = process_of(service)
    await service.close()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@on_a_loop
async def test_answers_of_a_process_are_checked_as_ever():
    service = await started(step_limits={"*": (0.0,) * 7}, on_sudden_step="error")
    await act(service, frame(fill=1), "a")
    with pytest.raises(UnsafeAnswerError, match="step_limits"):
        await act(service, frame(fill=2), "a")
    await service.close()


def test_a_policy_that_only_this_process_knows_cannot_live_in_another():
    with pytest.raises(SettingsError, match="PolicyRecipe"):
        Service(FakePolicy, Settings(policy_process=True))
