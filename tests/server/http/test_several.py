"""Several observations in one message: answered as if each had come alone, and together."""

import json
from collections.abc import Iterator

import msgpack
import pytest
from fastapi.testclient import TestClient

from deft_client import PolicyClient, StreamClient
from deft_client.actions import ActionRules
from deft_client.errors import OverloadedError, RefusedRequestError
from deft_client.settings import ClientSettings
from deft_core.errors import UnusableValueError
from deft_core.types import ActionChunk, ActOptions
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_core.wire.images import ImageEncoding
from deft_core.wire.messages import ActMessage
from deft_server.app import create_app
from deft_server.settings import Settings
from tests.server.running import client_of, running
from tests.standins.policies import MSGPACK, FakePolicy, PickyPolicy, frame, packed

JSON = {"content-type": WireFormat.JSON.value}


@pytest.fixture
def policy() -> FakePolicy:
    return FakePolicy()


@pytest.fixture
def client(policy: FakePolicy) -> Iterator[TestClient]:
    with client_of(create_app(policy)) as client:
        yield client


def asked(count: int) -> list[ActMessage]:
    return [ActMessage(frame(), ActOptions(session_id=f"arm-{one}")) for one in range(count)]


def fields(**changes: object) -> dict[str, object]:
    """One observation as a map, with some fields changed; None takes a field out."""
    message: dict[str, object] = msgpack.unpackb(packed()) | changes
    return {name: value for name, value in message.items() if value is not None}


def post(client: TestClient, *observations: object) -> list[dict[str, object]]:
    body = msgpack.packb({"v": 1, "observations": list(observations)})
    response = client.post("/v1/act", content=body, headers=MSGPACK)
    assert response.status_code == 200, response.text
    answers: list[dict[str, object]] = msgpack.unpackb(response.content)["answers"]
    return answers


def test_each_of_several_observations_is_answered_in_its_own_session_and_place(client: TestClient):
    client.post("/v1/act", content=packed(ActOptions(session_id="arm-1")), headers=MSGPACK)
    body = codec.encode_requests(asked(3))
    answers = codec.decode_answers(client.post("/v1/act", content=body, headers=MSGPACK).content)
    counts = [one.actions[0, 0] for one in answers if isinstance(one, ActionChunk)]
    assert counts == [1, 2, 1]  # the fake counts the frames of a session


def test_several_observations_go_to_the_policy_together(client: TestClient, policy: FakePolicy):
    post(client, *(fields(session_id=f"arm-{one}") for one in range(8)))
    assert policy.sizes == [8]


def test_json_is_taken_and_answered_as_well(client: TestClient):
    one = json.loads(
        codec.encode_request(
            ActMessage(frame(), id="mine"), ImageEncoding.PNG, wire_format=WireFormat.JSON
        )
    )
    body = {"v": 1, "id": "all", "observations": [one, {**one, "statistics_key": "nope"}]}
    said = client.post("/v1/act", json=body).json()
    assert (said["v"], said["id"]) == (1, "all")
    good, bad = said["answers"]
    assert (good["id"], good["actions"]) == ("mine", [[1.0] * 7])
    assert (bad["status"], bad["field"]) == (422, "statistics_key")


BAD = (
    fields(instruction=None),
    fields(instruction=""),
    fields(statistics_key="nope"),
    fields(surprise=1),
    fields(image={"encoding": "png", "data": b"\x89PNG"}),
    "no map",
)


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_one_fails_alone_and_for_the_reason_it_has_alone(client: TestClient, bad: object):
    first, wrong, last = post(client, fields(session_id="a"), bad, fields(session_id="b"))
    assert first["actions"]
    assert last["actions"]
    alone = client.post("/v1/act", content=msgpack.packb(bad), headers=MSGPACK)
    expected = alone.json()
    assert alone.status_code == wrong["status"]
    assert {**wrong, "request_id": ""} == {**expected, "request_id": ""}


def test_one_of_several_observations_that_the_policy_refuses_fails_alone():
    with client_of(create_app(PickyPolicy())) as client:
        good, bad = post(client, fields(session_id="a"), fields(instruction="refuse"))
    assert good["actions"]
    assert (bad["status"], bad["field"]) == (422, "instruction")


