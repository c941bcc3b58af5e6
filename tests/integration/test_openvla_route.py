"""A model's answers over the peer's protocol, byte for byte what the peer's own server sent.

The captures were taken from OpenVLA's `deploy.py` around the same checkpoint, in float32.
"""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from deft_server.app import create_app
from tests.core.peers.captures import act_capture, act_captures
from tests.golden import TINY_OPENVLA
from tests.server.running import client_of

pytestmark = pytest.mark.promise

MODEL_CASES = ["plain_extra_key", "encoded"]  # the pictures that are ours to keep


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    options = ModelOptions(
        checkpoint=str(TINY_OPENVLA), device="cpu", precision=Precision.FLOAT32, num_threads=1
    )
    with client_of(create_app(load_policy(options))) as client:
        yield client


@pytest.mark.parametrize(
    "name", MODEL_CASES + [one.name for one in act_captures() if one.name.startswith("error_")]
)
def test_the_reply_is_the_peers_to_the_byte(client: TestClient, name: str) -> None:
    capture = act_capture(name)
    headers = {"content-type": "application/json"}
    response = client.post("/act", content=capture.request, headers=headers)
    assert response.status_code == capture.status
    assert response.content == capture.response
