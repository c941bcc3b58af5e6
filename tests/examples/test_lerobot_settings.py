"""The settings of the LeRobot policy, over as much of LeRobot as they need."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from deft_client import ActionChunk, ActOptions, Observation
from tests.repository import ROOT
from tests.server.certificates import make_certificate, needs_openssl


class MadeUpConfig:
    image_features = {"observation.images.image": None}

    @staticmethod
    def register_subclass(name: str) -> object:
        return lambda cls: cls


class MadeUpPolicy(torch.nn.Module):
    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config


@pytest.fixture
def modeling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the policy, imported beside a LeRobot that is made up."""
    modules = {
        name: ModuleType(name) for name in ("lerobot", "lerobot.configs", "lerobot.policies")
    }
    configs, policies = ModuleType("policies"), ModuleType("pretrained")
    configs.PreTrainedConfig = MadeUpConfig  # type: ignore[attr-defined]
    policies.PreTrainedPolicy = MadeUpPolicy  # type: ignore[attr-defined]
    modules |= {"lerobot.configs.policies": configs, "lerobot.policies.pretrained": policies}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(ROOT / "examples/lerobot_policy_deft")
    for name in [one for one in sys.modules if one.startswith("lerobot_policy_deft")]:
        monkeypatch.delitem(sys.modules, name)
    import lerobot_policy_deft.modeling_deft as found

    return found


class FakeClient:
    def __init__(self) -> None:
        self.asked: list[ActOptions] = []

    def act(self, observation: Observation, options: ActOptions) -> ActionChunk:
        self.asked.append(options)
        return ActionChunk(np.zeros((1, 7)))


def test_every_question_has_a_deadline(modeling: ModuleType) -> None:
    """LeRobot's loop stands still while it waits."""
    policy = modeling.DeftPolicy(modeling.DeftConfig(deadline_ms=250.0))
    policy.client = FakeClient()
    policy.select_action({"observation.images.image": torch.zeros(1, 3, 8, 8), "task": "lift it"})
    assert [one.deadline_ms for one in policy.client.asked] == [250.0]


@needs_openssl
def test_the_authority_of_the_server_can_be_named(modeling: ModuleType, tmp_path: Path) -> None:
    authority, _ = make_certificate(tmp_path)
    config = modeling.DeftConfig(url="https://127.0.0.1:8000", ca_file=str(authority))
    assert modeling.DeftPolicy(config).client.settings.tls.ca_file == authority
