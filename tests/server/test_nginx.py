"""nginx with our files before a server: what the process leaves to the proxy is held by it."""

import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import httpx
import msgpack
import pytest
import websockets.sync.client
from websockets.exceptions import InvalidStatus

from deft_client.client import PolicyClient
from deft_client.errors import AccessDeniedError, NotReadyError
from deft_client.settings import ClientSettings, TlsFiles
from tests.server.nginx import Proxy, nginx_before
from tests.server.process import serving
from tests.standins.policies import MSGPACK, frame, packed

NAME = "robots.example"
MAX_STREAMS = 3

needed = pytest.mark.skipif(
    shutil.which("nginx") is None and os.environ.get("DEFT_TEST_NGINX") != "required",
    reason="needs nginx",
)
pytestmark = needed


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    settings = (
        f"trusted_proxies=('127.0.0.1',), allowed_hosts=({NAME!r},), max_connections_per_address=1"
    )
    with serving(settings=settings) as server:
        server.wait_until_ready()
        folder = tmp_path_factory.mktemp("nginx")
        with nginx_before(server.port, folder, timeout_s=1, streams=MAX_STREAMS) as proxy:
            yield proxy


def test_frames_get_through_under_the_servers_own_name(proxy: Proxy) -> None:
    for name, status in ((NAME, 200), ("evil.example", 421)):
        answer = httpx.post(
            f"{proxy.url}/v1/act", content=packed(), headers={**MSGPACK, "host": name}
        )
        assert answer.status_code == status


def test_streams_get_through_but_for_one_address_no_more_than_so_many(proxy: Proxy) -> None:
    address = f"ws://127.0.0.1:{proxy.port}/v1/stream"
    with ExitStack() as held:
        streams = [
            held.enter_context(websockets.sync.client.connect(address)) for _ in range(MAX_STREAMS)
        ]
        for stream in streams:
            stream.send(packed())
            assert "actions" in msgpack.unpackb(stream.recv(20))
        with pytest.raises(InvalidStatus) as refused:
            websockets.sync.client.connect(address).__enter__()
        assert refused.value.response.status_code == 429


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n",
        b"POST /v1/act HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\nx",
    ],
    ids=["headers", "body"],
)
def test_who_never_finishes_a_request_is_cut_off(proxy: Proxy, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), 20) as caller:
        caller.sendall(sent)
        try:
            answer = caller.recv(4096)
        except ConnectionResetError:
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408")


def test_a_body_beyond_the_limit_is_refused_before_it_is_sent(proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), 20) as caller:
        caller.sendall(
            b"POST /v1/act HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100000000\r\n\r\n"
        )
        assert caller.recv(4096).startswith(b"HTTP/1.1 413")


def test_tls_ends_here_and_a_handshake_that_never_ends_is_cut_off(proxy: Proxy) -> None:
    context = ssl.create_default_context(cafile=proxy.certificate)
    with httpx.Client(verify=context) as client:
        answer = client.get(f"{proxy.tls_url}/healthz")
        assert answer.status_code == 200
    with (
        socket.create_connection(("127.0.0.1", proxy.tls_port), 20) as caller,
        suppress(ConnectionResetError),
    ):
        assert caller.recv(4096) == b""


def test_one_server_with_tls_answers_no_frame_in_the_clear(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("closed")
    with (
        serving(settings="trusted_proxies=('127.0.0.1',)") as server,
        nginx_before(server.port, folder, closes_plain=True, upstream="upstream.one.conf") as proxy,
    ):
        server.wait_until_ready()
        with pytest.raises(AccessDeniedError, match="use https"), PolicyClient(proxy.url) as plain:
            plain.act(frame())
        assert httpx.get(f"{proxy.url}/readyz").status_code == 200
        settings = ClientSettings(tls=TlsFiles(proxy.certificate))
        with PolicyClient(proxy.tls_url, settings) as robot:
            assert robot.act(frame()).actions.shape == (1, 7)


def test_a_502_is_explained_and_tried_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with (
        nginx_before(port, tmp_path_factory.mktemp("down")) as proxy,
        PolicyClient(proxy.url) as robot,
        pytest.raises(NotReadyError) as failure,
    ):
        robot.act(frame())
    assert "proxy" in str(failure.value)
    assert "<html>" not in str(failure.value)
