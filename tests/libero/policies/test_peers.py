import base64
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import httpx
import msgpack
import numpy as np
import pytest
from websockets.sync.server import ServerConnection, serve

from deft_client.errors import AnswerTimeoutError, NotReadyError, ServerUnreachableError
from deft_client.settings import ClientSettings, Timeouts
from deft_core.errors import DeftError, MessageTooLargeError
from deft_core.peers.openvla import encode_array, oft_fields, openvla_fields
from deft_core.types import Observation, ServerInfo
from deft_core.wire.limits import WireLimits
from deft_libero.errors import PeerAnswerError, SelectionError
from deft_libero.policies.peers import OpenPiPolicy, OpenVlaPolicy
from deft_libero.policies.source import PROFILES, ProfilePolicy, check_chain, resize_with_pad
from tests.client.hostile_servers import dripping, holding_up
from tests.standins.environments import EchoPolicy
from tests.standins.policy_server import ScriptedPool

ACTION = np.array([0.1, -0.2, 0.3, 0.0, 0.5, -0.6, 0.996])
Handler = Callable[[dict[str, object]], httpx.Response]


def _observation() -> Observation:
    rng = np.random.default_rng(0)
    image, wrist = rng.integers(0, 256, (2, 256, 256, 3), dtype=np.uint8)
    state = np.arange(8, dtype=np.float32)
    return Observation(image, "lift the cup", cameras={"wrist": wrist}, state=state)


def _transport(answer: object, bodies: list[dict[str, object]]) -> ScriptedPool:
    def handle(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/act")
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=answer)

    return ScriptedPool(handle)


def _array(value: object) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    assert isinstance(value, dict)
    raw = base64.b64decode(value["__numpy__"])
    return np.frombuffer(raw, dtype=value["dtype"]).reshape(value["shape"])


def test_openvla_gets_image_instruction_and_statistics_key() -> None:
    bodies: list[dict[str, object]] = []
    policy = OpenVlaPolicy(
        "http://peer",
        partial(openvla_fields, statistics_key="libero_object"),
        transport=_transport("error", bodies),
    )
    with pytest.raises(PeerAnswerError):
        policy.act(_observation())
    assert set(bodies[0]) == {"image", "instruction", "unnorm_key"}
    assert bodies[0]["instruction"] == "lift the cup"
    assert np.array_equal(_array(bodies[0]["image"]), _observation().image)
    assert bodies[0]["image"]["dtype"] == "|u1"  # type: ignore[index]


def test_openvla_answers_with_one_bare_array() -> None:
    policy = OpenVlaPolicy(
        "http://peer", openvla_fields, transport=_transport(encode_array(ACTION), [])
    )
    chunk = policy.act(_observation())
    assert chunk.actions.tolist() == [ACTION.tolist()]
    assert chunk.timings.round_trip_ms > 0


def test_oft_gets_both_cameras_and_the_state_and_answers_with_a_list() -> None:
    bodies: list[dict[str, object]] = []
    chunk = [encode_array(ACTION), encode_array(ACTION + 1)]
    policy = OpenVlaPolicy("http://peer", oft_fields, transport=_transport(chunk, bodies))
    actions = policy.act(_observation()).actions
    assert list(bodies[0]) == ["full_image", "wrist_image", "state", "instruction"]
    assert _array(bodies[0]["state"]).tolist() == list(range(8))
    assert np.array_equal(actions, np.stack([ACTION, ACTION + 1]))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("error", "keeps the reason"),
        ({"action": [1, 2]}, "expected an action"),
        ([0.0] * 7, "expected an action"),
        (encode_array(np.array([np.nan] * 7)), "finite numbers"),
        (encode_array(ACTION) | {"dtype": "|O"}, "expected an action"),
        (encode_array(ACTION) | {"shape": [2**40]}, "expected an action"),
        (encode_array(ACTION) | {"__numpy__": "?"}, "expected an action"),
    ],
)
def test_what_is_no_action_is_an_error(answer: object, expected: str) -> None:
    policy = OpenVlaPolicy("http://peer", openvla_fields, transport=_transport(answer, []))
    with pytest.raises(PeerAnswerError, match=expected):
        policy.act(_observation())


