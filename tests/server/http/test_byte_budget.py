"""What a caller sent, and the pictures in it, count until it has its answer, by every protocol."""

import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
import websockets.sync.client
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed

from deft_core.peers.arrays import pack
from deft_core.peers.openvla import encode_array
from deft_server.app import DeftApp, create_app
from deft_server.compat.socket_route import REALTIME_PATH
from deft_server.compat.vla_eval import Message, MessageType
from deft_server.http import watches
from deft_server.http.connections import build_websocket_protocol
from deft_server.settings import Settings
from tests.server.running import running
from tests.standins.peers import npy
from tests.standins.policies import MSGPACK, PATIENCE_S, FakePolicy, GatedPolicy

ROBOT = "127.0.0.2"  # another address of this machine
Picture = NDArray[np.uint8] | bytes  # pixels, or a file


def png(side: int) -> bytes:
    """A file of so many black pixels a side; a few bytes."""
    rows = zlib.compress(bytes(side * (1 + (side + 7) // 8)))
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)), (b"IDAT", rows))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*chunks, (b"IEND", b""), strict=True)))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def damaged(side: int) -> bytes:
    """A file that says how large it is, and nothing else."""
    return png(side)[:33]


def in_peers_words(picture: Picture) -> object:
    is_file = isinstance(picture, bytes)
    return {"__image__": True, "format": "png", "data": picture} if is_file else picture


def ours(picture: Picture, **more: Picture) -> bytes:
    def in_our_words(one: Picture) -> object:
        if isinstance(one, bytes):
            return {"encoding": "png", "data": one}
        return {"encoding": "raw", "dtype": "uint8", "shape": one.shape, "data": one.tobytes()}

    fields = {"v": 1, "instruction": "x", "image": in_our_words(picture)}
    cameras = {name: in_our_words(one) for name, one in more.items()}
    return bytes(msgpack.packb({**fields, "cameras": cameras or None}))


def several(picture: Picture, **more: Picture) -> bytes:
    """The same frame in three observations of one session: one is answered, two are refused."""
    one = {**msgpack.unpackb(ours(picture, **more)), "session_id": "a"}
    return bytes(msgpack.packb({"v": 1, "observations": [one] * 3}))


def openpi(picture: Picture, **more: Picture) -> bytes:
    cameras = {f"observation/{name}_image": in_peers_words(one) for name, one in more.items()}
    return pack({"observation/image": in_peers_words(picture), **cameras, "prompt": "x"})


def vla_eval(picture: Picture, **more: Picture) -> bytes:
    images = {name: in_peers_words(one) for name, one in {"agentview": picture, **more}.items()}
    payload = {"images": images, "task_description": "x"}
    return Message(MessageType.OBSERVATION, payload, 0, 0.0).encode()


def openvla(picture: NDArray[np.uint8]) -> bytes:
    return json.dumps({"image": encode_array(picture), "instruction": "x"}).encode()


def vla0(picture: NDArray[np.uint8]) -> bytes:
    body = {"base64_rgb": [npy(picture)], "state": [0.0] * 6, "instr": "x"}
    return json.dumps(body).encode()


@dataclass(frozen=True)
class Protocol:
    path: str
    write: Callable[..., bytes]
    greets: bool = False  # before it is asked
    content_type: str = ""  # of HTTP

    def ask(self, address: str, message: bytes, source: str = "127.0.0.1") -> bytes:
        """What a caller is told: the answer, or why there is none."""
        if self.content_type:
            transport = httpx.HTTPTransport(local_address=source)
            with httpx.Client(transport=transport, timeout=PATIENCE_S) as client:
                headers = {"content-type": self.content_type}
                url = f"http://{address}{self.path}"
                response = client.post(url, content=message, headers=headers)
                return response.headers.get("x-deft-reason", "").encode() + response.content
        connecting = websockets.sync.client.connect(
            f"ws://{address}{self.path}", compression=None, source_address=(source, 0)
        )
        with connecting as socket:
            if self.greets:
                socket.recv(PATIENCE_S)
            try:
                socket.send(message)
                told = socket.recv(PATIENCE_S)
            except ConnectionClosed as closed:
                return str(closed).encode()
            return told if isinstance(told, bytes) else told.encode()


