"""VLA-0's clients get what VLA-0's server would answer, but for its mistakes."""

import base64
import json
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.typing import NDArray

from deft_core.peers.arrays import pack, unpack
from deft_policies.base import ActionLimits, Running
from deft_policies.errors import DeviceError
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from deft_server.app import create_app
from deft_server.settings import Settings
from tests.golden_vla0 import GOLDEN, cameras, variant
from tests.server.running import client_of, running
from tests.standins.peers import npy
from tests.standins.policies import PATIENCE_S, FakePolicy, GatedPolicy, RowByRowPolicy

OPTIONS = ModelOptions(checkpoint=str(GOLDEN / "untied"), precision=Precision.FLOAT32)
FRAMES = [one for one in variant("untied")["cases"] if one["valid"]]


def asked(frame: dict[str, Any]) -> dict[str, Any]:
    pictures = [npy(one) for one in cameras(frame)]
    return {"base64_rgb": pictures, "state": [0.0] * 6, "instr": frame["instruction"]}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(create_app(load_policy(OPTIONS))) as client:
        yield client


def test_the_plain_endpoint_answers_a_bare_list_of_rows(client: TestClient) -> None:
    for frame in FRAMES[:2]:
        response = client.post("/predict_base64", json=asked(frame))
        assert response.status_code == 200, response.text
        assert response.json() == frame["actions"]


def test_the_stream_has_the_rows_of_the_plain_endpoint(client: TestClient) -> None:
    response = client.post("/predict_base64_stream", json=asked(FRAMES[0]))
    *rows, end = (json.loads(line) for line in response.text.splitlines())
    assert rows == [{"index": at, "value": [row]} for at, row in enumerate(FRAMES[0]["actions"])]
    assert list(end) == ["time_taken"]


def test_clients_of_vla0_ask_whether_the_server_is_there(client: TestClient) -> None:
    for path in ("/", "/health"):
        assert client.get(path).json() == {"status": "ok"}


def test_the_gripper_is_not_turned_around_for_clients_of_other_peers(client: TestClient) -> None:
    """What VLA-0 was taught closes at +1 already; OpenVLA's opens at 1."""
    image, wrist = cameras(FRAMES[0])
    images = {"observation/image": image, "observation/wrist_image": wrist}
    with client.websocket_connect("/") as socket:
        socket.receive_bytes()
        socket.send_bytes(pack({**images, "prompt": FRAMES[0]["instruction"]}))
        answer = unpack(socket.receive_bytes())
    assert isinstance(answer, dict)
    assert answer["actions"].tolist() == FRAMES[0]["actions"]


def test_an_answer_without_an_action_is_a_problem() -> None:
    with client_of(create_app(load_policy(replace(OPTIONS, max_tokens=20)))) as client:
        for path in ("/predict_base64", "/predict_base64_stream"):
            response = client.post(path, json=asked(FRAMES[0]))
            assert response.status_code == 500
            assert response.json()["type"].endswith("no_action")


def test_a_stream_of_an_answer_that_does_not_end_has_its_rows_and_why() -> None:
    with client_of(create_app(load_policy(replace(OPTIONS, max_tokens=80)))) as client:
        response = client.post("/predict_base64_stream", json=asked(FRAMES[0]))
    *rows, end = (json.loads(line) for line in response.text.splitlines())
    assert [one["value"][0] for one in rows] == FRAMES[0]["actions"][: len(rows)]
    assert 1 < len(rows) < 7
    assert end["error"]["type"].endswith("no_action")


@contextmanager
def row_by_row(instruction: str) -> Iterator[tuple[Iterator[Any], threading.Semaphore]]:
    """Lines of a stream, as they come, and what lets the policy commit the next row."""
    turnstile = threading.Semaphore(1)
    picture = npy(np.zeros((4, 4, 3), np.uint8))
    body = {"base64_rgb": [picture], "state": [0.0] * 6, "instr": instruction}
    with running(create_app(RowByRowPolicy(turnstile=turnstile))) as address:
        url = f"http://{address}/predict_base64_stream"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
            assert response.status_code == 200
            yield map(json.loads, response.iter_lines()), turnstile


def test_a_row_leaves_before_the_next_one_is_committed() -> None:
    with row_by_row("8 rows") as (lines, turnstile):
        for at in range(8):
            assert next(lines) == {"index": at, "value": [[at] * 7]}
            turnstile.release()
        assert list(next(lines)) == ["time_taken"]
        assert list(lines) == []


def test_a_stream_whose_answer_turns_out_invalid_breaks_off() -> None:
    """The client of the original skips what has no value, and raises where the body has no end."""
    with row_by_row("8 rows and a problem") as (lines, turnstile):
        turnstile.release(7)
        for at in range(8):
            assert next(lines)["index"] == at
        assert next(lines)["error"]["type"].endswith("no_action")
        with pytest.raises(httpx.RemoteProtocolError):
            next(lines)


def test_rows_beyond_the_statistics_do_not_leave() -> None:
    class Unsafe(RowByRowPolicy):
        def action_limits(self, statistics_key: str | None) -> ActionLimits:
            return ActionLimits(np.zeros(7), np.full(7, 2.5))

    with client_of(create_app(Unsafe())) as client:
        picture = npy(np.zeros((4, 4, 3), np.uint8))
        body = {"base64_rgb": [picture], "state": [0.0] * 6, "instr": "8 rows"}
        response = client.post("/predict_base64_stream", json=body)
    *rows, end = map(json.loads, response.text.splitlines())
    assert [one["index"] for one in rows] == [0, 1, 2]
    assert end["error"]["type"].endswith("unsafe-answer")


