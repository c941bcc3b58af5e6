"""Bytes of requests and of large pictures count until they are answered."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from deft_client.types import ActionChunk, ActOptions
from deft_server.errors import OverloadedError
from deft_server.serving.bounds import HeldBytes
from tests.server.serving.test_service import entered, on_a_loop, send, started
from tests.standins.policies import CALLER, GatedPolicy, frame


def test_held_bytes_are_counted_even_when_they_are_too_many():
    held = HeldBytes(most=10)
    held.hold(8, "192.0.2.1")
    with pytest.raises(OverloadedError):
        held.hold(3, "192.0.2.1")
    held.release(11, "192.0.2.1")
    assert held.now == 0
    assert not held.by_address


def test_nobody_is_refused_for_bytes_that_others_hold():
    held = HeldBytes(most=10)
    held.hold(10, "192.0.2.1")
    held.hold(5, "192.0.2.2")
    held.hold(0, "192.0.2.3")
    for address in ("192.0.2.1", "192.0.2.2"):
        with pytest.raises(OverloadedError):
            held.hold(1, address)


@on_a_loop
async def test_large_pictures_that_wait_for_the_policy_count_as_held():
    service = await started(policy := GatedPolicy(), max_total_bytes=4 * 1024 * 1024)
    large = replace(frame(), image=np.zeros((600, 600, 3), np.uint8))

    def send_large() -> "asyncio.Task[ActionChunk]":
        return asyncio.create_task(service.act(large, ActOptions(), CALLER))

    tasks = [send_large() for _ in range(3)]
    await entered(policy)
    with pytest.raises(OverloadedError, match="max_total_bytes"):
        await send_large()
    assert service.bounds.held.now == 3 * large.image.nbytes
    tasks.append(send(service))  # a small one still has its place
    policy.gate.set()
    await asyncio.gather(*tasks)
    assert service.bounds.held.now == 0
    await service.close()
