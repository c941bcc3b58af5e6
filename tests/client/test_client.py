"""The client over HTTP: calls, retries and exceptions."""

import email.utils
import gzip
import socket
import threading
import time
from dataclasses import replace

import httpcore
import httpx
import msgpack
import numpy as np
import pytest

from deft_client import PolicyClient, StreamClient, calls
from deft_client.actions import ActionRules
from deft_client.calls import retry_after_s
from deft_client.errors import (
    AccessDeniedError,
    AnswerTimeoutError,
    ConflictError,
    DeadlineMissedError,
    NotReadyError,
    OverloadedError,
    ProblemError,
    RefusedRequestError,
    ServerFaultError,
    ServerUnreachableError,
    UnknownEndpointError,
)
from deft_client.settings import ClientSettings, Retries, Timeouts
from deft_core.errors import UnusableValueError, WireError
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_core.wire import codec
from deft_core.wire.images import ImageEncoding
from deft_core.wire.messages import ActMessage
from deft_server.app import create_app
from tests.client.hostile_servers import holding_up
from tests.core.samples import full_answer, full_message
from tests.server.running import running
from tests.standins.policies import FakePolicy
from tests.standins.policy_server import ANSWER, INFO, FakeServer, refusal

AT_ONCE = ClientSettings(retries=Retries(attempts=3, first_pause_s=0.0))
OBSERVATION = full_message().observation
REFUSED = httpcore.ConnectError("connection refused")


class Robot:
    """A client that always sends the same observation."""

    def __init__(self, server: FakeServer, settings: ClientSettings = AT_ONCE) -> None:
        self.client = PolicyClient("http://robot-server", settings, server.transport)

    def act(self, options: ActOptions | None = None):
        return self.client.act(OBSERVATION, options)

    def __getattr__(self, name):
        return getattr(self.client, name)


def sent_message(request: httpx.Request) -> ActMessage:
    return codec.decode_request(request.content)


def test_act_sends_the_observation_and_returns_the_answer():
    server = FakeServer()
    chunk = Robot(server).act(ActOptions(statistics_key="libero_goal", want_trace=True))
    assert chunk.actions.tobytes() == full_answer().actions.tobytes()
    assert chunk.trace == full_answer().trace
    (request,) = server.requests
    assert request.headers["content-type"] == "application/msgpack"
    message = sent_message(request)
    np.testing.assert_array_equal(message.observation.image, OBSERVATION.image)
    assert message.options.statistics_key == "libero_goal"
    assert message.options.want_trace


def test_the_round_trip_is_measured_and_the_servers_timings_are_kept():
    timings = Robot(FakeServer()).act().timings
    assert timings.round_trip_ms > 0
    assert timings.total_ms == full_answer().timings.total_ms


def test_each_client_is_one_session_unless_told_otherwise():
    server = FakeServer()
    client = Robot(server)
    client.act()
    client.act(ActOptions(session_id="arm-2"))
    client.reset()
    client.reset("arm-2")
    sessions = [sent_message(request).options.session_id for request in server.requests[:2]]
    assert sessions == [client.session_id, "arm-2"]
    assert client.session_id.encode() in server.requests[2].content
    assert server.requests[3].content == b'{"session_id":"arm-2"}'
    assert Robot(server).session_id != client.session_id


def test_info_and_ping():
    client = Robot(FakeServer())
    assert client.info() == INFO
    assert client.ping() > 0


def test_what_the_policy_does_not_look_at_is_said_once(caplog):
    robot = Robot(FakeServer())
    robot.act()
    assert "policy" not in caplog.text  # nobody asked what the policy looks at
    robot.info()
    robot.act()
    robot.act()
    lines = [one.getMessage() for one in caplog.records if one.name == "deft_client.calls"]
    assert lines == [
        f"{name}: {reason}" for name, reason in INFO.ignored_inputs(OBSERVATION).items()
    ]


def test_wrist_cameras_are_looked_at_as_far_as_the_policy_has_eyes():
    image = OBSERVATION.image
    cameras = {"left_wrist": image, "front": image, "right_wrist": image}
    seen = Observation(image, "lift it", cameras, np.zeros(8, np.float32))
    assert replace(INFO, num_pictures=3, state_dim=8).ignored_inputs(seen) == {
        "cameras": "the policy does not look at front"
    }
    assert replace(INFO, num_pictures=2, state_dim=None).ignored_inputs(seen) == {
        "cameras": "the policy does not look at front, right_wrist",
        "state": "the policy reads no state",
    }


