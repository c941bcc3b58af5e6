"""One turn of the event loop does little for each address, and something for all of them."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

from deft_server.http.bounds import build_bounds
from deft_server.http.fair_calls import MAX_CALLS_A_TURN, FairCalls
from deft_server.http.listener import FairListener
from deft_server.settings import Settings
from tests.server.serving.test_service import on_a_loop


async def made_by_turn(calls: FairCalls, num_turns: int, made: list[str]) -> list[str]:
    """What was made in each of the next turns, as the letters of addresses."""
    turns = []
    for _ in range(num_turns):
        turns.append("".join(made))
        made.clear()
        await asyncio.sleep(0)
    return turns


@on_a_loop
async def test_few_calls_are_made_at_once_and_many_in_later_turns():
    made: list[str] = []
    calls = FairCalls(most_a_turn=3)
    for address in "aaaaaaaab":
        calls.make(address, partial(made.append, address))
    assert await made_by_turn(calls, 5, made) == ["aaa", "aba", "aaa", "", ""]
    calls.make("a", partial(made.append, "a"))
    assert made == ["a"]


@on_a_loop
async def test_whoever_comes_late_waits_for_a_turn_and_not_for_a_flood():
    made: list[str] = []
    calls = FairCalls(most_a_turn=4)
    for _ in range(1000):
        calls.make("flood", partial(made.append, "f"))
    for _ in range(50):
        await asyncio.sleep(0)
        made.clear()
        calls.make("robot", partial(made.append, "r"))
        assert made == []
        await asyncio.sleep(0)
        assert made.index("r") < 2
    assert calls.count("flood") > 0


class Noting(asyncio.Protocol):
    """Notes when its connection is open."""

    def __init__(self, opened: list[str]) -> None:
        self._opened = opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened.append(transport.get_extra_info("peername")[0])
        self._transport = transport


def loops() -> list[Callable[[], asyncio.AbstractEventLoop]]:
    uvloop = pytest.importorskip("uvloop")
    return [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("new_loop", loops())
def test_a_call_behind_a_hundred_others_is_opened_first(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
):
    """Once all that waited were opened in one turn, and a probe waited for thousands."""

    async def order() -> list[str]:
        opened: list[str] = []
        bounds = build_bounds(Settings())
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listening, ExitStack() as held:
            address = listening.getsockname()
            for source in ["127.0.0.2"] * 100 + ["127.0.0.3"]:
                one = socket.create_connection(address, 5, (source, 0))
                held.callback(one.close)
            listener = FairListener(listening, partial(Noting, opened), bounds)
            while len(opened) < 101:
                await asyncio.sleep(0)
            listener.close()
            return opened

    loop = new_loop()
    try:
        opened = loop.run_until_complete(asyncio.wait_for(order(), 20))
    finally:
        loop.close()
    assert opened.index("127.0.0.3") <= MAX_CALLS_A_TURN + 1
