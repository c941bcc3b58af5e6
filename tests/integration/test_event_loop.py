"""The event loop never touches a tensor, so it never waits for a device.

It serves all sockets. On a GPU, reading one number waits until all queued passes have run.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from torch.overrides import TorchFunctionMode

from deft_core.recordings import find_episodes
from deft_core.types import ActOptions
from deft_core.wire import codec
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.formats import Precision
from deft_server.app import create_app
from deft_server.settings import Settings
from tests.golden import TINY_OPENVLA
from tests.recorded_episodes import read_episode
from tests.server.running import client_of
from tests.standins.policies import MSGPACK, frame, packed


class Touches(TorchFunctionMode):
    """Notes everything that the thread which enters it does with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(getattr(func, "__name__", repr(func)))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def policy() -> VlaPolicy:
    return load_policy(
        ModelOptions(
            checkpoint=str(TINY_OPENVLA),
            statistics_key="libero_spatial",
            device="cpu",
            precision=Precision.FLOAT32,
            num_threads=1,
        )
    )


@pytest.fixture
def client(policy: VlaPolicy, tmp_path: Path) -> Iterator[TestClient]:
    with client_of(create_app(policy, Settings(record=tmp_path, record_min_free_bytes=0))) as one:
        yield one


def on_the_loop(client: TestClient, call: Callable[..., object], *arguments: object) -> None:
    assert client.portal is not None
    client.portal.call(call, *arguments)


def act(client: TestClient, decoding: str, want_trace: bool) -> None:
    options = ActOptions(session_id="arm", decoding=decoding, want_trace=want_trace)
    answer = client.post("/v1/act", content=packed(options, frame(28)), headers=MSGPACK)
    assert answer.status_code == 200, answer.text
    trace = codec.decode_answer(answer.content).trace
    assert (trace is not None) == want_trace


@contextmanager
def watched(client: TestClient) -> Iterator[Touches]:
    """What the event loop does with tensors meanwhile."""
    touches = Touches()
    on_the_loop(client, touches.__enter__)
    try:
        yield touches
    finally:
        on_the_loop(client, touches.__exit__, None, None, None)


def act_by_every_way(client: TestClient, want_trace: bool) -> None:
    for decoding in ("autoregressive", "lossless:plan=memory", "deft"):
        for _ in range(2):
            act(client, decoding, want_trace)


@pytest.mark.parametrize("want_trace", [False, True], ids=["no-trace", "trace"])
def test_no_answer_makes_the_event_loop_touch_a_tensor(
    client: TestClient, want_trace: bool
) -> None:
    client.post("/v1/admin/recording", json={"on": False})
    with watched(client) as touches:
        act_by_every_way(client, want_trace)
        page = client.get("/metrics").text
    assert "deft_passes_count 6.0" in page  # counting comes after answering
    assert touches.seen == []


def test_recording_does_not_make_the_event_loop_touch_a_tensor(
    client: TestClient, tmp_path: Path
) -> None:
    with watched(client) as touches:
        act_by_every_way(client, False)
        client.post("/v1/admin/recording", json={"on": False})  # writes what waits
    (episode,) = find_episodes(tmp_path)
    traces = [step.chunk.trace for step in read_episode(episode).steps]
    assert [trace is not None and trace.num_passes > 0 for trace in traces] == [True] * 6
    assert touches.seen == []


def test_an_open_dashboard_does_not_make_the_event_loop_touch_a_tensor(client: TestClient) -> None:
    client.post("/v1/admin/recording", json={"on": False})
    with client.websocket_connect("/dashboard/feed") as feed:
        feed.send_text("{}")
        feed.receive_text()  # from now on it listens
        with watched(client) as touches:
            act_by_every_way(client, False)
            while (json.loads(feed.receive_text()).get("watched") or {}).get("trace") is None:
                pass
    assert touches.seen == []


def test_what_the_event_loop_does_with_tensors_would_be_seen(client: TestClient) -> None:
    touches = Touches()
    on_the_loop(client, touches.__enter__)
    on_the_loop(client, torch.zeros(2).tolist)
    on_the_loop(client, touches.__exit__, None, None, None)
    assert touches.seen == ["tolist"]
