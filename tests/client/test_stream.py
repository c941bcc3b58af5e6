"""The WebSocket clients: frames alternate, problems keep the connection, breaks are mended."""

import asyncio

import numpy as np
import pytest

from deft_client.errors import (
    AnswerTimeoutError,
    MessageTooLargeError,
    OverloadedError,
    Problem,
    RefusedRequestError,
    ServerFaultError,
    ServerUnreachableError,
    WireError,
)
from deft_client.settings import ClientSettings, Retries, Timeouts
from deft_client.stream import AsyncStreamClient, StreamClient, stream_url
from deft_client.types import ActionChunk
from deft_client.wire import json_codec, msgpack_codec
from deft_client.wire.fields import WireLimits
from tests.client.fake_server import ANSWER, PING, streaming
from tests.client.samples import full_answer, full_message

OBSERVATION = full_message().observation
SETTINGS = ClientSettings(retries=Retries(first_pause_s=0.0), timeouts=Timeouts(answer_s=5))
HASTY = ClientSettings(timeouts=Timeouts(answer_s=0.05))


def problem(status: int, retry_after_s: float | None = None) -> str:
    described = Problem(status, "No", "because", retry_after_s=retry_after_s)
    return json_codec.encode_problem(described).decode()


class Blocking:
    """Acts a number of times with the blocking client, on one connection."""

    @staticmethod
    def act(url, times=1, settings=SETTINGS, between=lambda: None) -> list[object]:
        outcomes: list[object] = []
        with StreamClient(url, settings) as client:
            for _ in range(times):
                try:
                    outcomes.append(client.act(OBSERVATION))
                except (OverloadedError, RefusedRequestError, AnswerTimeoutError) as error:
                    outcomes.append(error)
                between()
        return outcomes


class Asynchronous:
    """The same with the asynchronous one."""

    @staticmethod
    def act(url, times=1, settings=SETTINGS, between=lambda: None) -> list[object]:
        async def visit() -> list[object]:
            outcomes: list[object] = []
            async with AsyncStreamClient(url, settings) as client:
                for _ in range(times):
                    try:
                        outcomes.append(await client.act(OBSERVATION))
                    except (OverloadedError, RefusedRequestError, AnswerTimeoutError) as error:
                        outcomes.append(error)
                    between()
            return outcomes

        return asyncio.run(visit())


@pytest.fixture(params=[Blocking, Asynchronous])
def act(request):
    return request.param.act


def test_observations_travel_over_one_connection_one_frame_each(act):
    with streaming() as stream:
        answers = act(stream.url, times=3)
    assert [answer.trace for answer in answers] == [full_answer().trace] * 3
    assert all(answer.timings.round_trip_ms > 0 for answer in answers)
    assert stream.connections == 1
    assert len(stream.frames) == 3


def test_a_problem_is_raised_and_the_connection_stays(act):
    with streaming(problem(422)) as stream:
        refused, answered = act(stream.url, times=2)
    assert isinstance(refused, RefusedRequestError)
    assert refused.detail == "because"
    assert answered.actions.shape == (2, 3)
    assert stream.connections == 1


def test_an_overloaded_server_is_asked_again(act):
    with streaming(problem(429), problem(503, retry_after_s=0.01)) as stream:
        (answer,) = act(stream.url)
    assert answer.actions.shape == (2, 3)
    assert len(stream.frames) == 3


def test_a_broken_connection_is_made_anew(act):
    with streaming(ANSWER, None) as stream:
        answers = act(stream.url, times=2)
    assert all(answer.actions.shape == (2, 3) for answer in answers)
    assert stream.connections == 2


def test_a_late_answer_is_never_taken_for_the_next(act):
    """After a timeout the connection is dropped: its answer may still be under way."""
    with streaming(b"") as stream:
        late, next_one = act(stream.url, times=2, settings=HASTY)
    assert isinstance(late, AnswerTimeoutError)
    assert next_one.actions.shape == (2, 3)
    assert stream.connections == 2


def test_an_answer_nobody_asked_for_is_never_taken_for_the_next(act):
    """It ends the connection: the second frame gets the answer to itself."""
    unasked = msgpack_codec.encode_answer(ActionChunk(np.full((1, 3), 9.0)))
    with streaming((ANSWER, unasked)) as stream:
        answers = act(stream.url, times=2, between=stream.all_sent.wait)
    assert [answer.actions.shape for answer in answers] == [(2, 3)] * 2
    assert stream.connections == 2


def test_pings_between_the_frames_are_answered_and_keep_the_connection(act):
    with streaming((ANSWER, PING)) as stream:
        answers = act(stream.url, times=2, between=stream.all_sent.wait)
    assert len(answers) == 2
    assert stream.connections == 1
    assert stream.pongs[0].is_set()


def test_an_answer_that_is_too_long_is_refused(act):
    settings = ClientSettings(limits=WireLimits(max_bytes=1000))
    with streaming(bytes(1001)) as stream, pytest.raises(MessageTooLargeError, match="1000"):
        act(stream.url, settings=settings)


def test_text_that_is_no_problem_is_a_fault_of_the_server(act):
    with streaming("Internal error") as stream, pytest.raises(ServerFaultError, match="Internal"):
        act(stream.url)


def test_a_frame_that_is_no_answer_is_a_wire_error(act):
    with streaming(b"\x93") as stream, pytest.raises(WireError):
        act(stream.url)


def test_nobody_at_the_port_is_unreachable(act):
    with streaming() as stream:
        url = stream.url
    with pytest.raises(ServerUnreachableError, match="cannot reach"):
        act(url)


def test_the_api_key_opens_the_stream(act):
    with streaming() as stream:
        act(stream.url, settings=ClientSettings(api_key="secret"))
    assert stream.headers == ["Bearer secret"]


def test_where_the_stream_is():
    assert stream_url("http://robot:8000") == "ws://robot:8000/v1/stream"
    assert stream_url("https://robot/deft") == "wss://robot/deft/v1/stream"
