"""One deadline bounds everything in a call, on both transports."""

import socket
import threading
import time

import httpcore
import numpy as np
import pytest

from deft_client import deadlines
from deft_client.client import PolicyClient
from deft_client.deadlines import connection_pool, ending_at
from deft_client.errors import (
    AnswerTimeoutError,
    NotReadyError,
    ServerUnreachableError,
    TransportError,
    WrongServerError,
)
from deft_client.settings import ClientSettings, Retries, Timeouts
from deft_client.stream import StreamClient
from deft_core.errors import MessageTooLargeError
from deft_core.types import ActOptions, Observation
from deft_core.wire.limits import WireLimits
from tests.client.hostile_servers import (
    HTTP_MANNERS,
    STREAM_MANNERS,
    HostileServer,
    dripping,
    frozen,
    holding_up,
    ping_flooding,
    refusing,
    stream_silent,
)
from tests.core.samples import frame

pytestmark = pytest.mark.promise

OBSERVATION = Observation(frame(32, 32), "lift the cup")
LARGE = Observation(np.zeros((1500, 1500, 3), np.uint8), "more than the buffers of a socket hold")
OPTIONS = ActOptions(deadline_ms=50)
SHORT = ClientSettings(timeouts=Timeouts(answer_s=0.2))
MANNERS = [
    *[pytest.param(PolicyClient, one, id=f"http-{one.__name__}") for one in HTTP_MANNERS],
    *[pytest.param(StreamClient, one, id=f"stream-{one.__name__}") for one in STREAM_MANNERS],
]


def act(kind, url, settings, observation, options=None):
    with kind(url, settings) as policy:
        return policy.act(observation, options)


ENDS = (TransportError, NotReadyError)


@pytest.mark.parametrize(("kind", "manner"), MANNERS)
def test_a_deadline_ends_the_call_whatever_the_server_does(kind, manner):
    with holding_up(manner) as server:
        with pytest.raises(ENDS):
            act(kind, server.url, ClientSettings(), OBSERVATION, OPTIONS)
        assert not server.let_go.is_set()


@pytest.mark.parametrize(
    ("kind", "manner"), [(PolicyClient, dripping), (StreamClient, ping_flooding)]
)
def test_without_a_deadline_the_timeout_ends_it(kind, manner):
    with holding_up(manner) as server:
        with pytest.raises(ENDS):
            act(kind, server.url, SHORT, OBSERVATION)
        assert not server.let_go.is_set()


@pytest.mark.parametrize(
    ("kind", "manner"), [(PolicyClient, frozen), (StreamClient, stream_silent)]
)
def test_sending_ends_too_where_nobody_takes_the_frame(kind, manner):
    with holding_up(manner) as server:
        with pytest.raises(ENDS):
            act(kind, server.url, ClientSettings(), LARGE, OPTIONS)
        assert not server.let_go.is_set()


def test_retries_end_at_the_deadline():
    settings = ClientSettings(retries=Retries(attempts=1_000_000, first_pause_s=0.0))
    with holding_up(refusing) as server:
        with pytest.raises(ENDS):
            act(PolicyClient, server.url, settings, OBSERVATION, ActOptions(deadline_ms=1000))
        assert server.num_connections > 1
        assert not server.let_go.is_set()


def test_threads_that_take_turns_do_not_wait_beyond_their_deadline():
    """One frame is on its way at a time; the second thread's time runs while it waits."""
    ended = threading.Event()
    once = ClientSettings(retries=Retries(attempts=1))
    with holding_up(stream_silent) as server, StreamClient(server.url, once) as policy:

        def wait_long() -> None:
            with pytest.raises(ENDS):
                policy.act(OBSERVATION, ActOptions(deadline_ms=60_000))
            ended.set()

        first = threading.Thread(target=wait_long)
        first.start()
        while not server.num_connections:
            time.sleep(0.005)
        with pytest.raises(AnswerTimeoutError):
            policy.act(OBSERVATION, OPTIONS)
        assert not ended.is_set()
        server.let_go.set()
        first.join()


