"""The WebSocket client: frames alternate, problems keep the connection, breaks are mended."""

import numpy as np
import pytest

from deft_client.errors import (
    AnswerTimeoutError,
    OverloadedError,
    RefusedRequestError,
    ServerFaultError,
    ServerUnreachableError,
)
from deft_client.settings import ClientSettings, Retries, Timeouts
from deft_client.stream import StreamClient, stream_url
from deft_core.errors import MessageTooLargeError, Problem
from deft_core.types import ActionChunk, ActOptions
from deft_core.wire import codec
from deft_core.wire.codec import decode_request, encode_answer
from deft_core.wire.limits import WireLimits
from tests.client.hostile_servers import holding_up, open_stream
from tests.core.samples import full_answer, full_message
from tests.standins.policy_server import ANSWER, PING, repeating_id, streaming

OBSERVATION = full_message().observation
SETTINGS = ClientSettings(retries=Retries(first_pause_s=0.0), timeouts=Timeouts(answer_s=60))


UNASKED = ActionChunk(np.full((1, 3), 9.0))


def problem(status: int, retry_after_s: float | None = None, field: str | None = None) -> str:
    described = Problem(status, "No", "because", field=field, retry_after_s=retry_after_s)
    return codec.encode_problem(described).decode()


def act(url, times=1, settings=SETTINGS, between=lambda: None) -> list[object]:
    """Act a number of times, on one connection."""
    outcomes: list[object] = []
    with StreamClient(url, settings) as client:
        for _ in range(times):
            try:
                outcomes.append(client.act(OBSERVATION))
            except (OverloadedError, RefusedRequestError, AnswerTimeoutError) as error:
                outcomes.append(error)
            between()
    return outcomes


def test_observations_travel_over_one_connection_one_frame_each():
    with streaming() as stream:
        answers = act(stream.url, times=3)
    assert [answer.trace for answer in answers] == [full_answer().trace] * 3
    assert all(answer.timings.round_trip_ms > 0 for answer in answers)
    assert stream.connections == 1
    assert len(stream.frames) == 3


def test_a_problem_is_raised_and_the_connection_stays():
    with streaming(problem(422)) as stream:
        refused, answered = act(stream.url, times=2)
    assert isinstance(refused, RefusedRequestError)
    assert refused.detail == "because"
    assert answered.actions.shape == (2, 3)
    assert stream.connections == 1


def test_an_overloaded_server_is_asked_again():
    with streaming(problem(429), problem(503, retry_after_s=0.01)) as stream:
        (answer,) = act(stream.url)
    assert answer.actions.shape == (2, 3)
    assert len(stream.frames) == 3


def test_a_broken_connection_is_made_anew():
    with streaming(repeating_id, None) as stream:
        answers = act(stream.url, times=2)
    assert all(answer.actions.shape == (2, 3) for answer in answers)
    assert stream.connections == 2


def test_a_late_answer_is_never_taken_for_the_next():
    """After a timeout the connection is dropped: its answer may still be under way."""
    patient = ClientSettings(timeouts=Timeouts(answer_s=60))
    with streaming(repeating_id, b"") as stream, StreamClient(stream.url, patient) as client:
        client.act(OBSERVATION)  # the connection is there
        with pytest.raises(AnswerTimeoutError):
            client.act(OBSERVATION, ActOptions(deadline_ms=1000))
        assert client.act(OBSERVATION).actions.shape == (2, 3)
    assert stream.connections == 2


def test_an_answer_nobody_asked_for_is_never_taken_for_the_next():
    """It ends the connection: the second frame gets the answer to itself."""
    with streaming(lambda frame: (repeating_id(frame), encode_answer(UNASKED))) as stream:
        answers = act(stream.url, times=2, between=stream.all_sent.wait)
    assert [answer.actions.shape for answer in answers] == [(2, 3)] * 2
    assert stream.connections == 2


def test_half_an_answer_nobody_asked_for_is_refused_with_the_rest_of_it():
    """The rest of it comes once the next frame is under way."""

    def halving(connection, server):
        open_stream(connection)
        asked = decode_request(unmasked(connection.recv(65536))).id
        answer, unasked = encode_answer(full_answer(), asked), encode_answer(UNASKED, asked)
        connection.sendall(b"\x82\x7e" + len(answer).to_bytes(2, "big") + answer + b"\x82")
        connection.recv(65536)
        connection.sendall(b"\x7e" + len(unasked).to_bytes(2, "big") + unasked)
        server.let_go.wait(120)

    with holding_up(halving) as server:
        answers = act(server.url, times=2)
        assert [answer.actions.shape for answer in answers] == [(2, 3)] * 2
        assert server.num_connections == 2


def unmasked(frame: bytes) -> bytes:
    """What a client's frame of 126 to 65,535 bytes holds."""
    mask, content = frame[4:8], frame[8:]
    return bytes(one ^ mask[index % 4] for index, one in enumerate(content))


def test_an_answer_with_another_id_is_refused_and_asked_again():
    """As where two answers change places: only one comes, and nothing is left over."""
    foreign = encode_answer(UNASKED, "another")
    with streaming(repeating_id, foreign) as stream:
        answers = act(stream.url, times=2)
    assert [answer.actions.shape for answer in answers] == [(2, 3)] * 2
    assert stream.connections == 2
    assert len({decode_request(one).id for one in stream.frames}) == 2  # the third is the second


def test_an_answer_without_an_id_is_refused_and_asked_again():
    with streaming(ANSWER) as stream:
        (answer,) = act(stream.url)
    assert answer.actions.shape == (2, 3)
    assert stream.connections == 2


def test_pings_between_the_frames_are_answered_and_keep_the_connection():
    with streaming(lambda frame: (repeating_id(frame), PING)) as stream:
        answers = act(stream.url, times=2, between=stream.all_sent.wait)
    assert len(answers) == 2
    assert stream.connections == 1
    assert stream.pongs[0].is_set()


def test_an_answer_that_is_too_long_is_refused():
    settings = ClientSettings(limits=WireLimits(max_bytes=1000))
    with streaming(bytes(1001)) as stream, pytest.raises(MessageTooLargeError, match="1000"):
        act(stream.url, settings=settings)


def test_text_that_is_no_problem_is_a_fault_of_the_server():
    with streaming("Internal error") as stream, pytest.raises(ServerFaultError, match="Internal"):
        act(stream.url)


def test_a_frame_that_is_no_answer_names_no_frame():
    with streaming(*[b"\x93"] * 3) as stream:
        with pytest.raises(ServerUnreachableError, match="names another frame, or none"):
            act(stream.url)
        assert len(stream.frames) == 3


def test_a_port_where_nobody_listens_is_unreachable():
    with streaming() as stream:
        url = stream.url
    with pytest.raises(ServerUnreachableError, match="cannot reach"):
        act(url)


def test_the_api_key_opens_the_stream():
    with streaming() as stream:
        act(stream.url, settings=ClientSettings(api_key="secret"))
    assert stream.headers == ["Bearer secret"]


def test_the_url_of_the_stream_follows_from_the_url_of_the_server():
    assert stream_url("http://robot:8000") == "ws://robot:8000/v1/stream"
    assert stream_url("https://robot/deft") == "wss://robot/deft/v1/stream"
