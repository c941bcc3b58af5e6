"""The client for asyncio does what the blocking one does, to the same exceptions and deadlines."""

import asyncio
import inspect
from dataclasses import replace

import httpcore
import httpx
import numpy as np
import pytest

from deft_client import AsyncPolicyClient, ClientSettings, PolicyClient, calls
from deft_client.errors import (
    AnswerTimeoutError,
    NotReadyError,
    ServerUnreachableError,
    TransportError,
    WrongServerError,
)
from deft_client.settings import Retries
from deft_core.errors import DeftError, MessageTooLargeError, UnusableValueError
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_core.wire import codec
from deft_core.wire.limits import WireLimits
from deft_server.app import create_app
from tests.client.hostile_servers import HTTP_MANNERS, frozen, holding_up
from tests.core.samples import frame, full_answer, full_message
from tests.server.running import running
from tests.standins.policies import FakePolicy
from tests.standins.policy_server import ANSWER, INFO, FakeServer, refusal

AT_ONCE = ClientSettings(retries=Retries(attempts=3, first_pause_s=0.0))
OBSERVATION = full_message().observation
LARGE = Observation(np.zeros((1500, 1500, 3), np.uint8), "more than the buffers of a socket hold")
LOADING = refusal(503, "the policy is loading", retry_after="0.001")


def call(server, name, *given, settings=AT_ONCE):
    """Call a method of a client whose server is scripted."""

    async def calling():
        pool = server.async_transport
        async with AsyncPolicyClient("http://robot-server", settings, pool) as client:
            return await getattr(client, name)(*given)

    return asyncio.run(calling())


def test_methods_and_arguments_are_those_of_the_blocking_client():
    for name, method in inspect.getmembers(PolicyClient, inspect.isfunction):
        if not name.startswith("_"):
            other = getattr(AsyncPolicyClient, name)
            assert inspect.iscoroutinefunction(other), name
            assert inspect.signature(other).parameters == inspect.signature(method).parameters
    given, others = (inspect.signature(one).parameters for one in (PolicyClient, AsyncPolicyClient))
    assert [one.replace(annotation=None) for one in given.values()] == [
        one.replace(annotation=None) for one in others.values()
    ]


def test_every_call_is_answered_as_by_the_blocking_client():
    server = FakeServer()
    options = ActOptions(session_id="arm-2", statistics_key="libero_goal")
    assert call(server, "act", OBSERVATION, options).actions.tobytes() == (
        full_answer().actions.tobytes()
    )
    assert call(server, "info") == INFO
    assert call(server, "ping") > 0
    assert call(server, "reset", "arm-2") is None
    message = codec.decode_request(server.requests[0].content)
    assert message.options == options
    assert server.requests[-1].content == b'{"session_id":"arm-2"}'


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 429, 500, 502, 503, 504])
def test_each_problem_is_the_exception_of_the_blocking_client(status):
    script = [refusal(status) for _ in range(3)]
    servers = FakeServer(*script), FakeServer(*script)
    with pytest.raises(DeftError) as expected:
        PolicyClient("http://robot-server", AT_ONCE, servers[0].transport).act(OBSERVATION)
    with pytest.raises(DeftError) as caught:
        call(servers[1], "act", OBSERVATION)
    assert type(caught.value) is type(expected.value)
    assert str(caught.value) == str(expected.value)
    assert len(servers[0].requests) == len(servers[1].requests)


@pytest.mark.parametrize("trouble", [httpcore.ConnectError("refused"), refusal(429), refusal(503)])
def test_what_may_pass_is_tried_again(trouble):
    server = FakeServer(trouble, trouble)
    call(server, "act", OBSERVATION)
    assert len(server.requests) == 3


def test_a_server_that_is_loading_is_waited_for(caplog, monkeypatch):
    server = FakeServer(*[LOADING] * 9)
    call(server, "act", OBSERVATION)
    assert [one.getMessage() for one in caplog.records] == ["waiting: the policy is loading"]
    monkeypatch.setattr(calls, "PROBE_S", 0.001)
    server.script(httpcore.ConnectError("refused"), LOADING)
    assert call(server, "wait_ready") is None
    server.script(*[LOADING] * 1000)
    with pytest.raises(NotReadyError):
        call(server, "wait_ready", 0.05)


