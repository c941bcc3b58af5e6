"""nginx with our files before a server: what the process leaves to the proxy is held by it."""

import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import httpx
import msgpack
import pytest
import websockets.sync.client
from websockets.exceptions import InvalidStatus

from deft_client.client import PolicyClient
from deft_client.errors import AccessDeniedError, NotReadyError
from deft_client.settings import ClientSettings, TlsFiles
from deft_core.wire import codec
from tests.server.nginx import NEEDS_NGINX, Proxy, nginx_before
from tests.server.process import serving
from tests.standins.policies import MSGPACK, frame, packed

NAME = "robots.example"
MAX_STREAMS = 3

pytestmark = NEEDS_NGINX


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    settings = (
        f"trusted_proxies=('127.0.0.1',), allowed_hosts=({NAME!r},), "
        f"max_connections_per_address={MAX_STREAMS}"
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


NUM_ROBOTS = 6
FRAMES = 40  # of each robot
ATTACKER = 99  # what its smuggled frame would be answered with
# Of each attacker: the head is to be read without its body. Attackers have addresses of their own,
# so that they take nothing of what nginx lets the robots send.
PAUSES_S = {"127.0.0.2": 0.0002, "127.0.0.3": 0.0005, "127.0.0.4": 0.001, "127.0.0.5": 0.002}


def act_request(frame_number: int, headers: str = "") -> tuple[bytes, bytes]:
    """The head and the body of a frame whose first pixel has that value."""
    body = packed(observation=frame(fill=frame_number))
    head = (
        f"POST /v1/act HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/msgpack\r\n"
        f"{headers}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode(), body


def smuggle(port: int, address: str, is_over: threading.Event) -> None:
    """Send requests whose bodies are requests, each a moment after its head, again and again."""
    smuggled = b"".join(act_request(ATTACKER))
    pause = threading.Event()
    head = (
        "POST /v1/act HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\nupgrade: foo\r\n"
        f"content-length: {len(smuggled)}\r\n\r\n"
    ).encode()
    while not is_over.is_set():
        with (
            socket.create_connection(("127.0.0.1", port), 20, (address, 0)) as caller,
            suppress(OSError),
        ):
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller.sendall(head)
            pause.wait(PAUSES_S[address])
            caller.sendall(smuggled)
            caller.recv(4096)


def answers_of(port: int, robot: int) -> list[float]:
    """What a robot that cannot tell an answer from another's is told about its frames.

    It says nothing of ids, as the clients of OpenVLA and VLA-0 do not.
    """
    body = packed(observation=frame(fill=robot))
    answers = []
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        for _ in range(FRAMES):
            response = client.post("/v1/act", content=body, headers=MSGPACK)
            assert response.status_code == 200
            answers.append(codec.decode_answer(response.content).actions[0, 0])
    return answers


@pytest.mark.parametrize("hands_on_upgrades", [False, True], ids=["ours", "careless"])
def test_every_robot_gets_its_own_frames_answer_beside_smuggled_requests(
    tmp_path_factory: pytest.TempPathFactory, hands_on_upgrades: bool
) -> None:
    """Once 60 of 220 answers were those of other robots' frames, with status 200.

    A proxy that hands on whatever clients offer leaves it all to the server.
    """
    settings = "trusted_proxies=('127.0.0.1',)"
    folder = tmp_path_factory.mktemp("smuggling")
    with (
        serving("EchoPolicy(takes_s=0.02)", settings) as server,
        nginx_before(server.port, folder, hands_on_upgrades=hands_on_upgrades) as proxy,
        ThreadPoolExecutor(NUM_ROBOTS + len(PAUSES_S)) as pool,
    ):
        server.wait_until_ready()
        is_over = threading.Event()
        attackers = [pool.submit(smuggle, proxy.port, address, is_over) for address in PAUSES_S]
        try:
            robots = [pool.submit(answers_of, proxy.port, number) for number in range(NUM_ROBOTS)]
            answers = [one.result() for one in robots]
        finally:
            is_over.set()
        for one in attackers:
            one.result()
    assert answers == [[float(number)] * FRAMES for number in range(NUM_ROBOTS)]


@pytest.mark.parametrize(
    ("offer", "handed_on"),
    [("foo", None), ("h2c", None), ("websocket, foo", None), ("WebSocket", "websocket")],
)
def test_no_offer_of_another_protocol_than_websocket_is_handed_on(
    tmp_path_factory: pytest.TempPathFactory, offer: str, handed_on: str | None
) -> None:
    head = f"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\nupgrade: {offer}\r\n\r\n"
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        nginx_before(server.getsockname()[1], tmp_path_factory.mktemp("offers")) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), 20) as caller,
    ):
        caller.sendall(head.encode())
        with server.accept()[0] as received:
            lines = received.recv(65536).decode().lower().splitlines()
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert headers.get("upgrade") == handed_on
    assert headers.get("connection") == (handed_on and "upgrade")
