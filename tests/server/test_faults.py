"""What networks, clients, policies and operators do to a server in its own process."""

import base64
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect as open_stream

from deft_core.types import ActOptions
from deft_core.wire import codec
from tests.server.process import ROOT, ServerProcess, serving
from tests.standins.policies import MSGPACK, packed

IDLE_SOCKETS = 1000
_WEBSOCKET_KEY = base64.b64encode(bytes(16)).decode()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Return a server whose patience is short."""
    with serving(settings="header_timeout_s=0.3, body_timeout_s=0.3") as server:
        server.wait_until_ready()
        yield server


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=120)


def head(length: int, path: str = "/v1/act") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/msgpack\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def still_answers(server: ServerProcess) -> bool:
    response = server.http.post("/v1/act", content=packed(), headers=MSGPACK)
    return response.status_code == 200


def metric(server: ServerProcess, name: str) -> float:
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def until(server: ServerProcess, name: str, value: float) -> None:
    for _ in range(2000):
        if metric(server, name) == value:
            return
    raise AssertionError(f"{name} never was {value}")


def test_a_caller_that_leaves_within_its_body_leaves_nothing(
    server: ServerProcess,
):
    for _ in range(5):
        with connect(server) as caller:
            caller.sendall(head(1000) + bytes(300))
    until(server, "deft_requests_in_hand", 1)  # the request for the metrics itself
    assert still_answers(server)


def test_a_body_that_drips_is_cut_off(server: ServerProcess):
    with connect(server) as caller:
        caller.sendall(head(1000) + bytes(10))
        assert caller.recv(4096).startswith(b"HTTP/1.1 408 ")
    assert still_answers(server)


def test_headers_that_drip_are_cut_off(server: ServerProcess):
    with connect(server) as slow, connect(server) as silent:
        slow.sendall(b"POST /v1/act HTTP/1.1\r\nhost")
        assert slow.recv(4096) == b""
        assert silent.recv(4096) == b""
    assert still_answers(server)


def test_headers_that_drip_on_a_used_connection_are_cut_off(server: ServerProcess):
    with connect(server) as caller:
        body = packed()
        caller.sendall(head(len(body)) + body)
        assert caller.recv(4096).startswith(b"HTTP/1.1 200 ")
        caller.sendall(b"POST /v1/act HT")
        while received := caller.recv(4096):
            assert b"HTTP/1.1" not in received
    assert still_answers(server)


def test_a_connection_may_idle_longer_than_headers_may_take(
    server: ServerProcess,
):
    with httpx.Client(base_url=server.url) as client:
        pause = threading.Event()
        for _ in range(2):
            assert client.post("/v1/act", content=packed(), headers=MSGPACK).status_code == 200
            pause.wait(0.5)


def test_a_thousand_idle_streams_do_not_disturb_anybody(server: ServerProcess):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * IDLE_SOCKETS:
        pytest.skip(f"this system allows {hard} open files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * IDLE_SOCKETS), hard))
    handshake = (
        "GET /v1/stream HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\n"
        "connection: upgrade\r\n"
        f"sec-websocket-version: 13\r\nsec-websocket-key: {_WEBSOCKET_KEY}\r\n\r\n"
    ).encode()
    idle: list[socket.socket] = []
    try:
        for _ in range(IDLE_SOCKETS):
            idle.append(connect(server))
            idle[-1].sendall(handshake)
        for caller in idle:
            assert caller.recv(4096).startswith(b"HTTP/1.1 101 ")
        assert still_answers(server)
        assert server.http.get("/healthz").text == "OK\n"
    finally:
        for caller in idle:
            caller.close()
    assert still_answers(server)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Return the file whose appearance lets a `FileGatedPolicy` answer."""
    return tmp_path / "gate"


@pytest.fixture
def gated(gate: Path) -> Iterator[ServerProcess]:
    with serving(f"FileGatedPolicy(gate={str(gate)!r})") as server:
        server.wait_until_ready()
        yield server


