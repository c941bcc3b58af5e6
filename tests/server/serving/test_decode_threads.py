"""Threads for pictures and long bodies: bounded, and given up by who goes away."""

import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest

from deft_server.errors import OverloadedError
from deft_server.serving.bounds import DecodeThreads
from tests.server.serving.test_service import on_a_loop
from tests.standins.policies import PATIENCE_S


@on_a_loop
async def test_calls_are_bounded_even_where_callers_hung_up():
    gate = threading.Event()
    threads = DecodeThreads(num_threads=1, max_pending=2)
    running = asyncio.ensure_future(threads.run(partial(gate.wait, PATIENCE_S)))
    waiting = asyncio.ensure_future(threads.run(lambda: "answer"))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await threads.run(lambda: "one too many")
    running.cancel()  # its work goes on all the same
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await threads.run(lambda: "one too many")
    gate.set()
    assert await waiting == "answer"
    assert await threads.run(lambda: "room again") == "room again"
    threads.stop()


@on_a_loop
async def test_what_the_work_raises_is_raised_here():
    threads = DecodeThreads()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.stop()


class Body:
    """What a caller has sent; unlike bytes it can be watched."""


def refuse(body: Body) -> None:
    raise ValueError(f"{body} is of no use")


@on_a_loop
async def test_a_body_that_was_refused_is_freed_at_once():
    threads, body = DecodeThreads(num_threads=1), Body()
    freed = threading.Event()
    weakref.finalize(body, freed.set)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="of no use"):
            await threads.run(partial(refuse, body))
        del body
        await threads.run(lambda: None)  # the thread has let go of the work before, too
        assert freed.is_set()
    finally:
        gc.enable()
        threads.stop()


@on_a_loop
async def test_a_body_whose_caller_hung_up_is_freed_before_its_turn():
    gate = threading.Event()
    threads, body = DecodeThreads(num_threads=1), Body()
    freed = threading.Event()
    weakref.finalize(body, freed.set)
    running = asyncio.ensure_future(threads.run(partial(gate.wait, PATIENCE_S)))
    waiting = asyncio.ensure_future(threads.run(partial(refuse, body)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del body, waiting
    try:
        assert freed.is_set()
    finally:
        gate.set()
        await running
        threads.stop()
