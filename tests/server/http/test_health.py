"""Alive, ready, measured."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fastapi.testclient import TestClient

from deft_core.types import ActOptions
from deft_policies.errors import CheckpointError
from deft_server.app import create_app
from deft_server.serving.lifecycle import ServerPhase
from deft_server.settings import Settings
from tests.server.running import client_of
from tests.standins.policies import (
    MSGPACK,
    PATIENCE_S,
    FakePolicy,
    GatedPolicy,
    LimitedFake,
    RaisingPolicy,
    dislikes,
    fails_times,
    frame,
    packed,
)


def until(condition: object) -> None:
    """Wait for a condition that another thread brings about."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():  # type: ignore[operator]
            return
        pause.wait(0.005)
    raise AssertionError("it never happened")


def test_health_answers_while_the_policy_is_busy():
    policy = GatedPolicy()
    with client_of(create_app(policy)) as client, ThreadPoolExecutor() as pool:
        slow = pool.submit(client.post, "/v1/act", content=packed(), headers=MSGPACK)
        assert policy.entered.wait(PATIENCE_S)
        assert client.get("/healthz").text == "OK\n"
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/readyz").status_code == 200
        policy.gate.set()
        assert slow.result(PATIENCE_S).status_code == 200


def test_the_server_is_alive_but_not_ready_while_the_policy_loads():
    gate = threading.Event()

    def load() -> FakePolicy:
        assert gate.wait(PATIENCE_S)
        return FakePolicy()

    with client_of(create_app(load)) as client:
        assert client.get("/healthz").status_code == 200
        for response in (
            client.get("/readyz"),
            client.get("/v1/info"),
            client.post("/v1/act", content=packed(), headers=MSGPACK),
        ):
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert "loading" in response.json()["detail"]
        gate.set()
        until(lambda: client.get("/readyz").status_code == 200)
        assert client.post("/v1/act", content=packed(), headers=MSGPACK).status_code == 200


class ColdPolicy(FakePolicy):
    is_warm = False

    def warm_up(self) -> None:
        self.is_warm = True

    def act(self, batch):
        assert self.is_warm
        return super().act(batch)


def test_no_frame_reaches_a_policy_before_it_is_warm():
    with client_of(create_app(ColdPolicy())) as client:
        assert client.post("/v1/act", content=packed(), headers=MSGPACK).status_code == 200


def test_a_policy_that_cannot_be_loaded_is_reported_by_readyz():
    def load() -> FakePolicy:
        raise CheckpointError("model-00002-of-00003.safetensors is missing")

    app = create_app(load)
    given_up: list[ServerPhase] = []
    app.service.scheduler.on_fatal = given_up.append
    with client_of(app) as client:
        until(lambda: given_up)
        response = client.get("/readyz")
        assert response.status_code == 503
        assert "model-00002-of-00003.safetensors is missing" in response.json()["detail"]
        assert client.get("/healthz").status_code == 200
    assert given_up == [ServerPhase.BROKEN]


def test_a_policy_that_always_fails_makes_the_server_unready():
    policy = RaisingPolicy(error=fails_times(3, ValueError("broken")))
    settings = Settings(unready_after_failures=3)
    with client_of(create_app(policy, settings)) as client:
        for _ in range(3):
            assert client.get("/readyz").status_code == 200
            failed = client.post("/v1/act", content=packed(), headers=MSGPACK)
            assert failed.status_code == 500
        assert client.get("/readyz").status_code == 503
        assert client.post("/v1/act", content=packed(), headers=MSGPACK).status_code == 200
        assert client.get("/readyz").status_code == 200


def test_unsafe_answers_make_the_server_unready_until_one_is_safe():
    """Once a policy whose every answer was NaN was ready for as long as it was served."""
    policy = LimitedFake()
    settings = Settings(unready_after_failures=3)
    body = packed(ActOptions(session_id="arm"))

    def act() -> int:
        return client.post("/v1/act", content=body, headers=MSGPACK).status_code

    with client_of(create_app(policy, settings)) as client:
        policy.next_actions = np.full((1, 7), np.nan)
        for _ in range(3):
            assert client.get("/readyz").status_code == 200
            assert act() == 500
        refusal = client.get("/readyz")
        assert refusal.status_code == 503
        assert "3 answers were unsafe" in refusal.json()["detail"]
        assert client.get("/healthz").status_code == 200
        policy.next_actions = np.zeros((1, 7))
        assert act() == 200
        assert client.get("/readyz").status_code == 200


def test_an_error_of_the_server_carries_an_id_that_the_log_carries_too(
    caplog: pytest.LogCaptureFixture,
):
    policy = RaisingPolicy(error=dislikes("break", ValueError("the real reason")))
    with client_of(create_app(policy)) as client:
        body = packed(observation=frame(instruction="break"))
        problem = client.post("/v1/act", content=body, headers=MSGPACK).json()
    assert problem["status"] == 500
    assert "the real reason" not in str(problem)
    about_it = [one for one in caplog.records if problem["request_id"] in one.getMessage()]
    assert about_it
    assert "the real reason" in caplog.text


def metric(client: TestClient, name: str) -> float:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def test_what_happens_is_counted():
    with client_of(create_app(FakePolicy())) as client:
        for _ in range(2):
            body = packed(ActOptions(session_id="a"))
            client.post("/v1/act", content=body, headers=MSGPACK)
        client.post("/v1/act", content=b"", headers=MSGPACK)
        client.get("/nowhere/in/particular")
        assert metric(client, 'deft_requests_total{route="/v1/act",status="200"}') == 2
        assert metric(client, 'deft_requests_total{route="/v1/act",status="400"}') == 1
        assert metric(client, 'deft_requests_total{route="unknown",status="404"}') == 1
        assert metric(client, "deft_batch_size_count") == 2
        assert metric(client, "deft_act_seconds_count") == 2
        assert metric(client, "deft_sessions") == 1
        assert metric(client, "deft_ready") == 1
        assert metric(client, "process_resident_memory_bytes") > 0


def test_two_apps_do_not_share_their_metrics():
    with client_of(create_app(FakePolicy())) as one, client_of(create_app(FakePolicy())) as two:
        one.post("/v1/act", content=packed(), headers=MSGPACK)
        assert metric(one, "deft_act_seconds_count") == 1
        assert metric(two, "deft_act_seconds_count") == 0
