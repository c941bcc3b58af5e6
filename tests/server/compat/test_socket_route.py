"""The WebSocket at / serves openpi's and vla-eval's clients."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import CLOSING, OPEN
from websockets.sync.client import connect
from websockets.uri import parse_uri

from deft_core.peers.arrays import pack, unpack
from deft_core.peers.conventions import OPENPI
from deft_policies.constant import ConstantPolicy
from deft_server.app import DeftApp
from deft_server.compat.socket_route import PLAN_LASTS_S, ActionPlan, greeting
from deft_server.compat.vla_eval import Message, MessageType, read_message
from deft_server.http.connections import build_websocket_protocol
from deft_server.settings import Settings
from tests.core.peers.captures import frame
from tests.server.running import client_of, running
from tests.standins.peers import ThreeDatasets, build_app

PICTURE = np.zeros((8, 8, 3), np.uint8)
PONG = b"\x8a"  # the first byte of one
OBSERVATION = pack({"observation/image": PICTURE, "prompt": "x"})


def vla_observation(seq: int, **extra: object) -> bytes:
    payload = {"images": {"agentview": PICTURE}, "task_description": "x", **extra}
    return Message(MessageType.OBSERVATION, payload, seq, 0.0).encode()


def receive(socket: WebSocketTestSession) -> dict[str, object]:
    value = unpack(socket.receive_bytes())
    assert isinstance(value, dict)
    return value


def of_one_task(name: str) -> bytes:
    """A captured observation, with the instruction that all of an episode have."""
    entries = msgpack.unpackb(frame(f"vlaeval_{name}.bin"))
    entries["payload"]["task_description"] = "x"
    return bytes(msgpack.packb(entries))


@pytest.fixture
def policy() -> ThreeDatasets:
    return ThreeDatasets(default_key="bridge", steps=2)


@pytest.fixture
def client(policy: ThreeDatasets) -> Iterator[TestClient]:
    with client_of(build_app(policy)) as client:
        yield client


def test_the_first_frame_is_metadata_and_a_hello_at_once(client: TestClient) -> None:
    with client.websocket_connect("/") as socket:
        metadata = receive(socket)
    assert metadata["action_dim"] == 7
    assert metadata["action_horizon"] == 2
    hello = read_message(metadata)
    captured = read_message(unpack(frame("vlaeval_01_hello_server.bin")))
    assert hello.type is MessageType.HELLO
    assert set(hello.payload) >= set(captured.payload)
    assert hello.payload["action_spec"] == captured.payload["action_spec"]


def test_openpi_results_have_the_fields_of_the_captured_ones(
    client: TestClient, policy: ThreeDatasets
) -> None:
    with client.websocket_connect("/") as socket:
        receive(socket)
        for sent, replied in (("1_observation", "2_result"), ("3_observation_dtypes", "4_result")):
            socket.send_bytes(frame(f"openpi_{sent}.bin"))
            result = receive(socket)
            captured = unpack(frame(f"openpi_{replied}.bin"))
            assert isinstance(captured, dict)
            # Ours has no state: OpenVLA does not compute one to hand back.
            assert set(result) == set(captured) - {"state"}
            expected = np.stack([policy.actions["bridge"], policy.actions["bridge"] + 0.001])
            np.testing.assert_array_equal(result["actions"], OPENPI.from_policy(expected))
    assert result["server_timing"].keys() == {"infer_ms", "prev_total_ms"}  # type: ignore[attr-defined]


def test_the_gripper_is_closed_with_plus_one() -> None:
    actions = np.zeros((3, 7))
    actions[:, -1] = [0.0, 0.49, 0.996]
    assert OPENPI.from_policy(actions)[:, -1].tolist() == [1.0, 1.0, -1.0]
    assert actions[0, -1] == 0.0


def test_an_openpi_error_is_a_text_frame_and_close_code_1011(client: TestClient) -> None:
    with client.websocket_connect("/") as socket:
        receive(socket)
        socket.send_bytes(frame("openpi_5_observation_failing.bin"))
        assert "prompt" in socket.receive_text()
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_bytes()
    assert closed.value.code == 1011


def test_a_policy_that_raises_tells_the_client_no_traceback(client: TestClient) -> None:
    with client.websocket_connect("/") as socket:
        receive(socket)
        socket.send_bytes(pack({"observation/image": PICTURE, "prompt": "fail"}))
        told = socket.receive_text()
    assert "ValueError" in told
    assert "deliberate" not in told
    assert "Traceback" not in told


@pytest.mark.parametrize("bad", [b"\xc1", b"", msgpack.packb([1]), msgpack.packb({"prompt": "x"})])
def test_a_frame_that_cannot_be_read_ends_the_connection_with_its_reason(
    client: TestClient, bad: bytes
) -> None:
    with client.websocket_connect("/") as socket:
        receive(socket)
        socket.send_bytes(bad)
        assert socket.receive_text()
        with pytest.raises(WebSocketDisconnect):
            socket.receive_bytes()
    assert client.get("/healthz").status_code == 200


def test_a_text_frame_is_refused(client: TestClient) -> None:
    with client.websocket_connect("/") as socket:
        receive(socket)
        socket.send_text("hello")
        assert "binary" in socket.receive_text()


@pytest.mark.parametrize("path", ["/", "/v1/realtime/robot/openpi"])
@pytest.mark.parametrize("endpoint", [np.zeros(3), ["reset"], {}, 7, "step"])
def test_an_endpoint_that_is_none_is_refused_in_words(
    client: TestClient, path: str, endpoint: object
) -> None:
    with client.websocket_connect(path) as socket:
        socket.receive_bytes()
        socket.send_bytes(pack({"endpoint": endpoint, "prompt": "lift the cup"}))
        answer = socket.receive()
    assert "must be infer or reset" in str(answer)


def test_a_reset_ends_the_session(client: TestClient, policy: ThreeDatasets) -> None:
    with client.websocket_connect("/") as socket:
        receive(socket)
        for _ in range(2):
            socket.send_bytes(OBSERVATION)
            receive(socket)
        assert policy.num_sessions == 1
        socket.send_bytes(msgpack.packb({"endpoint": "reset"}))
        assert receive(socket) == {"status": "reset successful"}
        socket.send_bytes(OBSERVATION)
        receive(socket)
    assert policy.num_sessions == 2


def test_the_address_chooses_the_statistics_key(client: TestClient, policy: ThreeDatasets) -> None:
    with client.websocket_connect("/?statistics_key=libero_spatial") as socket:
        receive(socket)
        socket.send_bytes(OBSERVATION)
        actions = receive(socket)["actions"]
        assert isinstance(actions, np.ndarray)
        np.testing.assert_array_equal(actions[0, :6], policy.actions["libero_spatial"][:6])


def test_vla_eval_gets_one_action_per_observation_under_its_number(
    client: TestClient, policy: ThreeDatasets
) -> None:
    with client.websocket_connect("/") as socket:
        receive(socket)
        socket.send_bytes(frame("vlaeval_00_hello_client.bin"))
        socket.send_bytes(frame("vlaeval_02_episode_start.bin"))
        for name, seq in (("03_observation_png", 3), ("05_observation_raw", 4)):
            captured = read_message(unpack(frame(f"vlaeval_{name}.bin")))
            assert captured.seq == seq
            socket.send_bytes(of_one_task(name))
            answer = read_message(receive(socket))
            assert answer.type is MessageType.ACTION
            assert answer.seq == seq
            action = answer.payload["actions"]
            assert isinstance(action, np.ndarray)
            assert action.shape == (7,)
            assert action[-1] in (-1.0, 1.0)
        # Two actions of one chunk: the policy was asked once.
        assert len(policy.seen) == 1
        socket.send_bytes(frame("vlaeval_07_observation_jpeg.bin"))
        assert read_message(receive(socket)).seq == 5
        assert len(policy.seen) == 2


def test_an_episode_start_drops_the_plan_and_opens_a_session(
    client: TestClient, policy: ThreeDatasets
) -> None:
    with client.websocket_connect("/") as socket:
        receive(socket)
        for _ in range(2):
            socket.send_bytes(frame("vlaeval_02_episode_start.bin"))
            socket.send_bytes(vla_observation(7))
            receive(socket)
    assert len(policy.seen) == 2
    assert policy.num_sessions == 2


def test_another_instruction_drops_the_plan(client: TestClient, policy: ThreeDatasets) -> None:
    with client.websocket_connect("/") as socket:
        receive(socket)
        for seq, instruction in enumerate(("open it", "close it", "close it", "open it")):
            socket.send_bytes(vla_observation(seq, task_description=instruction))
            receive(socket)
    assert [one.instruction for one in policy.seen] == ["open it", "close it", "open it"]


def test_a_plan_does_not_outlast_a_long_pause() -> None:
    plan = ActionPlan()
    message = read_message(unpack(vla_observation(1)))
    assert plan.next_action(message, 0.0) is None
    plan.follow(np.zeros((3, 7)))
    assert plan.next_action(message, PLAN_LASTS_S) is not None
    assert plan.next_action(message, 2.1 * PLAN_LASTS_S) is None


def test_vla_evals_benchmarks_are_asked_for_what_its_own_servers_ask_for() -> None:
    def asked(**changes: object) -> dict[str, object]:
        info = replace(ConstantPolicy().info, **changes)  # type: ignore[arg-type]
        hello = read_message(unpack(greeting(info, "session", "1")))
        specification = hello.payload["observation_spec"]
        assert isinstance(specification, dict)
        return {"params": hello.payload["observation_params"], "specified": set(specification)}

    assert asked() == {"params": {"seed": 0}, "specified": {"language"}}
    oft = {"env_seed": 0, "quat_no_antipodal": True}
    assert asked(chunk_length=8) == {"params": oft, "specified": {"language"}}
    assert asked(chunk_length=8, num_pictures=2, state_dim=8) == {
        "params": {**oft, "send_wrist_image": True, "send_state": True},
        "specified": {"language", "state"},
    }


@contextmanager
def within_bounds(app: DeftApp, ping_s: float) -> Iterator[str]:
    """Serve an app through our own WebSocket protocol; yields `127.0.0.1:PORT`."""
    with running(app, ping_s, build_websocket_protocol(app.service.bounds)) as address:
        yield address


def pings_to(address: str, sent: list[bytes], for_s: float) -> int:
    """Send frames as a client that never answers a ping; return how many pings came."""
    stream = ClientProtocol(parse_uri(f"ws://{address}/"))
    host, port = address.split(":")
    with closing(socket.create_connection((host, int(port)))) as raw:
        raw.settimeout(0.05)
        stream.send_request(stream.connect())
        until_s, events = time.monotonic() + for_s, list[object]()
        while time.monotonic() < until_s:
            if stream.state is OPEN and sent:
                stream.send_binary(sent.pop(0))
            with suppress(TimeoutError):
                raw.sendall(b"".join(one for one in stream.data_to_send() if one[:1] != PONG))
                received = raw.recv(65_536)
                assert received, "the server ended it"
                stream.receive_data(received)
            events += stream.events_received()
            assert stream.state is not CLOSING, "the server ended it"
    return sum(isinstance(one, Frame) and one.opcode is Opcode.PING for one in events)


def test_a_vla_eval_client_may_be_silent_for_as_long_as_it_likes(policy: ThreeDatasets) -> None:
    with within_bounds(build_app(policy), ping_s=1.0) as address:
        hello = frame("vlaeval_00_hello_client.bin")
        assert pings_to(address, [hello, vla_observation(1)], for_s=2.5) == 0
        with pytest.raises(AssertionError, match="the server ended it"):  # as openpi's would be
            pings_to(address, [OBSERVATION], for_s=60)


def test_a_vla_eval_error_keeps_the_connection(client: TestClient) -> None:
    with client.websocket_connect("/") as socket:
        receive(socket)
        socket.send_bytes(frame("vlaeval_09_observation_failing.bin"))
        error = read_message(receive(socket))
        assert error.type is MessageType.ERROR
        assert error.seq == 6
        assert "observation_failed" in str(error.payload["error"])
        socket.send_bytes(vla_observation(8))
        assert read_message(receive(socket)).type is MessageType.ACTION


def test_both_clients_may_come_before_the_policy_is_loaded() -> None:
    gate = threading.Event()

    def load() -> ThreeDatasets:
        gate.wait(120)
        return ThreeDatasets()

    with client_of(build_app(load)) as client, client.websocket_connect("/") as socket:  # type: ignore[arg-type]
        gate.set()
        assert receive(socket)["policy"] == "three-datasets"


def test_a_client_that_leaves_while_it_waits_frees_its_place(policy: ThreeDatasets) -> None:
    gate = policy.gate = threading.Event()
    app = build_app(policy, Settings(max_batch=1))
    with running(app) as address, connect(f"ws://{address}/") as busy:
        with connect(f"ws://{address}/") as leaving:
            for number, socket in enumerate((busy, leaving), 1):
                socket.recv()
                socket.send(OBSERVATION)
                until(lambda wanted=number: len(app.service.sessions) == wanted)
        until(lambda: len(app.service.sessions) == 1)
        gate.set()
        assert isinstance(busy.recv(), bytes)
    assert len(policy.seen) == 1


def test_a_slow_policy_does_not_cost_the_connection(policy: ThreeDatasets) -> None:
    """openpi's own server blocks its event loop, so that pings go unanswered and clients drop."""
    gate = policy.gate = threading.Event()
    with (
        running(build_app(policy)) as address,
        connect(f"ws://{address}/", ping_interval=None) as socket,
    ):
        socket.recv()
        socket.send(OBSERVATION)
        pongs = [socket.ping() for _ in range(3)]
        assert all(pong.wait(60) for pong in pongs)
        assert not gate.is_set()
        gate.set()
        assert isinstance(socket.recv(), bytes)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")