def test_a_caller_that_hangs_up_while_it_waits_is_not_computed_for(
    gated: ServerProcess, gate: Path
):
    body = packed(ActOptions(session_id="first"))
    with connect(gated) as first:
        first.sendall(head(len(body)) + body)
        until(gated, "deft_frames_with_policy", 1)
        body = packed(ActOptions(session_id="second"))
        with connect(gated) as second:
            second.sendall(head(len(body)) + body)
            until(gated, "deft_waiting_frames", 1)
        until(gated, "deft_waiting_frames", 0)
        gate.touch()
        assert first.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert metric(gated, "deft_batch_size_sum") == 1


def test_sigterm_under_load_answers_what_is_in_hand_and_exits_with_0(
    gated: ServerProcess, gate: Path
):
    def act(number: int) -> httpx.Response:
        body = packed(ActOptions(session_id=f"s{number}"))
        return httpx.post(f"{gated.url}/v1/act", content=body, headers=MSGPACK, timeout=120)

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(act, 0)
        until(gated, "deft_frames_with_policy", 1)
        others = [pool.submit(act, number) for number in range(1, 6)]
        until(gated, "deft_waiting_frames", 5)
        gated.process.send_signal(signal.SIGTERM)
        gate.touch()
        assert [one.result().status_code for one in (first, *others)] == [200] * 6
    assert gated.ended_with() == 0
    with pytest.raises(ConnectionRefusedError):
        connect(gated)


def test_sigterm_answers_the_frame_of_a_stream_before_it_closes_it(
    gated: ServerProcess, gate: Path
):
    with open_stream(f"ws://127.0.0.1:{gated.port}/v1/stream") as stream:
        stream.send(packed())
        until(gated, "deft_frames_with_policy", 1)
        gated.process.send_signal(signal.SIGTERM)
        gate.touch()
        reply = stream.recv(timeout=120)
        assert isinstance(reply, bytes)
        assert codec.decode_answer(reply).actions.shape == (1, 7)
    assert gated.ended_with() == 0


def test_a_process_whose_log_nobody_reads_ends_all_the_same():
    """Once it waited for ever for a full pipe behind stderr."""
    code = (
        "from deft_server.commands import serve\n"
        "from deft_server.app import create_app\n"
        "from deft_server.settings import *\n"
        "from tests.standins.policies import *\n"
        "import logging, threading\n"
        "def flood():\n"
        "    for _ in range(3000): logging.getLogger('x').error('y' * 1000)\n"
        "serve.LAST_WORDS_S = 0.2\n"
        "threading.Timer(0.5, flood).start()\n"
        "threading.Timer(1.0, lambda: os.kill(os.getpid(), 15)).start()\n"
        "raise SystemExit(serve.run(create_app(FakePolicy(), Settings(port=0))))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.wait(60) == 0


def test_a_policy_that_exits_while_loading_ends_the_process():
    with serving("(lambda: sys.exit(7))") as server:
        assert server.ended_with() == 3


def test_a_policy_that_hangs_ends_the_process_with_a_code_of_its_own():
    with serving("FileGatedPolicy(gate='/nowhere')", "hang_after_s=0.2") as server:
        server.wait_until_ready()
        response = httpx.post(
            f"{server.url}/v1/act", content=packed(), headers=MSGPACK, timeout=120
        )
        assert response.status_code == 503
        assert "hangs" in response.json()["detail"]
        assert server.ended_with() == 4
        assert any("the policy hangs" in line for line in server.log)


def test_a_policy_that_cannot_be_loaded_ends_the_process_and_says_why():
    broken = "(lambda: (_ for _ in ()).throw(DeviceError('this machine has no GPU')))"
    with serving(broken) as server:
        assert server.ended_with() == 3
        assert any("this machine has no GPU" in line for line in server.log)


def test_a_port_that_is_taken_is_named(server: ServerProcess):
    command = [sys.executable, "-m", "deft_server", "serve", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"127.0.0.1:{server.port}" in done.stderr