def test_an_instruction_is_compared_with_those_of_the_training():
    info = replace(INFO, instructions=("Lift the cup.", "fold the towel"))
    for known in ("lift the cup", "Lift  the cup", "lift the cup . ", "fold the towel."):
        assert info.untrained(known) == ""
    assert "not among the 2 that the policy was trained on" in info.untrained("lift the mug")
    assert replace(INFO, instructions=()).untrained("anything") == ""


def test_the_image_travels_as_the_settings_say():
    server = FakeServer()
    Robot(server, ClientSettings(image_encoding=ImageEncoding.PNG)).act()
    image = msgpack.unpackb(server.requests[0].content)["image"]
    assert image["encoding"] == "png"


def test_the_api_key_is_sent_and_never_printed():
    server = FakeServer()
    settings = ClientSettings(api_key="secret")
    Robot(server, settings).act()
    assert server.requests[0].headers["authorization"] == "Bearer secret"
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RefusedRequestError),
        (401, AccessDeniedError),
        (403, AccessDeniedError),
        (404, UnknownEndpointError),
        (409, ConflictError),
        (413, RefusedRequestError),
        (415, RefusedRequestError),
        (421, UnknownEndpointError),
        (422, RefusedRequestError),
        (429, OverloadedError),
        (500, ServerFaultError),
        (502, NotReadyError),
        (503, NotReadyError),
        (504, DeadlineMissedError),
    ],
)
def test_each_problem_is_an_exception_of_its_own_that_says_everything(status, kind):
    server = FakeServer(*(refusal(status, "it must be finite") for _ in range(3)))
    with pytest.raises(kind) as caught:
        Robot(server).act()
    error = caught.value
    assert isinstance(error, ProblemError)
    assert (error.status, error.title, error.detail) == (status, "No", "it must be finite")
    assert (error.field, error.request_id) == ("state", "r-1")
    assert all(word in str(error) for word in (str(status), "finite", "state", "r-1"))


@pytest.mark.parametrize("trouble", [REFUSED, httpcore.ReadError(""), 429, 502, 503])
def test_what_may_pass_is_tried_again(trouble):
    server = FakeServer(
        *(refusal(trouble) if trouble in (429, 502, 503) else trouble for _ in "ab")
    )
    Robot(server).act()
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "status",
    [400, 401, 409, 422, 500, 504],
)
def test_what_will_not_pass_is_not_tried_again(status):
    server = FakeServer(refusal(status))
    with pytest.raises(ProblemError):
        Robot(server).act()
    assert len(server.requests) == 1


def test_attempts_are_bounded_and_the_last_failure_is_raised():
    server = FakeServer(REFUSED, refusal(429), REFUSED, REFUSED)
    with pytest.raises(ServerUnreachableError, match=r"robot-server"):
        Robot(server).act()
    assert len(server.requests) == 3


def test_an_answer_that_takes_too_long_is_its_own_exception():
    """And the request is not made again: the server may still be at work on it."""
    server = FakeServer(httpcore.ReadTimeout("slow"))
    with pytest.raises(AnswerTimeoutError, match="too long"):
        Robot(server).act()
    assert len(server.requests) == 1


def test_a_server_that_asks_for_too_much_patience_is_left():
    server = FakeServer(refusal(429, retry_after="60"))
    with pytest.raises(OverloadedError) as caught:
        Robot(server).act()
    assert caught.value.retry_after_s == 60
    assert len(server.requests) == 1


def test_retry_after_is_honoured():
    server = FakeServer(refusal(503, retry_after="0.05"))
    started = time.monotonic()
    Robot(server).act()
    assert time.monotonic() - started >= 0.05


def test_no_pause_reaches_beyond_the_deadline_of_the_observation():
    server = FakeServer(refusal(429, retry_after="20"))
    with pytest.raises(OverloadedError):
        Robot(server).act(ActOptions(deadline_ms=10_000))
    assert len(server.requests) == 1