def test_the_socket_asks_for_a_key_although_the_page_at_its_address_is_open(
    policy: ThreeDatasets, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[arm]\nkey = "a-key-of-some-robot-arm"\n')
    with client_of(build_app(policy, Settings(keys_file=keys))) as client:
        assert (
            client.get("/", headers={"accept": "text/html"}, follow_redirects=False).status_code
            == 307
        )
        with pytest.raises(WebSocketDenialResponse), client.websocket_connect("/"):
            pass
        known = {"authorization": "Bearer a-key-of-some-robot-arm"}
        with client.websocket_connect("/", headers=known) as socket:
            assert socket.receive_bytes()


REALTIME = "/v1/realtime/robot/openpi"


def older_form(array: np.ndarray) -> dict[object, object]:
    """An array as the package msgpack-numpy sends it."""
    return {
        b"nd": True,
        b"type": array.dtype.str,
        b"kind": b"",
        b"shape": array.shape,
        b"data": array.tobytes(),
    }


def test_vllm_omnis_clients_get_bare_arrays(client: TestClient, policy: ThreeDatasets) -> None:
    with client.websocket_connect(REALTIME) as stream:
        metadata = receive(stream)
        assert (metadata["action_dim"], metadata["action_horizon"]) == (7, 2)
        assert metadata["image_resolution"] == [
            policy.info.image_height,
            policy.info.image_width,
        ]
        assert metadata["needs_wrist_camera"] is False
        for images in (
            {"images": {"front": PICTURE}},
            {"observation/image": PICTURE},
            {"images": {"front": older_form(PICTURE)}},
        ):
            stream.send_bytes(pack({**images, "prompt": "x", "session_id": "s"}))
            actions = unpack(stream.receive_bytes())
            assert isinstance(actions, np.ndarray)
            assert (actions.dtype, actions.shape) == (np.float32, (2, 7))
    expected = np.stack([policy.actions["bridge"], policy.actions["bridge"] + 0.001])
    np.testing.assert_array_equal(actions, OPENPI.from_policy(expected).astype(np.float32))
    assert policy.num_sessions == 1


def test_another_session_or_a_reset_starts_an_episode_there(
    client: TestClient, policy: ThreeDatasets
) -> None:
    with client.websocket_connect(REALTIME) as stream:
        receive(stream)
        for session in ("a", "a", "b"):
            stream.send_bytes(
                pack({"images": {"front": PICTURE}, "prompt": "x", "session_id": session})
            )
            unpack(stream.receive_bytes())
        assert policy.num_sessions == 2
        stream.send_bytes(pack({"endpoint": "reset", "session_id": "b"}))
        assert receive(stream) == {"status": "reset successful"}
        stream.send_bytes(pack({"observation/image": PICTURE, "prompt": "x", "session_id": "b"}))
        unpack(stream.receive_bytes())
    assert policy.num_sessions == 3


@pytest.mark.parametrize(
    "bad",
    [
        b"\xc1",
        pack([1]),
        pack({"prompt": "x"}),
        pack({"endpoint": "kill"}),
        pack({"observation/image": PICTURE, "prompt": "fail"}),
        pack({"observation/image": PICTURE, "prompt": "x", "session_id": 7}),
    ],
)
def test_an_error_there_is_a_message_and_the_connection_goes_on(
    client: TestClient, bad: bytes
) -> None:
    with client.websocket_connect(REALTIME) as stream:
        receive(stream)
        stream.send_bytes(bad)
        error = receive(stream)
        assert error["type"] == "error"
        assert error["message"]
        assert "deliberate" not in str(error)
        stream.send_bytes(OBSERVATION)
        assert isinstance(unpack(stream.receive_bytes()), np.ndarray)
