"""An evaluation on Ray: the same episodes as here, also when a worker is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.client.libero.kills import Scene, find_faults, finish, torment

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from deft_client.libero.commands.evaluate import main
sys.exit(main(sys.argv[1:]))
"""
SERVER = "tests.client.libero.tiny_server"


@pytest.fixture(autouse=True)
def _processes_can_import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def _evaluate_without_ray(out: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = ["point_world", "--environment", "point_world", "--policy", "solve", *flags]
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *command, "--episodes", "1", "--out", str(out)],
        capture_output=True,
        text=True,
    )


def test_without_the_extra_only_the_flag_is_refused(tmp_path: Path) -> None:
    refused = _evaluate_without_ray(tmp_path, "--ray", "local")
    assert refused.returncode == 1
    assert 'pip install "deft-client[ray]"' in refused.stderr
    assert _evaluate_without_ray(tmp_path).returncode == 0


def _scene(folder: Path, *flags: str) -> Scene:
    folder.mkdir()
    return Scene(lambda port: [sys.executable, "-m", SERVER, str(port)], folder, 8, 20.0, flags)


def _kill_one_that_plays(scene: Scene) -> None:
    """Kill workers until one had an episode in hand."""
    log = scene.folder / "evaluation.log"
    while "the worker ended" not in log.read_text():
        assert not scene.has_ended(), log.read_text()
        if list(scene.folder.glob("*/episodes.jsonl")):
            scene.kill("worker")
        time.sleep(0.5)


def test_two_workers_on_ray_play_what_one_process_plays_although_one_is_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "deft-client[ray]"')
    alone, rough = _scene(tmp_path / "alone"), _scene(tmp_path / "rough", "--ray", "local")
    try:
        torment(alone, (), (0.0, 0.0))
        alone.stop()
        rough.start_server()
        rough.start_evaluation()
        _kill_one_that_plays(rough)
        finish(rough)
    finally:
        alone.stop()
        rough.stop()
    assert find_faults(rough.result(), alone.result()) == []