LOADING = refusal(503, "the policy is loading", retry_after="0.001")


def test_a_server_that_is_loading_is_waited_for_with_a_word(caplog):
    """The first request once failed with 503 for half a minute."""
    server = FakeServer(*[LOADING] * 9)
    Robot(server).act()
    assert len(server.requests) == 10
    lines = [one.getMessage() for one in caplog.records]
    assert lines == ["waiting: the policy is loading"]


def test_calls_one_after_the_other_do_not_repeat_what_they_wait_for(caplog, monkeypatch):
    """A control loop's calls end with their deadlines, and each logged the same sentence."""
    server = FakeServer()
    robot = Robot(server)
    for _ in range(3):
        server.script(*[LOADING] * 2)
        robot.act()
    assert len(server.requests) == 9
    lines = [one.getMessage() for one in caplog.records]
    assert lines == ["waiting: the policy is loading"]
    monkeypatch.setattr(calls, "WAIT_LOGGED_EVERY_S", 0.0)
    log = calls.WaitLog()
    for _ in range(2):
        log.note("the policy is loading")
    assert len(caplog.records) == 3  # it is repeated after a while


def test_a_wait_for_loading_may_be_longer_than_a_call(caplog):
    settings = ClientSettings(Timeouts(answer_s=1e-3), Retries(first_pause_s=0.0))
    server = FakeServer(*[refusal(503, "the policy is loading", retry_after="0.002")] * 3)
    assert Robot(server, settings).info() == INFO


@pytest.mark.parametrize(
    "retries", [Retries(loading_s=0.0, first_pause_s=0.0), Retries(only_when_overloaded=True)]
)
def test_who_does_not_want_to_wait_for_loading_does_not(retries):
    server = FakeServer(*[LOADING] * 9)
    with pytest.raises(NotReadyError, match="loading"):
        Robot(server, ClientSettings(retries=retries)).act()
    assert len(server.requests) <= 3


def test_a_deadline_ends_the_wait_for_loading():
    server = FakeServer(*[refusal(503, "the policy is loading", retry_after="20")] * 9)
    with pytest.raises(NotReadyError):
        Robot(server).act(ActOptions(deadline_ms=500))
    assert len(server.requests) == 1


def test_another_trouble_than_loading_is_not_waited_for():
    server = FakeServer(*[refusal(503, "the policy hangs", retry_after="0.001")] * 9)
    with pytest.raises(NotReadyError):
        Robot(server).act()
    assert len(server.requests) == 3


def test_a_server_in_its_first_moments_says_what_clients_wait_for():
    """The words that both sides must agree on."""
    let_go = threading.Event()

    def load():
        assert let_go.wait(120)
        return FakePolicy()

    with running(create_app(load)) as address:
        url = f"http://{address}"
        with PolicyClient(url, ClientSettings(retries=Retries(loading_s=0.0, attempts=1))) as hasty:
            with pytest.raises(NotReadyError) as caught:
                hasty.info()
            assert caught.value.is_loading
            let_go.set()
            hasty.wait_ready()
            assert hasty.info().action_dim == 7


def test_a_server_that_is_not_there_yet_can_be_waited_for(caplog, monkeypatch):
    monkeypatch.setattr(calls, "PROBE_S", 0.001)
    server = FakeServer(REFUSED, REFUSED, LOADING, httpcore.ReadTimeout("slow"))
    Robot(server).wait_ready()
    assert len(server.requests) == 5
    lines = [one.getMessage() for one in caplog.records]
    assert lines[0].startswith("waiting: cannot reach http://robot-server: connection refused")
    assert lines[1] == "waiting: the policy is loading"
    assert len(lines) == 3


def test_a_wait_ends_with_what_kept_the_server(monkeypatch):
    monkeypatch.setattr(calls, "PROBE_S", 0.001)
    server = FakeServer(*[LOADING] * 1000)
    with pytest.raises(NotReadyError, match="loading"):
        Robot(server).wait_ready(timeout=0.05)


def test_a_wrong_key_is_not_waited_for():
    with pytest.raises(AccessDeniedError):
        Robot(FakeServer(refusal(401))).wait_ready()