JSON = "application/json"
PROTOCOLS = {
    "act": Protocol("/v1/act", ours, content_type=MSGPACK["content-type"]),
    "stream": Protocol("/v1/stream", ours),
    "several": Protocol("/v1/stream", several),
    "openpi": Protocol("/", openpi, greets=True),
    "vla-eval": Protocol("/", vla_eval, greets=True),
    "realtime": Protocol(REALTIME_PATH, openpi, greets=True),
    "openvla": Protocol("/act", openvla, content_type=JSON),
    "vla0": Protocol("/predict_base64", vla0, content_type=JSON),
    "vla0 rows": Protocol("/predict_base64_stream", vla0, content_type=JSON),
}
OF_FILES = ("act", "stream", "several", "openpi", "vla-eval", "realtime")
OF_MANY = ("act", "stream", "openpi", "vla-eval", "realtime", "openvla")  # without a session


def is_answer(told: bytes) -> bool:
    marks = (b"action", b"ndarray", b"__numpy__", b"[[")
    return any(mark in told for mark in marks) and b"too many bytes" not in told


@contextmanager
def served(app: DeftApp) -> Iterator[str]:
    with running(app, websockets=build_websocket_protocol(app.service.bounds)) as address:
        yield address


@pytest.fixture
def policy() -> Iterator[GatedPolicy]:
    policy = GatedPolicy()
    yield policy
    policy.gate.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture(autouse=True)
