"""POST /v1/act with a policy that has no model."""

import numpy as np
from fastapi.testclient import TestClient

from deft_client import wire
from deft_client.types import Observation
from deft_policies.constant import ConstantPolicy
from deft_server.app import create_app

LIFT = wire.ActMessage(Observation(np.zeros((4, 4, 3), np.uint8), "lift the cup"))
MSGPACK = {"content-type": wire.CONTENT_TYPE}


def test_act_returns_the_policys_actions():
    actions = np.full((1, 7), 0.5)
    with TestClient(create_app(ConstantPolicy(actions))) as client:
        response = client.post("/v1/act", content=wire.encode_request(LIFT), headers=MSGPACK)
    np.testing.assert_array_equal(wire.decode_answer(response.content).actions, actions)