def sent_key(monkeypatch, *given, **named):
    server = FakeServer()
    with PolicyClient("http://robot-server", *given, transport=server.transport, **named) as client:
        client.act(OBSERVATION)
    return server.requests[0].headers.get("authorization")


def test_a_key_is_an_argument_a_setting_or_in_the_environment(monkeypatch):
    monkeypatch.delenv("DEFT_API_KEY", raising=False)
    assert sent_key(monkeypatch) is None
    assert sent_key(monkeypatch, api_key="given") == "Bearer given"
    monkeypatch.setenv("DEFT_API_KEY", "everywhere")
    assert sent_key(monkeypatch) == "Bearer everywhere"
    assert sent_key(monkeypatch, ClientSettings(api_key="set")) == "Bearer set"
    assert sent_key(monkeypatch, ClientSettings(api_key="set"), api_key="given") == "Bearer given"
    assert sent_key(monkeypatch, api_key="") is None


@pytest.mark.parametrize("kind", [PolicyClient, StreamClient])
def test_a_timeout_is_an_argument(kind):
    client = kind("http://robot-server", timeout=7.5)
    assert client.settings.timeouts == Timeouts(answer_s=7.5)
    with pytest.raises(ValueError, match="above 0"):
        kind("http://robot-server", timeout=0)


def test_a_ping_is_never_repeated():
    server = FakeServer(refusal(503))
    with pytest.raises(NotReadyError):
        Robot(server).ping()
    assert len(server.requests) == 1


def test_an_answer_that_is_no_answer_is_a_wire_error():
    with pytest.raises(WireError):
        Robot(FakeServer(httpx.Response(200, content=b"hello"))).act()


def answer(actions: np.ndarray) -> httpx.Response:
    return httpx.Response(200, content=codec.encode_answer(ActionChunk(actions)))


@pytest.mark.parametrize(
    "actions",
    [
        *(np.full((1, 3), value) for value in (np.nan, np.inf, -np.inf)),
        *(np.zeros(shape) for shape in ((0, 3), (5, 0), (0, 0))),
    ],
    ids=lambda actions: f"{list(actions.shape)}-{actions.sum()}",
)
def test_actions_that_no_robot_can_execute_are_refused(actions):
    with pytest.raises(UnusableValueError, match="actions"):
        Robot(FakeServer(answer(actions))).act()


def test_actions_of_another_size_than_info_promised_are_refused():
    """A server that was replaced by one for another arm; asking anew accepts it."""
    server = FakeServer()
    client = Robot(server)
    client.info()
    server.script(answer(np.zeros((1, 7))))
    with pytest.raises(UnusableValueError, match=r"got \[1, 7\]"):
        client.act()
    assert client.act().actions.shape == (2, 3)


def test_actions_beyond_the_limits_of_the_caller_are_refused():
    rules = ActionRules((True, True, False), low=(-1, -1, 0), high=(1, 1, 1))
    settings = ClientSettings(action_rules=rules)
    Robot(FakeServer(answer(np.array([[1.0, -1.0, 0.0]]))), settings).act()
    with pytest.raises(UnusableValueError, match="1000 in dimension 1 of step 0"):
        Robot(FakeServer(answer(np.array([[0.0, 1e3, 0.0]]))), settings).act()


def test_an_answer_to_another_request_is_not_used():
    """HTTP has no numbers of its own: what is left over from one answer would be the next one."""
    network = ClosableStream()
    foreign = httpx.Response(
        200,
        content=codec.encode_answer(ActionChunk(np.ones((1, 3)))),
        headers={"x-request-id": "another"},
        extensions={"network_stream": network},
    )
    server = FakeServer(foreign)
    np.testing.assert_array_equal(Robot(server).act().actions, full_answer().actions)
    assert network.is_closed
    assert len(server.requests) == 2
    sent = {request.headers["x-request-id"] for request in server.requests}
    assert len(sent) == 2


def test_a_server_that_repeats_the_request_id_is_believed():
    def react(request):
        repeated = {"x-request-id": request.headers["x-request-id"]}
        return httpx.Response(200, content=ANSWER, headers=repeated)

    server = FakeServer()
    server.react = react
    Robot(server).act()


