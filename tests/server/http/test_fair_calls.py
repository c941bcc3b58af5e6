"""One turn of the event loop does little for each address, and something for all of them."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from deft_server.http.bounds import build_bounds
from deft_server.http.fair_calls import MAX_CALLS_A_TURN, MAX_TURN_S, FairCalls
from deft_server.http.http_protocol import build_http_protocol
from deft_server.http.listener import FairListener
from deft_server.serving.held_bytes import HeldBytes
from deft_server.settings import Settings
from tests.server.http.test_websocket_protocol import Wire
from tests.server.serving.test_service import on_a_loop


class Ticking:
    """A clock that only calls move: each takes a share of a turn."""

    def __init__(self, share: float) -> None:
        self.now_s = 0.0
        self.made: list[str] = []
        self._share_s = share * MAX_TURN_S

    def call(self, address: str) -> Callable[[], None]:
        def make() -> None:
            self.made.append(address)
            self.now_s += self._share_s

        return make


async def made_by_turn(clock: Ticking, num_turns: int) -> list[str]:
    """What was made in each of the next turns, as the letters of addresses."""
    turns = []
    for _ in range(num_turns):
        turns.append("".join(clock.made))
        clock.made.clear()
        await asyncio.sleep(0)
    return turns


@on_a_loop
async def test_few_calls_are_made_at_once_and_many_in_later_turns():
    clock = Ticking(0.4)
    calls = FairCalls(lambda: clock.now_s)
    for address in "aaaaaaaab":
        calls.make(address, clock.call(address))
    assert await made_by_turn(clock, 5) == ["aaa", "aba", "aaa", "", ""]
    calls.make("a", clock.call("a"))
    assert clock.made == ["a"]


@on_a_loop
async def test_calls_that_take_no_time_are_counted():
    """Most only begin what the next turn goes on with."""
    clock = Ticking(0.0)
    calls = FairCalls(lambda: clock.now_s)
    for _ in range(MAX_CALLS_A_TURN + 1):
        calls.make("a", clock.call("a"))
    assert await made_by_turn(clock, 3) == ["a" * MAX_CALLS_A_TURN, "a", ""]


@on_a_loop
async def test_whoever_comes_late_waits_for_a_turn_and_not_for_a_flood():
    clock = Ticking(0.3)
    calls = FairCalls(lambda: clock.now_s)
    for _ in range(1000):
        calls.make("flood", clock.call("f"))
    for _ in range(50):
        await asyncio.sleep(0)
        clock.made.clear()
        calls.make("robot", clock.call("r"))
        assert clock.made == []
        await asyncio.sleep(0)
        assert clock.made.index("r") < 2
    assert calls.count("flood") > 0


BODY = bytes(60_000)
POST = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


async def connections(num: int, most_bytes: int, app: Any) -> tuple[HeldBytes, list[Any]]:
    """What all connections hold, and connections whose requests have to wait for a turn."""
    bounds = build_bounds(Settings(), HeldBytes(most_bytes))
    config = uvicorn.Config(app, lifespan="off", ws="none")
    config.load()
    build = build_http_protocol(bounds)
    opened: list[Any] = [build(config, ServerState(), {}) for _ in range(num)]
    for one in opened:
        one.connection_made(Wire(one))
    for _ in range(MAX_CALLS_A_TURN):
        bounds.calls.make("127.0.0.1", int)
    return bounds.held, opened


@on_a_loop
async def test_bodies_of_requests_that_wait_for_their_turn_count_as_held():
    """Once nobody counted them before their turn: 80 MB of a flood of pictures."""
    lengths = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        lengths.append(len((await receive()).get("body", b"")))

    held, (one, two, three) = await connections(3, 2 * len(BODY), app)
    for caller in (one, two, three):
        caller.data_received(POST)
    assert held.now == 2 * len(BODY)
    assert three.transport.written.startswith(b"HTTP/1.1 503 ")
    assert b"too many bytes of requests are in hand" in three.transport.written
    three.connection_lost(None)
    while len(lengths) < 3:
        await asyncio.sleep(0)
    assert lengths == [len(BODY), len(BODY), 0]
    assert held.now == 0


@on_a_loop
async def test_a_lost_connection_ends_the_request_in_hand_and_those_sent_ahead():
    """Once only the newest of them heard of it, and frames were decoded for nobody."""
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            await heard.put((await receive())["type"])

    held, (caller,) = await connections(1, 2 * len(BODY), app)
    caller.data_received(POST)
    assert await heard.get() == "http.request"
    assert held.now == 0  # what has begun is counted as it is read
    caller.data_received(POST)
    assert held.now == len(BODY)
    caller.connection_lost(None)
    assert held.now == 0
    assert await heard.get() == "http.disconnect"


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
        bounds = build_bounds(Settings(), HeldBytes(10**9))
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