def test_answers_are_held_to_what_info_promised():
    other = codec.encode_answer(ActionChunk(np.zeros((1, 7))))

    async def calling():
        server = FakeServer()
        pool = server.async_transport
        async with AsyncPolicyClient("http://robot-server", AT_ONCE, pool) as client:
            await client.info()
            server.script(httpx.Response(200, content=other))
            await client.act(OBSERVATION)

    with pytest.raises(UnusableValueError, match=r"got \[1, 7\]"):
        asyncio.run(calling())


def test_an_answer_to_another_request_is_not_used():
    foreign = httpx.Response(200, content=ANSWER, headers={"x-request-id": "another"})
    server = FakeServer(foreign)
    call(server, "act", OBSERVATION)
    assert len(server.requests) == 2


def test_an_answer_that_is_too_long_is_refused():
    settings = replace(AT_ONCE, limits=WireLimits(max_bytes=10))
    with pytest.raises(MessageTooLargeError, match="10 bytes"):
        call(FakeServer(), "act", OBSERVATION, settings=settings)


@pytest.mark.parametrize("manner", HTTP_MANNERS)
@pytest.mark.parametrize("observation", [OBSERVATION, LARGE], ids=["small", "large"])
def test_a_deadline_ends_the_call_whatever_the_server_does(manner, observation):
    async def calling(url):
        async with AsyncPolicyClient(url) as client:
            await client.act(observation, ActOptions(deadline_ms=50))

    with holding_up(manner) as server:
        with pytest.raises((TransportError, NotReadyError)):
            asyncio.run(calling(server.url))
        assert not server.let_go.is_set()


@pytest.mark.parametrize("name", ["info", "reset", "ping"])
def test_without_a_deadline_the_timeout_ends_it(name):
    async def calling(url):
        async with AsyncPolicyClient(url, timeout=0.1) as client:
            await getattr(client, name)()

    with holding_up(frozen) as server:
        with pytest.raises(AnswerTimeoutError):
            asyncio.run(calling(server.url))
        assert not server.let_go.is_set()


def test_a_name_that_nobody_has_is_a_wrong_server():
    async def calling():
        async with AsyncPolicyClient("http://no-such-host.invalid") as client:
            await client.ping()

    with pytest.raises((WrongServerError, ServerUnreachableError)):
        asyncio.run(calling())


def test_calls_wait_beside_each_other_and_a_cancelled_one_leaves_nothing():
    async def calling(url):
        async with AsyncPolicyClient(url) as client:
            await client.wait_ready()
            assert (await client.info()).action_dim == 7
            for _ in range(3):
                asking = asyncio.create_task(client.act(Observation(frame(8, 8), "lift it")))
                await asyncio.sleep(0)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            sessions = [ActOptions(session_id=f"arm-{number}") for number in range(8)]
            seen = Observation(frame(8, 8), "lift it")
            rounds = [
                await asyncio.gather(*(client.act(seen, one) for one in sessions)) for _ in range(3)
            ]
            together = await client.act_all({f"arm-{number}": seen for number in range(8)})
            return rounds, together

    with running(create_app(FakePolicy())) as address:
        rounds, together = asyncio.run(calling(f"http://{address}"))
    counts = [[chunk.actions[0, 0] for chunk in one] for one in rounds]
    assert counts == [[1.0] * 8, [2.0] * 8, [3.0] * 8]
    assert [one.actions[0, 0] for one in together.values()] == [4.0] * 8


def test_what_comes_unasked_is_never_the_next_answer():
    """No ids here, and two answers to each request: the second one must not be believed."""
    answers = b"".join(
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(one) + one
        for one in (ANSWER, codec.encode_answer(ActionChunk(np.full((1, 3), 9.0))))
    )

    def doubling(connection, server):
        while connection.recv(65536):
            connection.sendall(answers)

    async def calling(url):
        async with AsyncPolicyClient(url, AT_ONCE) as client:
            return [await client.act(OBSERVATION) for _ in range(3)]

    with holding_up(doubling) as server:
        for chunk in asyncio.run(calling(server.url)):
            np.testing.assert_array_equal(chunk.actions, full_answer().actions)


def test_a_key_is_sent_as_by_the_blocking_client(monkeypatch):
    monkeypatch.setenv("DEFT_API_KEY", "everywhere")
    server = FakeServer()
    call(server, "ping")
    assert server.requests[0].headers["authorization"] == "Bearer everywhere"
