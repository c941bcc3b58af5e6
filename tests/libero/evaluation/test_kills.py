"""Every kind of process of an evaluation is killed once, by kill -9."""

import os
import random
import sys
from pathlib import Path

import pytest

from deft_libero.results.records import Outcome
from tests.tools.kills import Scene, find_faults, torment


def _tiny_serve(port: int) -> list[str]:
    return [sys.executable, "-m", "tests.standins.tiny_server", str(port)]


def _scene(folder: Path) -> Scene:
    folder.mkdir()
    return Scene(_tiny_serve, folder, episodes=5, delay_ms=20.0)


def test_kill_9_at_any_moment_costs_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server, worker and evaluation are killed while two workers play five episodes.

    The answers depend on how many frames a session has sent, so an episode that went on where a
    killed one had stopped would have other actions than in the quiet run.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    random.seed(3)
    quiet, rough = _scene(tmp_path / "quiet"), _scene(tmp_path / "rough")
    try:
        torment(quiet, (), (0.0, 0.0))
        quiet.stop()
        killed = torment(rough, ("worker", "server", "evaluation"), (0.5, 1.0))
    finally:
        quiet.stop()
        rough.stop()
    assert sum(killed.values()) == 3
    assert find_faults(rough.result(), quiet.result()) == []
    assert {one.outcome for one in rough.result().records} == {Outcome.SUCCEEDED, Outcome.FAILED}