def watched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is watched for hang-ups is asked for the next message: the one in hand counts on."""
    monkeypatch.setattr(watches, "WATCH_AFTER_S", 0.0)


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("never came true")


def settled(app: DeftApp) -> int:
    """The bytes in hand once whoever is in hand was watched for a while."""
    threading.Event().wait(0.05)
    return app.service.bounds.budget.now


def holds(app: DeftApp, num_bytes: int) -> bool:
    return settled(app) == num_bytes


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_a_message_counts_until_its_answer_has_left(
    protocol: Protocol, policy: GatedPolicy, pool: ThreadPoolExecutor
):
    message = protocol.write(np.zeros((100, 100, 3), np.uint8))
    app = create_app(policy)
    with served(app) as address:
        answer = pool.submit(protocol.ask, address, message)
        assert policy.entered.wait(PATIENCE_S)
        assert settled(app) >= len(message)
        policy.gate.set()
        assert is_answer(answer.result(PATIENCE_S))
        until(lambda: app.service.bounds.budget.now == 0)


@pytest.mark.parametrize("name", OF_MANY)
def test_a_caller_holds_no_more_than_all_may_together_and_nobody_else_is_refused(
    name: str, policy: GatedPolicy, pool: ThreadPoolExecutor
):
    """Once 250 sockets of one address held 531 MB against a limit of 32."""
    protocol = PROTOCOLS[name]
    message = protocol.write(np.zeros((100, 100, 3), np.uint8))
    app = create_app(policy, Settings(max_total_bytes=int(3.5 * len(message))))
    budget = app.service.bounds.budget
    asked: list[Future[bytes]] = []
    with served(app) as address:
        for number in range(1, 4):
            asked.append(pool.submit(protocol.ask, address, message))
            until(partial(holds, app, number * len(message)))
        refused = [protocol.ask(address, message) for _ in range(5)]
        small = ours(np.zeros((4, 4, 3), np.uint8))
        robot = pool.submit(PROTOCOLS["act"].ask, address, small, ROBOT)
        until(lambda: len(budget.by_owner) == 2)
        policy.gate.set()
        assert is_answer(robot.result(PATIENCE_S))
        assert all(b"too many bytes" in told for told in refused)
        assert all(is_answer(one.result(PATIENCE_S)) for one in asked)


@pytest.mark.parametrize(
    ("name", "picture"),
    [
        *((name, png(500)) for name in OF_FILES),
        ("openvla", np.zeros((500, 500, 1), np.uint8)),
        ("vla0", np.zeros((500, 500, 1), np.uint8)),
    ],
)
def test_what_a_picture_takes_when_it_is_decoded_counts_too(
    name: str, picture: Picture, policy: GatedPolicy, pool: ThreadPoolExecutor
):
    protocol = PROTOCOLS[name]
    message = protocol.write(picture)
    app = create_app(policy)
    with served(app) as address:
        answer = pool.submit(protocol.ask, address, message)
        assert policy.entered.wait(PATIENCE_S)
        assert settled(app) >= len(message) + 3 * 500 * 500
        policy.gate.set()
        assert is_answer(answer.result(PATIENCE_S))
        until(lambda: app.service.bounds.budget.now == 0)


@pytest.mark.parametrize("name", OF_FILES)
def test_a_picture_for_which_there_is_no_room_is_not_decoded(name: str):
    """If it were, it would be damaged."""
    protocol = PROTOCOLS[name]
    with served(create_app(FakePolicy(), Settings(max_total_bytes=100_000))) as address:
        assert b"too many bytes" in protocol.ask(address, protocol.write(damaged(500)))


@pytest.mark.parametrize("name", OF_FILES)
def test_the_pictures_of_a_message_have_no_more_pixels_than_one_may_have(name: str):
    """Once 50 pictures of 590 bytes each took 605 MB."""
    protocol = PROTOCOLS[name]
    side = 96
    settings = Settings(max_image_pixels=4 * side**2)
    with served(create_app(FakePolicy(), settings)) as address:
        told = protocol.ask(address, protocol.write(png(side), wrist=png(2 * side)))
        assert b"pictures have" in told
        assert b"pixels" in told
        told = protocol.ask(address, protocol.write(png(side // 2), wrist=png(side // 2)))
        assert is_answer(told)


@pytest.mark.parametrize("name", ["openpi", "vla-eval", "realtime"])
def test_a_picture_is_decoded_only_where_a_camera_is_read(name: str):
    protocol = PROTOCOLS[name]
    fields: dict[Any, Any] = msgpack.unpackb(protocol.write(png(64)))
    unread = {"__image__": True, "format": "png", "data": damaged(64)}
    fields.get("payload", fields)["unread"] = [unread, {"deeper": unread}]
    with served(create_app(FakePolicy())) as address:
        assert is_answer(protocol.ask(address, bytes(msgpack.packb(fields))))


@pytest.mark.parametrize("name", ["openpi", "vla-eval", "realtime", "openvla", "vla0"])
def test_a_message_counts_while_its_caller_waits_for_its_rate(name: str, pool: ThreadPoolExecutor):
    """Its clients know no "try again", so that they wait; once with 600 messages of 16 MB."""
    protocol = PROTOCOLS[name]
    message = protocol.write(np.zeros((100, 100, 3), np.uint8))
    app = create_app(FakePolicy(), Settings(rate_per_s=0.5))
    with served(app) as address:
        assert is_answer(protocol.ask(address, message))
        until(lambda: app.service.bounds.budget.now == 0)
        waiting = pool.submit(protocol.ask, address, message)
        until(lambda: app.service.bounds.budget.now > 0)
        assert settled(app) >= len(message)
        assert is_answer(waiting.result(PATIENCE_S))
        until(lambda: app.service.bounds.budget.now == 0)


def test_a_caller_that_hangs_up_holds_nothing_any_more(policy: GatedPolicy):
    message = openpi(np.zeros((100, 100, 3), np.uint8))
    app = create_app(policy)
    with served(app) as address:
        with websockets.sync.client.connect(
            f"ws://{address}/", compression=None, close_timeout=0.1
        ) as socket:
            socket.recv(PATIENCE_S)
            for _ in range(3):  # one in hand, one received early, one that waits
                socket.send(message)
            until(lambda: settled(app) >= 3 * len(message))
        policy.gate.set()
        until(lambda: app.service.bounds.budget.now == 0)
