"""LeRobot gets its actions from a Deft server through the policy package of the examples."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from deft_core.datasets.lerobot_export import write_lerobot
from deft_core.types import ActionChunk, Observation
from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_policies.constant import ConstantPolicy
from deft_server.app import create_app
from tests.core.datasets.test_lerobot import episodes
from tests.peer_environment import LEROBOT_MARKS, LEROBOT_PARAMETERS, lerobot_python
from tests.repository import ROOT
from tests.server.running import running

pytestmark = LEROBOT_MARKS
PROGRAM = Path(__file__).with_name("lerobot_drives.py")


class Watching(ConstantPolicy):
    """Answers with the mean of what it sees, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Observation] = []

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        self.seen += [one.observation for one in batch]
        means = [one.observation.image.mean() / 255 for one in batch]
        chunks = [ActionChunk(np.full((1, 7), mean)) for mean in means]
        return [PolicyAnswer(chunk, one.memory) for chunk, one in zip(chunks, batch, strict=True)]


@pytest.mark.timeout(600)  # installing takes a minute or two, once
@pytest.mark.parametrize("version", LEROBOT_PARAMETERS)
def test_frames_arrive_to_the_pixel_and_actions_to_the_bit_of_float32(
    request: pytest.FixtureRequest, tmp_path: Path, version: str
) -> None:
    python = lerobot_python(request.config.cache, version)
    stored = episodes(count=1)
    write_lerobot(stored, tmp_path / "set", fps=20)
    policy = Watching()
    paths = (ROOT, ROOT / "client", ROOT / "examples/lerobot_policy_deft")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    with running(create_app(policy)) as address:
        ran = subprocess.run(
            [python, PROGRAM, tmp_path / "set", f"http://{address}", tmp_path / "out.npy"],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    wanted = [step.observation for one in stored for step in one.steps()]
    for was, came in zip(wanted, policy.seen, strict=True):
        assert np.array_equal(was.image, came.image)
        assert np.array_equal(was.state, came.state)
        assert was.instruction == came.instruction
    means = np.array([one.image.mean() / 255 for one in wanted], np.float32)
    assert np.array_equal(np.load(tmp_path / "out.npy")[:, 0], means)
