"""GR00T's ZMQ clients: the messages, and a socket like theirs."""

import random
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import msgpack
import numpy as np
import pytest

from deft_client.errors import WireError
from deft_client.wire.fields import DEFAULT_LIMITS as LIMITS
from deft_server.app import create_app
from deft_server.compat.groot import GrootSocket, read_call, read_observations
from deft_server.settings import Settings
from tests.client.peers.mutations import mutate
from tests.server.compat.fakes import ThreeDatasets
from tests.server.compat.groot_messages import FLAT, FRAME, OBSERVATION, packed
from tests.server.running import running

zmq = pytest.importorskip("zmq")


def revive(entries: dict[str, Any]) -> Any:
    return np.load(BytesIO(entries["as_npy"])) if "as_npy" in entries else entries


def test_a_batch_of_robots_becomes_one_observation_each() -> None:
    call = read_call(
        packed("get_action", data={"observation": OBSERVATION, "options": None}), LIMITS
    )
    first, second = (one.observation for one in read_observations(call.data, LIMITS))
    assert (first.instruction, second.instruction) == ("lift", "push")
    np.testing.assert_array_equal(second.image, FRAME[1, 0])
    assert first.cameras["wrist"].shape == (4, 6, 3)
    assert first.state is not None
    assert first.state.tolist() == [0] * 7 + [1]


def test_the_flat_form_of_older_versions_is_read_too() -> None:
    (message,) = read_observations(read_call(packed("get_action", data=FLAT), LIMITS).data, LIMITS)
    assert message.observation.instruction == "lift"
    np.testing.assert_array_equal(message.observation.image, FRAME[0, 0])


def claims(shape: str, descr: str = "'<f8'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY\x09\x00",
        claims("(1099511627776,)") + b"x" * 8,
        claims("(2, 2") + b"x" * 8,
        claims("(1,)", "'|O'") + b"x" * 8,
        claims("(1,)", "[('a', '<f8')]") + b"x" * 8,
        claims("__import__('os')") + b"x" * 8,
        claims("(-1,)") + b"x" * 8,
    ],
)
def test_npy_files_that_lie_are_refused(data: bytes) -> None:
    frame = msgpack.packb(
        {"endpoint": "x", "data": {"a": {"__ndarray_class__": True, "as_npy": data}}}
    )
    with pytest.raises(WireError):
        read_call(frame, LIMITS)


def test_a_damaged_message_is_read_or_refused_and_nothing_else() -> None:
    rng = random.Random(11)
    originals = [packed("get_action", data=one) for one in ({"observation": OBSERVATION}, FLAT)]
    refused = 0
    for _ in range(400):
        try:
            read_observations(read_call(mutate(rng.choice(originals), rng), LIMITS).data, LIMITS)
        except WireError:
            refused += 1
    assert refused > 200


@pytest.fixture
def policy() -> ThreeDatasets:
    return ThreeDatasets(default_key="bridge", steps=2)


@pytest.fixture
def settings() -> Settings:
    return Settings(groot_port=0)


@pytest.fixture
def ask(policy: ThreeDatasets, settings: Settings) -> Iterator[Callable[..., Any]]:
    """A client such as GR00T's: a request socket."""
    app = create_app(policy, settings)
    with running(app), zmq.Context() as context:
        client = context.socket(zmq.REQ)
        client.setsockopt(zmq.RCVTIMEO, 10_000)
        client.setsockopt(zmq.LINGER, 0)
        (port,) = (one.port for one in app.companions if isinstance(one, GrootSocket))
        client.connect(f"tcp://127.0.0.1:{port}")

        def ask(endpoint: str, **fields: object) -> Any:
            client.send(packed(endpoint, **fields) if endpoint else b"nonsense")
            return msgpack.unpackb(client.recv(), object_hook=revive)

        yield ask
        client.close()


def test_the_socket_answers_every_endpoint_but_kill(
    ask: Callable[..., Any], policy: ThreeDatasets
) -> None:
    assert ask("ping") == {"status": "ok", "message": "Server is running"}
    actions, info = ask("get_action", data={"observation": OBSERVATION, "options": None})
    assert info == {}
    assert actions["x"].shape == (2, 2, 1)
    assert actions["x"][0, 0, 0] == policy.actions["bridge"][0]
    assert set(np.unique(actions["gripper"])) <= {-1.0, 1.0}
    assert policy.num_sessions == 2
    assert ask("reset") == {}
    ask("get_action", data=FLAT)
    assert policy.num_sessions == 3
    config = ask("get_modality_config")
    assert config["action"]["as_json"]["modality_keys"][-1] == "gripper"
    assert "not offered" in ask("kill")["error"]
    assert ask("ping")["status"] == "ok"


def test_an_error_is_a_reply_and_the_socket_goes_on(ask: Callable[..., Any]) -> None:
    assert "video" in ask("get_action", data={"observation": {"language": {}}})["error"]
    failing = {**FLAT, "annotation.human.action.task_description": ["fail"]}
    told = ask("get_action", data=failing)["error"]
    assert "ValueError" in told
    assert "deliberate" not in told
    assert ask("ping")["status"] == "ok"


def test_keys_are_asked_for_where_there_are_any(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[arm]\nkey = "a-key-of-some-robot-arm"\n')
    app = create_app(ThreeDatasets(default_key="bridge"), Settings(keys_file=keys))
    socket = GrootSocket(app.service, 0)
    answer = {}
    for token in ("wrong", "a-key-of-some-robot-arm"):
        coroutine = socket.answer(packed("ping", api_token=token), "groot-1")
        with pytest.raises(StopIteration) as done:
            coroutine.send(None)
        answer[token] = msgpack.unpackb(done.value.value)
    assert answer["wrong"] == {"error": "Unauthorized: Invalid API token"}
    assert answer["a-key-of-some-robot-arm"]["status"] == "ok"


@pytest.mark.parametrize("settings", [Settings(groot_port=0, rate_per_s=0.001)])
@pytest.mark.parametrize("first", ["get_action", ""], ids=["a frame", "nonsense"])
def test_the_rate_of_frames_is_limited_and_nonsense_counts(
    ask: Callable[..., Any], first: str
) -> None:
    ask(first, data=FLAT)
    assert "0.001 frames per second" in ask("get_action", data=FLAT)["error"]
    assert ask("ping")["status"] == "ok"


@pytest.mark.parametrize("settings", [Settings(groot_port=0, max_total_bytes=200)])
def test_requests_count_among_the_bytes_that_all_may_hold(ask: Callable[..., Any]) -> None:
    for _ in range(3):  # what is refused is let go of
        assert "too many bytes" in ask("get_action", data=FLAT)["error"]
        assert ask("ping")["status"] == "ok"