def test_a_status_of_a_peer_is_an_error_of_its_own() -> None:
    transport = ScriptedPool(lambda request: httpx.Response(503, text="warming up"))
    with pytest.raises(NotReadyError, match="warming up"):
        OpenVlaPolicy("http://peer", openvla_fields, transport=transport).act(_observation())


def test_a_peer_that_is_not_there_is_unreachable() -> None:
    with pytest.raises(ServerUnreachableError, match="server running"):
        OpenVlaPolicy("http://127.0.0.1:9", openvla_fields).act(_observation())
    with pytest.raises(ServerUnreachableError, match="server running"):
        OpenPiPolicy("http://127.0.0.1:9").act(_observation())


def test_an_openvla_server_that_drips_its_answer_is_given_up_in_time() -> None:
    """A timeout of 2 s took 12 s."""
    hasty = ClientSettings(timeouts=Timeouts(answer_s=0.5))
    with holding_up(dripping) as server:
        with pytest.raises(AnswerTimeoutError):
            OpenVlaPolicy(server.url, openvla_fields, settings=hasty).act(_observation())
        assert not server.let_go.is_set()


def test_an_openvla_answer_is_neither_inflated_nor_read_without_end() -> None:
    """0.4 MB of gzip became 790 MB."""
    answer = gzip.compress(json.dumps(encode_array(ACTION)).encode())
    packed = {"content-encoding": "gzip", "content-type": "application/json"}

    def bomb(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers=packed, stream=httpx.ByteStream(answer))

    with pytest.raises(PeerAnswerError, match="expected an action"):
        OpenVlaPolicy("http://peer", openvla_fields, transport=ScriptedPool(bomb)).act(
            _observation()
        )
    little = ClientSettings(limits=WireLimits(max_bytes=100))
    transport = ScriptedPool(lambda request: httpx.Response(200, content=b" " * 101))
    with pytest.raises(MessageTooLargeError):
        OpenVlaPolicy("http://peer", openvla_fields, settings=little, transport=transport).act(
            _observation()
        )


def test_an_openpi_answer_beyond_the_limit_is_refused() -> None:
    little = ClientSettings(limits=WireLimits(max_bytes=100))
    with _openpi_server(lambda fields: bytes(101)) as url:
        policy = OpenPiPolicy(url, little)
        with pytest.raises(ServerUnreachableError):
            policy.act(_observation())
        policy.close()


