"""LeRobot's own loader opens what we write; its package has an environment of its own."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from deft_core.datasets.lerobot_export import write_lerobot
from tests.core.datasets.test_lerobot import episodes
from tests.peer_environment import LEROBOT_MARKS, LEROBOT_PARAMETERS, lerobot_python

pytestmark = LEROBOT_MARKS
PROGRAM = Path(__file__).with_name("lerobot_reads.py")


@pytest.fixture(scope="module", params=LEROBOT_PARAMETERS)
def python(request: pytest.FixtureRequest) -> str:
    return lerobot_python(request.config.cache, request.param)


@pytest.mark.timeout(600)  # installing takes a minute or two, once
def test_lerobots_loader_finds_the_pixels_actions_states_and_tasks(python, tmp_path):
    wanted = episodes()
    write_lerobot(wanted, tmp_path / "set", fps=20)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PYTHONPATH": ""}
    ran = subprocess.run(
        [python, str(PROGRAM), str(tmp_path / "set"), str(tmp_path / "found.npz")],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    steps = [step for one in wanted for step in one.steps()]
    with np.load(tmp_path / "found.npz") as found:
        assert np.array_equal(found["images"], [step.observation.image for step in steps])
        assert found["actions"].tobytes() == np.stack([step.action for step in steps]).tobytes()
        assert np.array_equal(found["states"], [step.observation.state for step in steps])
        assert found["tasks"].tolist() == [step.observation.instruction for step in steps]
        assert found["episodes"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert np.allclose(found["mean"], np.mean([step.action for step in steps], axis=0))
