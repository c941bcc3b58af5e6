"""The service with real threads and a real event loop: batches, places, deadlines, safety."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest

from deft_core.types import ActionChunk, ActOptions, Intervention
from deft_policies.base import PolicyRequest
from deft_policies.errors import DeviceError
from deft_server.errors import (
    DeadlineError,
    NotReadyError,
    OverloadedError,
    PolicyFailedError,
    SupersededFrameError,
    UnsafeAnswerError,
)
from deft_server.serving.access import Caller
from deft_server.serving.admission import GOOD_ROUNDS_BEFORE_GROWTH
from deft_server.serving.events import Event, FinishedAction, SessionEnded
from deft_server.serving.lifecycle import ServerPhase
from deft_server.serving.service import Service
from deft_server.settings import Settings
from tests.standins.policies import (
    CALLER,
    FakePolicy,
    GatedPolicy,
    LimitedFake,
    RaisingPolicy,
    fails_times,
    frame,
    out_of_memory_above,
)

pytestmark = pytest.mark.promise


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        async def limited() -> None:
            await asyncio.wait_for(test(**fixtures), 20)

        asyncio.run(limited())

    return run


async def started(policy: FakePolicy, **settings: Any) -> Service:
    service = Service(lambda: policy, Settings(**settings))
    service.start()
    await service.scheduler.settled()
    return service


def send(
    service: Service,
    session_id: str | None = None,
    caller: Caller = CALLER,
    deadline_ms: float | None = None,
) -> "asyncio.Task[ActionChunk]":
    options = ActOptions(session_id=session_id, deadline_ms=deadline_ms)
    return asyncio.create_task(service.act(frame(), options, caller))


async def entered(policy: GatedPolicy) -> None:
    await asyncio.to_thread(policy.entered.wait, 120)


async def joined(service: Service, count: int) -> None:
    """Wait until so many frames wait in line."""
    while service.scheduler.num_waiting != count:
        await asyncio.sleep(0.001)


@on_a_loop
async def test_frames_that_wait_for_the_policy_are_answered_in_one_batch():
    policy = GatedPolicy()
    service = await started(policy)
    first = send(service)
    await entered(policy)
    rest = [send(service, f"s{n}") for n in range(5)]
    await joined(service, 5)
    policy.gate.set()
    await asyncio.gather(first, *rest)
    assert policy.sizes == [1, 5]
    await service.close()


@on_a_loop
async def test_waiting_begins_when_a_frame_was_read_and_decoded():
    service = await started(FakePolicy())
    hour_ago_s = time.monotonic() - 3600
    chunk = await service.act(frame(), ActOptions(), CALLER, arrived_s=hour_ago_s)
    timings = chunk.timings
    assert timings.wire_ms >= 3_600_000
    assert timings.queue_ms < 3_600_000
    assert timings.total_ms >= timings.wire_ms + timings.queue_ms
    await service.close()


@on_a_loop
async def test_a_batch_is_never_larger_than_allowed():
    policy = GatedPolicy()
    service = await started(policy, max_batch=2)
    tasks = [send(service)]
    await entered(policy)
    tasks += [send(service, f"s{n}") for n in range(4)]
    await joined(service, 4)
    policy.gate.set()
    await asyncio.gather(*tasks)
    assert policy.sizes == [1, 2, 2]
    await service.close()


@on_a_loop
async def test_a_newer_frame_replaces_the_waiting_one_alone():
    policy = GatedPolicy()
    service = await started(policy)
    in_flight = send(service, "a")
    await entered(policy)
    waiting = send(service, "a")
    await joined(service, 1)
    newest = send(service, "a")
    with pytest.raises(SupersededFrameError):
        await waiting
    policy.gate.set()
    chunks = await asyncio.gather(in_flight, newest)
    assert [chunk.actions[0, 0] for chunk in chunks] == [1, 2]
    await service.close()


@on_a_loop
async def test_two_callers_with_the_same_session_id_do_not_meet():
    policy = FakePolicy()
    service = await started(policy)
    for caller in (Caller("arm-1"), Caller("arm-2")):
        chunk = await service.act(frame(), ActOptions(session_id="a"), caller)
        assert chunk.actions[0, 0] == 1
    await service.close()


@on_a_loop
async def test_a_full_line_refuses_and_says_when_to_come_back():
    policy = GatedPolicy()
    service = await started(policy, max_batch=1, max_waiting=1)
    tasks = [send(service, "a")]
    await entered(policy)
    tasks.append(send(service, "b"))
    await joined(service, 1)
    with pytest.raises(OverloadedError) as refusal:
        await send(service, "c")
    assert refusal.value.retry_after_s >= 0
    policy.gate.set()
    await asyncio.gather(*tasks)
    await send(service, "c")
    await service.close()


@on_a_loop
async def test_a_frame_that_stays_is_refused_when_it_may_stay_no_longer():
    service = await started(policy := GatedPolicy(), max_batch=1)
    busy = send(service)
    await entered(policy)
    with pytest.raises(OverloadedError):
        await send(service, caller=Caller("old client", overfills_s=0.05))
    assert service.scheduler.num_waiting == 0
    policy.gate.set()
    await busy
    await service.close()


@on_a_loop
async def test_a_frame_whose_deadline_passed_never_reaches_the_policy():
    policy = GatedPolicy()
    service = await started(policy)
    first = send(service, "a")
    await entered(policy)
    with pytest.raises(DeadlineError):
        await send(service, "b", deadline_ms=20)
    policy.gate.set()
    await first
    assert policy.sizes == [1]
    await service.close()


@on_a_loop
async def test_an_answer_after_the_deadline_is_not_waited_for():
    policy = GatedPolicy()
    service = await started(policy, default_deadline_ms=20)
    with pytest.raises(DeadlineError):
        await send(service, "a")
    policy.gate.set()
    await service.close()


@on_a_loop
async def test_a_cancelled_frame_gives_up_its_place():
    policy = GatedPolicy()
    service = await started(policy)
    first = send(service, "a")
    await entered(policy)
    leaving = send(service, "b")
    await joined(service, 1)
    leaving.cancel()
    await joined(service, 0)
    policy.gate.set()
    await first
    assert policy.sizes == [1]
    await service.close()


@on_a_loop
async def test_a_reset_refuses_the_frame_that_waits_and_starts_afresh():
    policy = GatedPolicy()
    service = await started(policy)
    first = send(service, "a")
    await entered(policy)
    waiting = send(service, "a")
    await joined(service, 1)
    assert service.reset("a", CALLER)
    with pytest.raises(SupersededFrameError):
        await waiting
    fresh = send(service, "a")
    policy.gate.set()
    chunks = await asyncio.gather(first, fresh)
    assert [chunk.actions[0, 0] for chunk in chunks] == [1, 1]
    await service.close()


@on_a_loop
async def test_when_memory_runs_out_batches_stay_smaller():
    policy = RaisingPolicy(error=out_of_memory_above(2))
    service = await started(policy)
    for _ in range(2):
        gate = asyncio.gather(*(send(service, f"s{n}") for n in range(4)))
        assert len(await gate) == 4
    assert service.scheduler.queue.admission.max_batch <= 2
    assert max(policy.sizes[-2:]) <= 2
    await service.close()


@on_a_loop
async def test_batches_grow_back_slowly_after_memory_ran_out():
    policy = RaisingPolicy(error=out_of_memory_above(2))
    service = await started(policy, max_batch=4)
    await asyncio.gather(*(send(service, f"s{n}") for n in range(5)))
    assert service.scheduler.queue.admission.max_batch < 4
    policy.error = lambda batch: None
    shrunk = service.scheduler.queue.admission.max_batch
    for _ in range(GOOD_ROUNDS_BEFORE_GROWTH):
        await send(service, "a")
    assert service.scheduler.queue.admission.max_batch == shrunk + 1
    await service.close()


@on_a_loop
async def test_a_policy_that_raises_once_fails_one_frame_and_serves_the_next():
    policy = RaisingPolicy(error=fails_times(1, ValueError("hiccup")))
    service = await started(policy)
    with pytest.raises(PolicyFailedError):
        await send(service, "a")
    assert (await send(service, "a")).actions[0, 0] == 1
    await service.close()


@on_a_loop
async def test_a_batch_that_fails_counts_once_however_many_of_its_frames_fail_again():
    """Who sends three bad frames at once does not make the server unready for all."""
    policy = RaisingPolicy(error=lambda batch: ValueError("bad"))
    service = await started(policy, unready_after_failures=2)
    tasks = [send(service, name) for name in "abc"]
    failed = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in failed] == [PolicyFailedError] * 3
    assert policy.sizes == [3, 1, 1, 1]
    assert service.readiness.phase is ServerPhase.READY
    with pytest.raises(PolicyFailedError):
        await send(service, "a")
    assert service.readiness.phase is ServerPhase.FAILING
    await service.close()


@on_a_loop
async def test_a_frame_too_large_for_the_device_halves_no_batch_when_it_is_tried_again():
    def out_of_memory(batch: Sequence[PolicyRequest]) -> Exception | None:
        is_large = any(one.observation.image.shape[0] > 4 for one in batch)
        return DeviceError("CUDA out of memory (simulated)") if is_large else None

    service = await started(RaisingPolicy(error=out_of_memory), max_batch=8)
    large = service.act(frame(8), ActOptions(session_id="large"), CALLER)
    found = await asyncio.gather(
        large, *(send(service, str(number)) for number in range(7)), return_exceptions=True
    )
    assert isinstance(found[0], DeviceError)
    assert all(isinstance(one, ActionChunk) for one in found[1:])
    assert service.scheduler.queue.admission.max_batch == 4
    await service.close()


@on_a_loop
async def test_a_policy_that_hangs_is_given_up():
    policy = GatedPolicy()
    service = await started(policy, hang_after_s=0.05)
    given_up: list[ServerPhase] = []
    service.scheduler.on_fatal = given_up.append
    tasks = [send(service, "a")]
    await entered(policy)
    tasks.append(send(service, "b"))
    for task in tasks:
        with pytest.raises(NotReadyError, match="hangs"):
            await task
    assert given_up == [ServerPhase.STUCK]
    with pytest.raises(NotReadyError, match="hangs"):
        await send(service, "c")
    policy.gate.set()
    await service.close()


@on_a_loop
async def test_a_policy_that_hangs_is_loaded_again_where_that_is_wanted():
    stuck, fresh = GatedPolicy(), FakePolicy()
    policies = [fresh, stuck]
    service = Service(policies.pop, Settings(hang_after_s=0.5, on_hang="reload"))
    service.start()
    await service.scheduler.settled()
    with pytest.raises(NotReadyError):
        await send(service, "a")
    await service.scheduler.settled()
    assert (await send(service, "b")).actions[0, 0] == 1
    stuck.gate.set()  # what the abandoned thread still says is not taken for an answer
    assert (await send(service, "b")).actions[0, 0] == 2
    await service.close()


@on_a_loop
async def test_stopping_finishes_what_is_in_hand_and_refuses_what_comes():
    policy = GatedPolicy()
    service = await started(policy)

    async def in_hand() -> ActionChunk:
        service.num_in_hand += 1
        try:
            return await send(service, "a")
        finally:
            service.num_in_hand -= 1

    task = asyncio.create_task(in_hand())
    await entered(policy)
    draining = asyncio.create_task(service.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(NotReadyError, match="stopping"):
        await send(service, "b")
    policy.gate.set()
    assert (await task).actions[0, 0] == 1
    assert await draining
    await service.close()


@on_a_loop
async def test_an_answer_out_of_range_is_withheld():
    policy = LimitedFake(next_actions=np.full((1, 7), 2.0))
    service = await started(policy)
    with pytest.raises(UnsafeAnswerError):
        await send(service, "a")
    await service.close()


@on_a_loop
async def test_an_answer_that_was_clamped_says_so():
    policy = LimitedFake(next_actions=np.full((1, 7), 1.5), may_exceed=True)
    service = await started(policy)
    chunk = await send(service, "a")
    assert chunk.intervention is Intervention.CLAMP
    np.testing.assert_array_equal(chunk.actions, np.ones((1, 7)))
    await service.close()


@on_a_loop
async def test_listeners_hear_of_every_frame_and_cannot_break_the_serving():
    policy = RaisingPolicy(error=fails_times(1, DeviceError("no")))
    policy.error = lambda batch: DeviceError("no") if len(policy.batches) in (1, 2) else None
    service = await started(policy)
    heard: list[Event] = []

    def grumpy(_: Event) -> None:
        raise ValueError("a listener's own mistake")

    service.events.listen(grumpy)
    stop = service.events.listen(heard.append)
    await send(service, "a")
    with pytest.raises(DeviceError):
        await send(service, "a")
    service.reset("a", CALLER)
    stop()
    await send(service, "a")
    answered, failed, ended = heard
    assert isinstance(answered, FinishedAction)
    assert answered.chunk is not None
    assert answered.options.want_trace, "whoever watches wants to see the trace"
    assert isinstance(failed, FinishedAction)
    assert isinstance(failed.error, DeviceError)
    assert (answered.step, failed.step) == (0, 1)
    assert isinstance(ended, SessionEnded)
    await service.close()


@on_a_loop
async def test_a_session_ends_without_anybody_elses_frame():
    """Once its memory and its recording waited for the next frame of a named session."""
    service = await started(FakePolicy(), session_ttl_s=0.01)
    ended = asyncio.Event()
    service.events.listen(lambda event: ended.set() if isinstance(event, SessionEnded) else None)
    await send(service, "a")
    await ended.wait()
    assert len(service.sessions) == 0
    await service.close()


@on_a_loop
async def test_who_watches_makes_no_policy_think_that_was_not_asked_to():
    policy = FakePolicy()
    service = await started(policy)
    service.events.listen(lambda _: None)
    for when_asked, wants in [(True, False), (True, True), (False, False)]:
        service.last_info = replace(service.last_info, thinks_when_asked=when_asked)
        await service.act(frame(), ActOptions(want_reasoning=wants), CALLER)
        (asked,) = policy.batches[-1]
        assert asked.options.want_reasoning == (wants or not when_asked)
    await service.close()


@on_a_loop
async def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch):
    """Sessions, deadlines and rates live on the monotonic clock: setting the time changes none."""
    now_s = time.time()
    policy = FakePolicy()
    service = await started(policy, session_ttl_s=60, rate_per_s=1000)
    await send(service, "a", deadline_ms=60_000)
    for jump_s in (-1e6, 1e6):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: now_s + jump_s)
        chunk = await send(service, "a", deadline_ms=60_000)
    assert chunk.actions[0, 0] == 3
    await service.close()