@contextmanager
def _openpi_server(reply: Callable[[dict[str, object]], bytes | str | None]) -> Iterator[str]:
    def handle(connection: ServerConnection) -> None:
        connection.send(msgpack.packb({}))
        for frame in connection:
            answer = reply(msgpack.unpackb(frame))
            if answer is not None:
                connection.send(answer)
            if isinstance(answer, str):
                connection.close(1011)

    with serve(handle, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def _openpi_array(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> dict[bytes, object]:
    return {
        b"__ndarray__": True,
        b"data": array.tobytes(),
        b"dtype": array.dtype.str,
        b"shape": array.shape,
    }


def test_openpi_gets_its_own_names_and_answers_with_a_chunk() -> None:
    seen: list[dict[str, object]] = []

    def reply(fields: dict[str, object]) -> bytes:
        seen.append(fields)
        actions = np.stack([ACTION] * 10).astype(np.float32)
        timing = {"infer_ms": 31.5}
        answer = {"actions": _openpi_array(actions), "server_timing": timing}
        return bytes(msgpack.packb(answer))

    with _openpi_server(reply) as url:
        policy = OpenPiPolicy(url)
        chunk = policy.act(_observation())
        policy.close()
    assert set(seen[0]) == {
        "observation/image", "observation/wrist_image", "observation/state", "prompt",
    }  # fmt: skip
    assert seen[0]["observation/state"][b"dtype"] == "<f4"  # type: ignore[index]
    assert chunk.actions.shape == (10, 7)
    assert chunk.timings.total_ms == 31.5


def test_openpi_says_what_went_wrong_and_is_called_again() -> None:
    answers: list[bytes | str] = [
        "Traceback: no such camera",
        bytes(msgpack.packb({"actions": _openpi_array(ACTION[None])})),
    ]
    with _openpi_server(lambda fields: answers.pop(0)) as url:
        policy = OpenPiPolicy(url)
        with pytest.raises(PeerAnswerError, match="no such camera"):
            policy.act(_observation())
        assert policy.act(_observation()).actions.shape == (1, 7)
        policy.close()


def test_openpi_that_stays_silent_is_a_timeout() -> None:
    with _openpi_server(lambda fields: None) as url:
        policy = OpenPiPolicy(url, ClientSettings(timeouts=Timeouts(answer_s=0.5)))
        with pytest.raises(AnswerTimeoutError):
            policy.act(_observation())


@pytest.mark.parametrize(
    "answer",
    [b"\xc1", msgpack.packb({"actions": 7}), msgpack.packb({"actions": {b"__ndarray__": True}})],
)
def test_openpi_answers_that_are_no_actions_are_errors(answer: bytes) -> None:
    with _openpi_server(lambda fields: answer) as url:
        policy = OpenPiPolicy(url)
        with pytest.raises(DeftError):
            policy.act(_observation())
        policy.close()


def test_the_gripper_is_turned_from_the_datasets_dialect_into_robosuites() -> None:
    answered = EchoPolicy()
    policy = ProfilePolicy(answered, PROFILES["deft"])
    assert policy.act(_observation()).actions[0, 6] == 1.0  # 0 in the data set: closed
    bare = ProfilePolicy(answered, PROFILES["openpi"])
    assert bare.act(_observation()).actions[0, 6] == 0.0


def test_frames_leave_as_the_profile_says() -> None:
    answered = EchoPolicy()
    for name in ("deft", "oft", "openvla", "openpi"):
        ProfilePolicy(answered, PROFILES[name]).act(_observation())
    untouched, also_untouched, chained, padded = (one.image for one in answered.seen)
    assert np.array_equal(untouched, _observation().image)
    assert np.array_equal(also_untouched, _observation().image)
    assert chained.shape == padded.shape == (224, 224, 3)
    assert not np.array_equal(chained, padded)


def test_padding_keeps_the_aspect_ratio() -> None:
    wide = np.full((50, 100, 3), 200, dtype=np.uint8)
    padded = resize_with_pad(wide, 224)
    rows = padded.max(axis=(1, 2))
    assert rows[:56].max() == rows[168:].max() == 0
    assert (padded[56:168] == 200).all()


def _info(image_chain: str) -> ServerInfo:
    return ServerInfo(
        "openvla", 7, 1, ("libero_object",), None, 224, 224, image_chain, ("none", "libero"),
        "lossless", ("lossless",),
    )  # fmt: skip


def test_no_frame_goes_through_an_image_chain_twice() -> None:
    check_chain(PROFILES["deft"], _info("libero"))
    check_chain(PROFILES["openvla"], _info("none"))
    check_chain(PROFILES["openvla"], None)
    with pytest.raises(SelectionError, match="--image-chain none"):
        check_chain(PROFILES["openvla"], _info("libero"))


def test_an_answer_for_another_robot_is_an_error() -> None:
    answered = encode_array(np.zeros(14))
    peer = OpenVlaPolicy("http://peer", openvla_fields, transport=_transport(answered, []))
    with pytest.raises(PeerAnswerError, match="takes 7"):
        ProfilePolicy(peer, PROFILES["oft"]).act(_observation())