def test_two_of_one_session_are_not_taken(client: TestClient):
    first, second = post(client, fields(session_id="a"), fields(session_id="a"))
    assert first["actions"]
    assert (second["status"], second["field"]) == (422, "session_id")


@pytest.mark.parametrize(
    ("message", "status", "field"),
    [
        ({"observations": []}, 422, "observations"),
        ({"observations": {"a": 1}}, 422, "observations"),
        ({"observations": [fields()] * 33}, 413, "observations"),
        ({"observations": [fields()], "deadline_ms": 5}, 400, "deadline_ms"),
        ({"v": 2, "observations": [fields()]}, 415, "v"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_whole(
    client: TestClient, policy: FakePolicy, message: object, status: int, field: str
):
    response = client.post("/v1/act", content=msgpack.packb(message), headers=MSGPACK)
    assert (response.status_code, response.json()["field"]) == (status, field)
    assert not policy.batches


def test_pictures_of_a_message_share_one_frames_pixels():
    settings = Settings(max_image_pixels=100)
    messages = [ActMessage(frame(8), ActOptions(session_id=name)) for name in "ab"]
    body = codec.encode_requests(messages, encoding=ImageEncoding.PNG)
    with client_of(create_app(FakePolicy(), settings)) as client:
        first, second = msgpack.unpackb(
            client.post("/v1/act", content=body, headers=MSGPACK).content
        )["answers"]
    assert first["actions"]
    assert (second["status"], second["field"]) == (413, "image")


def test_each_of_several_observations_counts_against_the_callers_rate():
    with client_of(create_app(FakePolicy(), Settings(rate_per_s=0.001))) as client:
        answers = post(client, *(fields(session_id=name) for name in "abcd"))
    assert ["actions" in one for one in answers] == [True, False, False, False]
    assert {one["status"] for one in answers[1:]} == {429}


def test_the_stream_takes_several_observations_and_repeats_the_id_of_the_message(
    client: TestClient,
):
    with client.websocket_connect("/v1/stream") as socket:
        socket.send_bytes(codec.encode_requests(asked(2), "m-1"))
        answer = socket.receive_bytes()
    assert codec.message_id(answer) == "m-1"
    assert len(codec.decode_answers(answer)) == 2


@pytest.mark.parametrize("kind", [PolicyClient, StreamClient])
def test_the_clients_ask_for_several_robots_by_session(kind: type[PolicyClient]):
    observations = {"left": frame(), "right": frame(instruction="refuse"), "third": frame()}
    with running(create_app(PickyPolicy())) as address, kind(f"http://{address}") as policy:
        for expected in (1, 2):
            answers = policy.act_all(observations)
            assert list(answers) == list(observations)
            assert isinstance(answers["right"], RefusedRequestError)
            for name in ("left", "third"):
                chunk = answers[name]
                assert isinstance(chunk, ActionChunk)
                assert chunk.actions[0, 0] == expected
                assert chunk.timings.round_trip_ms > 0
        policy.reset("left")
        again = policy.act_all(observations)
        assert isinstance(again["left"], ActionChunk)
        assert again["left"].actions[0, 0] == 1


def test_actions_beyond_the_robots_rules_are_an_error_in_their_place():
    rules = ActionRules(is_motion=(True,) * 7, low=(-1.5,) * 7, high=(1.5,) * 7)
    settings = ClientSettings(action_rules=rules)
    with (
        running(create_app(FakePolicy())) as address,
        PolicyClient(f"http://{address}", settings) as policy,
    ):
        policy.act(frame(), ActOptions(session_id="b"))  # the fake's next answer there is 2
        answers = policy.act_all({"a": frame(), "b": frame()})
    assert isinstance(answers["a"], ActionChunk)
    assert isinstance(answers["b"], UnusableValueError)


def test_frames_beyond_the_queue_are_told_to_come_back():
    settings = Settings(max_waiting=4, max_batch=2)
    with (
        running(create_app(FakePolicy(), settings)) as address,
        PolicyClient(f"http://{address}") as policy,
    ):
        answers = policy.act_all({f"arm-{one}": frame() for one in range(6)})
    kinds = [type(one) for one in answers.values()]
    assert kinds.count(ActionChunk) >= 3
    assert set(kinds) == {ActionChunk, OverloadedError}