def test_an_answer_without_an_id_is_refused_by_the_stream():
    """A problem may come from a proxy, which need not know of ids."""
    network = ClosableStream()
    unasked = httpx.Response(
        200,
        content=codec.encode_answer(ActionChunk(np.ones((1, 3)))),
        extensions={"network_stream": network},
    )

    def react(request):
        repeated = {"x-request-id": request.headers["x-request-id"]}
        return httpx.Response(200, content=ANSWER, headers=repeated)

    server = FakeServer()
    server.react = react
    robot = Robot(server)
    robot.act()
    server.script(unasked, refusal(503))
    np.testing.assert_array_equal(robot.act().actions, full_answer().actions)
    assert network.is_closed
    assert len(server.requests) == 4


def test_a_second_answer_in_a_packet_ends_the_connection():
    """No ids here: the second one would be taken for the answer to the next frame."""
    answers = [
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(one) + one
        for one in (ANSWER, codec.encode_answer(ActionChunk(np.full((1, 3), 9.0))))
    ]

    def doubling(connection, server):
        request = connection.recv(65536)
        while request:
            connection.sendall(b"".join(answers))
            request = connection.recv(65536)

    with holding_up(doubling) as server, PolicyClient(server.url, AT_ONCE) as client:
        for count in (1, 2, 3):
            np.testing.assert_array_equal(
                client.act(OBSERVATION).actions, full_answer().actions, str(count)
            )
            assert server.num_connections == count


def test_an_answer_that_is_longer_than_info_promised_is_refused():
    server = FakeServer()
    robot = Robot(server)
    robot.info()
    server.script(answer(np.zeros((9000, 3))))
    with pytest.raises(UnusableValueError, match=r"1 to 2 steps of 3 numbers, got \[9000, 3\]"):
        robot.act()


def test_a_body_is_never_inflated():
    """800 kB of gzip were 1.7 GB of memory; nobody asked for it."""
    bomb = httpx.Response(
        200,
        headers={"content-encoding": "gzip"},
        stream=httpx.ByteStream(gzip.compress(ANSWER)),
    )
    with pytest.raises(WireError):
        Robot(FakeServer(bomb)).act()


def test_a_closed_port_is_unreachable():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        with PolicyClient(url, AT_ONCE) as client, pytest.raises(ServerUnreachableError):
            client.act(OBSERVATION)


def test_a_server_that_never_answers_runs_into_the_timeout():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        settings = ClientSettings(timeouts=Timeouts(answer_s=0.5))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with PolicyClient(url, settings) as client, pytest.raises(AnswerTimeoutError):
            client.act(OBSERVATION)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "robot:8000",
        "ws://robot",
        "/v1/act",
        "http://",
        "http://robot:port",
        "http://robot?x=1",
        "http://robot/v1/act",
        "http://robot/v1/act/",
        "http://robot/deft/v1",
    ],
)
def test_a_url_that_is_none_is_refused_at_once(url):
    with pytest.raises(ValueError, match=r"url|[Pp]ort"):
        PolicyClient(url)


class ClosableStream:
    """Knows whether it was closed."""

    is_closed = False

    def close(self):
        self.is_closed = True


class ClosableTransport(httpcore.ConnectionPool):
    """Knows whether it was closed."""

    is_closed = False

    def close(self):
        self.is_closed = True


def test_a_client_closes_its_connection_with_its_context():
    transport = ClosableTransport()
    with PolicyClient("http://robot-server", AT_ONCE, transport):
        assert not transport.is_closed
    assert transport.is_closed


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", None), ("3", 3.0), (" 0.5 ", 0.5), ("-3", 0.0), ("soon", None), ("inf", None)],
)
def test_retry_after_in_seconds(value, expected):
    assert retry_after_s({"retry-after": value}) == expected


def test_retry_after_as_a_date():
    later = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert 28 <= retry_after_s({"retry-after": later}) <= 30
    assert retry_after_s({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}) == 0.0


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="above 0"):
        Timeouts(answer_s=0)
    with pytest.raises(ValueError, match="attempt"):
        Retries(attempts=0)
    for quality in (0, 101):
        with pytest.raises(ValueError, match="jpeg_quality"):
            ClientSettings(jpeg_quality=quality)
    for quality in (1, 100):
        assert ClientSettings(jpeg_quality=quality).jpeg_quality == quality
