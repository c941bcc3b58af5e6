"""LeRobot's own loader opens what we write; its package has an environment of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deft_client.datasets.lerobot_export import write_lerobot
from tests.client.datasets.test_lerobot import episodes
from tests.peer_environment import peer_python

PACKAGES = (
    "lerobot==0.4.4", "datasets==4.4.1", "huggingface-hub==0.35.3", "torchvision==0.28.0",
    "accelerate==1.12.0", "aiohttp", "anyio", "attrs", "av==15.1.0", "certifi",
    "charset-normalizer", "deepdiff==8.6.1", "dill==0.4.0", "draccus==0.10.0", "einops",
    "filelock", "fsspec==2025.10.0", "h11", "httpcore", "httpx", "idna", "jsonlines", "mergedeep",
    "multiprocess==0.70.18", "mypy-extensions", "numpy==2.2.6", "orderly-set", "packaging",
    "pandas==2.3.3", "pillow", "psutil", "pyarrow==22.0.0", "python-dateutil", "pytz", "PyYAML",
    "pyyaml-include<2", "requests", "safetensors", "six", "termcolor", "toml", "tqdm",
    "typing-extensions", "typing-inspect", "tzdata", "urllib3", "xxhash",
)  # fmt: skip
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        sys.version_info >= (3, 13), reason="lerobot 0.4 is for Python 3.10 to 3.12"
    ),
]
PROGRAM = Path(__file__).with_name("lerobot_reads.py")


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    home = request.config.cache.mkdir(f"lerobot-{sys.version_info[0]}.{sys.version_info[1]}")
    return peer_python(home, PACKAGES, with_torch=True)


@pytest.mark.timeout(600)  # installing takes a minute or two, once
def test_its_loader_finds_the_pixels_actions_states_and_tasks(python, tmp_path):
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
