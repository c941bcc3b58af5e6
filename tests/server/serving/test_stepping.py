"""A policy that is played round by round, behind the service: nobody waits for a long answer."""

import asyncio
import threading

import pytest

from deft_core.types import ActionChunk, ActOptions
from deft_server.errors import DeadlineError, NotReadyError
from deft_server.serving.service import Service
from tests.server.serving.test_service import on_a_loop, started
from tests.standins.policies import CALLER, SteppedFake, frame

pytestmark = pytest.mark.promise


def stepped() -> tuple[SteppedFake, threading.Semaphore]:
    turnstile = threading.Semaphore(0)
    return SteppedFake(turnstile=turnstile), turnstile


def ask(
    service: Service, instruction: str, session_id: str, deadline_ms: float | None = None
) -> "asyncio.Task[ActionChunk]":
    options = ActOptions(session_id=session_id, deadline_ms=deadline_ms)
    return asyncio.create_task(service.act(frame(instruction=instruction), options, CALLER))


async def with_policy(service: Service, count: int) -> None:
    while len(service.scheduler.queue.admission.in_flight) != count:
        await asyncio.sleep(0.001)


@on_a_loop
async def test_a_short_answer_joins_a_long_one_and_is_out_before_it():
    policy, turnstile = stepped()
    service = await started(policy)
    long = ask(service, "5 long", "a")
    await with_policy(service, 1)
    turnstile.release()
    while not policy.rounds:  # or both would play the round that was let through
        await asyncio.sleep(0.001)
    short = ask(service, "1 short", "b")
    await with_policy(service, 2)
    turnstile.release(2)
    assert (await short).actions[0, 0] == 1
    assert not long.done()
    turnstile.release(5)
    await long
    assert ["5 long", "1 short"] in policy.rounds
    assert sum("5 long" in one for one in policy.rounds) == 5
    await service.close()


@on_a_loop
async def test_free_places_are_taken_at_once_and_never_exceeded():
    policy, turnstile = stepped()
    service = await started(policy, max_batch=2)
    tasks = [ask(service, f"{rounds} of {name}", name) for rounds, name in ((3, "a"), (1, "b"))]
    await with_policy(service, 2)
    tasks += [ask(service, "1 of c", "c"), ask(service, "1 of d", "d")]
    while service.scheduler.num_waiting != 2:
        await asyncio.sleep(0.001)
    turnstile.release(2)  # the first may have begun with one of them alone
    await tasks[1]
    turnstile.release(10)
    await asyncio.gather(*tasks)
    assert max(map(len, policy.rounds)) == 2
    assert len(policy.rounds) <= 5
    await service.close()


@on_a_loop
async def test_an_answer_is_cut_at_its_deadline_and_its_session_is_as_before():
    policy, turnstile = stepped()
    service = await started(policy)
    kept = ask(service, "4 kept", "a", deadline_ms=60_000)
    late = ask(service, "900 late", "b", deadline_ms=1000)
    await with_policy(service, 2)
    turnstile.release()
    with pytest.raises(DeadlineError):
        await late
    turnstile.release(3)
    await kept
    turnstile.release(1)
    assert (await ask(service, "1 next", "b")).actions[0, 0] == 1
    assert sum("900 late" in one for one in policy.rounds) <= 2
    assert len(service.scheduler.queue.admission.in_flight) == 0
    await service.close()


@on_a_loop
async def test_a_caller_that_goes_away_is_not_computed_for_any_more():
    policy, turnstile = stepped()
    service = await started(policy)
    gone = ask(service, "900 gone", "a")
    await with_policy(service, 1)
    gone.cancel()
    await asyncio.sleep(0)  # the caller is gone
    turnstile.release(3)
    await with_policy(service, 0)
    assert len(policy.rounds) <= 3
    turnstile.release()
    assert (await ask(service, "1 next", "a")).actions[0, 0] == 1
    await service.close()


@on_a_loop
async def test_a_flow_that_was_cut_is_known_to_take_long_and_no_other_is():
    policy, turnstile = stepped()
    service = await started(policy)
    late = ask(service, "900 late", "slow", deadline_ms=2000)
    await with_policy(service, 1)
    with pytest.raises(DeadlineError):
        await late
    turnstile.release()
    await with_policy(service, 0)
    turnstile.release(100)
    with pytest.raises(DeadlineError, match="nothing was computed"):
        await ask(service, "900 late", "slow", deadline_ms=20)
    assert (await ask(service, "1 quick", "other", deadline_ms=1900)).actions[0, 0] == 1
    await service.close()


@on_a_loop
async def test_actions_with_a_deadline_go_on_in_four_rounds_and_others_in_one():
    policy, turnstile = stepped()
    service = await started(policy)
    long = ask(service, "20 long", "a")
    await with_policy(service, 1)
    hurried = ask(service, "8 hurried", "b", deadline_ms=60_000)
    await with_policy(service, 2)
    turnstile.release(28)
    await hurried
    await long
    alone = [one for one in policy.rounds if one == ["8 hurried"]]
    both = [one for one in policy.rounds if len(one) == 2]
    assert (len(alone), len(both)) == (6, 2)
    await service.close()


@on_a_loop
async def test_a_round_that_does_not_end_is_a_hang_however_many_went_before():
    policy, turnstile = stepped()
    service = await started(policy, hang_after_s=0.2)
    stuck = ask(service, "900 stuck", "a")
    await with_policy(service, 1)
    turnstile.release(2)
    with pytest.raises(NotReadyError, match="hangs"):
        await stuck
    turnstile.release(1000)
    await service.close()
