"""Threads whose owners take turns."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from deft_server.errors import OverloadedError
from deft_server.serving.fair_threads import FairThreads
from tests.server.fakes import PATIENCE_S
from tests.server.serving.test_service import on_a_loop


class Gate:
    """Holds the only thread until it is opened; notes who had it, in order."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.order: list[str] = []

    def passing(self, name: str) -> Callable[[], str]:
        def work() -> str:
            assert self.opened.wait(PATIENCE_S), "the test never opened the gate"
            self.order.append(name)
            return name

        return work


@contextmanager
def fair_threads(max_pending: int = 64) -> Iterator[FairThreads]:
    threads = FairThreads(1, max_pending)
    try:
        yield threads
    finally:
        threads.stop()


@on_a_loop
async def test_one_picture_waits_for_two_of_a_flood_and_not_for_all():
    gate = Gate()
    with fair_threads() as threads:
        flood = [threads.run("flood", gate.passing("flood")) for _ in range(50)]
        pending = [asyncio.ensure_future(one) for one in flood]
        await asyncio.sleep(0)
        pending.append(asyncio.ensure_future(threads.run("robot", gate.passing("robot"))))
        await asyncio.sleep(0)
        gate.opened.set()
        assert await asyncio.gather(*pending) == ["flood"] * 50 + ["robot"]
    assert gate.order.index("robot") == 2  # behind the one on the thread, and the one before it


@on_a_loop
async def test_owners_take_turns_however_much_each_asks_for():
    gate = Gate()
    with fair_threads() as threads:
        pending = [
            asyncio.ensure_future(threads.run(name, gate.passing(name)))
            for name in "xaaaabbc"  # x is on the thread while the others come
        ]
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(*pending)
    assert "".join(gate.order) == "xabcabaa"


@on_a_loop
async def test_where_too_much_waits_the_owner_with_most_of_it_loses_its_newest():
    gate = Gate()
    with fair_threads(max_pending=3) as threads:
        flood = [asyncio.ensure_future(threads.run("flood", gate.passing("f"))) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await threads.run("flood", gate.passing("one too many"))
        robot = asyncio.ensure_future(threads.run("robot", gate.passing("robot")))
        with pytest.raises(OverloadedError):
            await flood[-1]
        gate.opened.set()
        assert await robot == "robot"
        assert await asyncio.gather(*flood[:-1]) == ["f"] * 3


@on_a_loop
async def test_who_hangs_up_frees_its_place_and_is_not_worked_for():
    gate = Gate()
    with fair_threads(max_pending=1) as threads:
        first = asyncio.ensure_future(threads.run("a", gate.passing("first")))
        gone = asyncio.ensure_future(threads.run("a", gate.passing("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        last = asyncio.ensure_future(threads.run("a", gate.passing("last")))
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(first, last)
    assert gate.order == ["first", "last"]


@on_a_loop
async def test_who_hangs_up_meanwhile_is_let_go_when_its_work_is_over():
    gate = Gate()
    with fair_threads() as threads:
        gone = asyncio.ensure_future(threads.run("a", gate.passing("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait((gone,), timeout=0.05)
        assert not gone.done()  # what the work holds is still in use
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await gone
    assert gate.order == ["gone"]


@on_a_loop
async def test_what_the_work_raises_reaches_its_caller_and_nobody_else():
    def fail() -> None:
        raise KeyError("a damaged picture")

    with fair_threads() as threads:
        failing, other = threads.run("a", fail), threads.run("b", lambda: 7)
        results = await asyncio.gather(failing, other, return_exceptions=True)
    assert repr(results) == "[KeyError('a damaged picture'), 7]"


class _Body:
    """What a work is about."""


@on_a_loop
async def test_an_error_keeps_nothing_of_what_the_work_was_about():
    def fail(body: _Body) -> None:
        raise KeyError("a damaged picture")

    body = _Body()
    kept = weakref.ref(body)
    gc.disable()  # which may come long after many of these
    try:
        with fair_threads() as threads:
            with suppress(KeyError):
                await threads.run("a", partial(fail, body))
            del body
            await asyncio.sleep(0)
            assert kept() is None
    finally:
        gc.enable()
