"""The peers' own published clients work unchanged.

They are installed into an environment of their own, because their pins (numpy below 2) clash with
ours. It is made once and kept in pytest's cache.
"""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deft_core.peers.conventions import OPENPI, VLA_EVAL
from deft_server.settings import Settings
from tests.peer_environment import peer_python
from tests.server.running import running
from tests.standins.peers import ThreeDatasets, build_app

SCRIPT = Path(__file__).with_name("peer_clients.py")
PEERS = ("openpi-client==0.1.2", "vla-eval==0.8.0", "json-numpy==2.1.1", "requests==2.32.5")
# What those import in our use, named so that simulators and video writers stay out.
THEIR_NEEDS = (
    "numpy==1.26.4", "msgpack", "websockets", "typing-extensions", "anyio", "pillow", "urllib3",
    "idna", "certifi", "charset-normalizer", "sniffio", "exceptiongroup",
)  # fmt: skip
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="numpy 1.26 has no wheels for it"),
]


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    """The interpreter of the peers' environment."""
    cache: pytest.Cache = request.config.cache  # type: ignore[assignment]
    home = cache.mkdir(f"peers-{sys.version_info[0]}.{sys.version_info[1]}")
    return peer_python(home, PEERS + THEIR_NEEDS)


def drive(python: str, *arguments: str) -> dict[str, Any]:
    ran = subprocess.run(
        [python, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert isinstance(told, dict)
    return told


def test_json_numpy_and_requests_drive_act(python: str) -> None:
    policy = ThreeDatasets()
    with running(build_app(policy)) as address:
        told = drive(python, "openvla", address)
    expected = policy.actions["bridge"].tolist()
    assert told["plain"] == ["ndarray", "float64", expected]
    assert told["encoded"] == expected
    assert told["wrong"] == [200, "error"]


def test_json_numpy_and_requests_drive_act_of_oft(python: str) -> None:
    policy = ThreeDatasets(default_key="bridge", steps=8)
    with running(build_app(policy, Settings(profile="oft"))) as address:
        told = drive(python, "oft", address)
    assert np.array(told["actions"]).shape == (8, 7)
    assert list(policy.seen[0].cameras) == ["wrist_image"]


def test_openpi_client_infers_and_hears_of_errors(python: str) -> None:
    policy = ThreeDatasets(default_key="bridge")
    with running(build_app(policy)) as address:
        told = drive(python, "openpi", address)
    assert told["metadata"] == "three-datasets"
    expected = OPENPI.from_policy(policy.actions["bridge"][None])
    np.testing.assert_array_equal(told["actions"], expected)
    assert told["timings"] == [["infer_ms"], *[["infer_ms", "prev_total_ms"]] * 2]
    assert "observation/image" in told["failure"]


def test_openpi_client_waits_for_a_slow_policy_through_many_pings(python: str) -> None:
    gate = threading.Event()
    policy = ThreeDatasets(default_key="bridge", gate=gate)
    timer = threading.Timer(3.5, gate.set)
    with running(build_app(policy), ping_s=1.0) as address:
        timer.start()
        told = drive(python, "openpi", address)
    assert len(told["actions"]) == 1


def test_openpi_client_brings_its_key(python: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[arm]\nkey = "a-key-of-some-robot-arm"\n')
    app = build_app(ThreeDatasets(default_key="bridge"), Settings(keys_file=keys))
    with running(app) as address:
        told = drive(python, "openpi", address, "a-key-of-some-robot-arm")
    assert told["metadata"] == "three-datasets"


def test_vla_eval_runs_an_episode(python: str) -> None:
    policy = ThreeDatasets(default_key="bridge")
    with running(build_app(policy)) as address:
        told = drive(python, "vla-eval", address)
    expected = VLA_EVAL.from_policy(policy.actions["bridge"][None])[0].tolist()
    assert told["actions"] == [expected] * 3
    assert "images" in told["failure"]
    assert told["again"] == expected
    assert told["mismatches"] == []


def test_the_programs_of_the_documents_run(python: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "protocols.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    with running(build_app(ThreeDatasets(default_key="bridge"))) as address:
        for program in programs:
            here = program.replace("127.0.0.1:8000", address)
            assert here != program
            ran = subprocess.run(
                [python, "-c", here], capture_output=True, text=True, timeout=60, check=False
            )
            assert (ran.returncode, "error" in ran.stdout) == (0, False), ran.stderr
