"""A policy that takes no time answers where it is asked; all else still holds for it."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from deft_client.types import ActionChunk
from deft_policies.base import ActAnswer, ActRequest, immediate, is_immediate
from deft_policies.constant import ConstantPolicy
from deft_server.errors import DeadlineError, PolicyFailedError, UnsafeAnswerError
from deft_server.serving.scheduler import ServerPhase
from tests.server.serving.test_service import on_a_loop, send, started
from tests.standins.policies import FakePolicy


class HerePolicy(FakePolicy):
    """Notes on which thread it acts; answers with what the test puts into `says`."""

    says: Exception | float = 0.5

    @immediate
    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        self.thread = threading.current_thread()
        if isinstance(self.says, Exception):
            raise self.says
        return [ActAnswer(ActionChunk(np.full((1, 7), self.says))) for _ in batch]


class SlowHerePolicy(HerePolicy):
    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        return super().act(batch)


def test_the_constant_policy_is_immediate_and_who_overrides_act_is_not():
    class Slow(ConstantPolicy):
        def act(self, batch):
            return super().act(batch)

    assert is_immediate(ConstantPolicy())
    assert not is_immediate(Slow())
    assert not is_immediate(FakePolicy())


@on_a_loop
async def test_an_immediate_policy_answers_on_the_event_loop():
    policy = HerePolicy()
    service = await started(policy)
    chunk = await send(service, "a")
    assert chunk.actions.tolist() == [[0.5] * 7]
    assert policy.thread is threading.current_thread()
    assert len(service.sessions) == 1
    await service.close()


@on_a_loop
async def test_any_other_policy_acts_on_its_own_thread():
    policy = SlowHerePolicy()
    service = await started(policy)
    await send(service, "a")
    assert policy.thread.name == "policy"
    await service.close()


@on_a_loop
async def test_its_answers_are_counted_and_guarded_like_any_others():
    policy = HerePolicy()
    service = await started(policy)
    await send(service)
    policy.says = float("nan")
    with pytest.raises(UnsafeAnswerError):
        await send(service)
    page = service.metrics.page().decode()
    assert "deft_batch_size_count 2.0" in page
    assert "deft_act_seconds_count 1.0" in page
    assert "deft_unsafe_answers_total 1.0" in page
    await service.close()


@on_a_loop
async def test_it_may_raise_and_the_server_is_unready_while_it_always_does():
    policy = HerePolicy()
    service = await started(policy, unready_after_failures=2)
    policy.says = ValueError("broken")
    for _ in range(2):
        with pytest.raises(PolicyFailedError):
            await send(service)
    assert service.readiness.phase is ServerPhase.FAILING
    policy.says = 0.5
    await send(service)
    assert service.readiness.phase is ServerPhase.READY
    await service.close()


@on_a_loop
async def test_a_frame_that_comes_after_its_deadline_does_not_reach_it():
    policy = HerePolicy()
    service = await started(policy)
    with pytest.raises(DeadlineError):
        await send(service, deadline_ms=1e-6)
    assert not hasattr(policy, "thread")
    await service.close()