@dataclass(eq=False)
class Forgetful(RowByRowPolicy):
    """Loses all that is on its way once, in the fifth round; what it answers then is `again`."""

    again: float = 0.0  # higher in every number than before
    num_rows: int = 8  # then

    def step(self, first: Collection[Running] = ()) -> list[Running]:
        if len(self.rounds) == 4:
            self.rounds.append([])
            self.left.clear()
            raise DeviceError("no memory")
        return super().step(first)

    def rows(self, running: Running, left: int) -> NDArray[np.float64]:
        rows = super().rows(running, left)
        return rows[: self.num_rows] + self.again if len(self.rounds) > 4 else rows


def streamed(policy: RowByRowPolicy) -> tuple[list[Any], Any]:
    """The rows of a stream, and its last line."""
    with client_of(create_app(policy)) as client:
        body = {
            "base64_rgb": [npy(np.zeros((4, 4, 3), np.uint8))],
            "state": [0.0] * 6,
            "instr": "8 rows",
        }
        response = client.post("/predict_base64_stream", json=body)
    *rows, end = map(json.loads, response.text.splitlines())
    return rows, end


def test_a_stream_goes_on_where_its_answer_is_begun_anew_and_is_the_same() -> None:
    rows, end = streamed(Forgetful())
    assert rows == [{"index": at, "value": [[at] * 7]} for at in range(8)]
    assert list(end) == ["time_taken"]


@pytest.mark.parametrize("another", [{"again": 0.1}, {"num_rows": 3}], ids=["other", "fewer"])
def test_a_stream_never_holds_rows_of_two_answers(another: dict[str, Any]) -> None:
    """Once it held four of one and four of the other, with status 200."""
    rows, end = streamed(Forgetful(**another))
    assert rows == [{"index": at, "value": [[at] * 7]} for at in range(4)]
    assert end["error"]["type"].endswith("policy-failed")
    assert "rows already sent" in end["error"]["detail"]


@pytest.mark.parametrize("path", ["/predict_base64", "/predict_base64_stream"])
def test_robots_behind_one_address_are_answered_in_turn(path: str) -> None:
    """Once the newest frame of an address took the place of those that waited: 409."""
    policy = GatedPolicy()
    body = {
        "base64_rgb": [npy(np.zeros((4, 4, 3), np.uint8))],
        "state": [0.0] * 6,
        "instr": "stack",
    }
    app = create_app(policy, Settings(max_batch=1))
    with running(app) as address, ThreadPoolExecutor(6) as robots:
        asked = [
            robots.submit(httpx.post, f"http://{address}{path}", json=body, timeout=PATIENCE_S)
            for _ in range(6)
        ]
        while len(app.service.scheduler.queue) < 5 and not any(one.done() for one in asked):
            time.sleep(0.001)
        policy.gate.set()
        assert [one.result().status_code for one in asked] == [200] * 6


def test_a_robot_alone_keeps_its_memory_from_frame_to_frame() -> None:
    body = {
        "base64_rgb": [npy(np.zeros((4, 4, 3), np.uint8))],
        "state": [0.0] * 6,
        "instr": "stack",
    }
    with client_of(create_app(FakePolicy())) as client:
        answers = [client.post("/predict_base64", json=body).json()[0][0] for _ in range(3)]
    assert answers == [1, 2, 3]


HUGE = BytesIO()
np.lib.format.write_array_header_1_0(
    HUGE, {"descr": "|u1", "fortran_order": False, "shape": (1 << 20, 1 << 20, 3)}
)


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"instr": None}, 422, "instr"),
        ({"instr": 7}, 422, "instr"),
        ({"state": None}, 422, "state"),
        ({"base64_rgb": []}, 422, "base64_rgb"),
        ({"base64_rgb": "text"}, 422, "base64_rgb"),
        ({"base64_rgb": ["?"]}, 400, "base64_rgb[0]"),
        ({"base64_rgb": [base64.b64encode(b"\x89PNG").decode()]}, 400, "base64_rgb[0]"),
        ({"base64_rgb": [npy(np.array([{}]), allow_pickle=True)]}, 422, "base64_rgb[0]"),
        ({"base64_rgb": [npy(np.zeros((4, 4, 3)))]}, 422, "base64_rgb[0]"),
        ({"base64_rgb": [npy(np.zeros((0, 4, 3), np.uint8))]}, 422, "base64_rgb[0]"),
        ({"base64_rgb": [base64.b64encode(HUGE.getvalue()).decode()]}, 422, "base64_rgb[0]"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    client: TestClient, change: dict[str, Any], status: int, field: str
) -> None:
    response = client.post("/predict_base64", json={**asked(FRAMES[0]), **change})
    assert (response.status_code, response.json()["field"]) == (status, field), response.text


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", msgpack.packb({})])
def test_other_bodies_are_refused(client: TestClient, body: bytes) -> None:
    assert client.post("/predict_base64", content=body).status_code == 400