def test_looking_for_an_address_ends_in_time(monkeypatch):
    """The system's resolver takes as long as it likes: 5 s for each server that is down."""
    let_go = threading.Event()

    def look(*_, **__):
        let_go.wait(20)
        raise OSError("no such host")

    monkeypatch.setattr(deadlines.socket, "getaddrinfo", look)
    with PolicyClient("http://robot-server") as policy:
        with pytest.raises(ServerUnreachableError, match="in time"):
            policy.act(OBSERVATION, OPTIONS)
        assert not let_go.is_set()
    let_go.set()


def test_a_name_that_nobody_has_is_unreachable(monkeypatch):
    looked = []

    def look(*_, **__):
        looked.append(1)
        raise socket.gaierror(socket.EAI_NONAME, "no such host")

    monkeypatch.setattr(deadlines.socket, "getaddrinfo", look)
    policy = PolicyClient("http://robot-server")
    with policy, pytest.raises(WrongServerError, match=r"no such host$"):
        policy.act(OBSERVATION)
    assert len(looked) == 1  # asking again would change nothing


def test_a_resolver_that_is_away_may_come_back(monkeypatch):
    def look(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")

    monkeypatch.setattr(deadlines.socket, "getaddrinfo", look)
    policy = PolicyClient("http://robot-server", ClientSettings(retries=Retries(attempts=1)))
    with policy, pytest.raises(ServerUnreachableError, match="temporary failure") as caught:
        policy.act(OBSERVATION)
    assert not isinstance(caught.value, WrongServerError)


def test_all_addresses_of_a_name_are_tried(monkeypatch):
    """The first one refuses; the server listens at the second."""
    with holding_up(refusing) as server:
        port = int(server.url.rpartition(":")[2])
        found = [(2, 1, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(deadlines.socket, "getaddrinfo", lambda *_, **__: found)
        one = deadlines._Backend().connect_tcp("robot-server", port)
        assert one.get_extra_info("server_addr") == ("127.0.0.1", port)
        one.close()


def test_a_moment_that_has_passed_ends_every_wait_at_once():
    pool = connection_pool(None, None)
    with ending_at(time.monotonic()), pytest.raises(httpcore.ConnectTimeout):
        pool.request("GET", "http://127.0.0.1:1")
    with ending_at(time.monotonic()), pytest.raises(httpcore.ReadTimeout):
        deadlines.remaining_s(1.0)
    assert deadlines.remaining_s(1.0) == 1.0


def endless(connection: socket.socket, server: HostileServer) -> None:
    """Answer with a body that has no end."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while not server.let_go.is_set():
        connection.sendall(bytes(65536))


def test_an_answer_without_an_end_is_refused_at_the_limit():
    settings = ClientSettings(limits=WireLimits(max_bytes=100_000))
    with holding_up(endless) as server:
        with pytest.raises(MessageTooLargeError, match="100000 bytes"):
            act(PolicyClient, server.url, settings, OBSERVATION)
        assert not server.let_go.is_set()


@pytest.mark.parametrize("call", ["info", "reset"])
@pytest.mark.parametrize("kind", [PolicyClient, StreamClient])
def test_whoever_calls_may_end_a_call_earlier(kind, call):
    """As a control loop does: such a call has no deadline of its own.

    The end is late enough for a busy machine to connect before: the server answers nothing anyway.
    """
    with holding_up(frozen) as server, kind(server.url) as policy:
        with ending_at(time.monotonic() + 2.0), pytest.raises(AnswerTimeoutError):
            getattr(policy, call)()
        assert not server.let_go.is_set()


def test_the_earlier_of_two_ends_counts():
    with ending_at(10.0):
        with ending_at(20.0):
            assert deadlines.ends_at() == 10.0
        with ending_at(5.0):
            assert deadlines.ends_at() == 5.0
    assert deadlines.ends_at() == deadlines.NEVER
