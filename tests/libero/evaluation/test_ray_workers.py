"""An evaluation on Ray: the same episodes as here, also when a worker is killed."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from deft_libero.commands.evaluate import read_options
from deft_libero.evaluation.player import EpisodeEnded, Heartbeat, Opening
from deft_libero.evaluation.ray_workers import ActorMessage, ActorWorker, RemotePlayer
from deft_libero.evaluation.runs import plan_runs
from deft_libero.evaluation.workers import Died
from tests.libero.episodes import record
from tests.tools.kills import Scene, find_faults, finish, torment

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from deft_libero.commands.evaluate import main
sys.exit(main(sys.argv[1:]))
"""
SERVER = "tests.standins.tiny_server"


@pytest.fixture(autouse=True)
def _processes_can_import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def _evaluate_without_ray(out: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = ["point_world", "--environment", "point_world", "--local-policy", "solve", *flags]
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *command, "--episodes", "1", "--out", str(out)],
        capture_output=True,
        text=True,
    )


def test_without_the_extra_only_the_flag_is_refused(tmp_path: Path) -> None:
    refused = _evaluate_without_ray(tmp_path, "--ray", "local")
    assert refused.returncode == 1
    assert 'pip install "./client[ray]"' in refused.stderr
    assert _evaluate_without_ray(tmp_path).returncode == 0


@dataclass
class _Here:
    """Stands for Ray and for an actor: what is coming is there."""

    exceptions: ClassVar = SimpleNamespace(RayError=ConnectionError)

    @property
    def next_report(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda: None)

    def get(self, coming: ActorMessage | Exception) -> ActorMessage:
        if isinstance(coming, Exception):
            raise coming
        return coming


def _line(folder: Path, coming: ActorMessage | Exception) -> ActorWorker:
    return ActorWorker(_Here(), _Here(), folder, ends=(coming,))


def _ended_with_video() -> EpisodeEnded:
    played = replace(record(), video="videos/task00-trial00-succeeded.mp4")
    return EpisodeEnded(played, video=b"a video")


def test_a_video_travels_back_and_takes_the_place_of_an_earlier_try(tmp_path: Path) -> None:
    earlier = tmp_path / "videos/task00-trial00-failed.mp4"
    earlier.parent.mkdir()
    earlier.touch()
    report = _line(tmp_path, _ended_with_video()).receive()
    assert isinstance(report, EpisodeEnded)
    assert (tmp_path / report.record.video).read_bytes() == b"a video"
    assert not earlier.exists()


def test_an_episode_whose_video_finds_no_place_is_kept_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "videos").touch()
    report = _line(tmp_path, _ended_with_video()).receive()
    assert isinstance(report, EpisodeEnded)
    assert report.record.video == ""
    assert "cannot write" in caplog.text


def test_a_worker_has_a_place_once_it_speaks_and_its_end_says_why(tmp_path: Path) -> None:
    line = _line(tmp_path, None)
    assert not line.is_placed
    assert line.receive() is None
    assert line.is_placed
    ended = _line(tmp_path, ConnectionError("The actor died.\n  killed by SIGKILL")).receive()
    assert ended == Died("the worker ended: killed by SIGKILL")


@pytest.mark.parametrize(
    ("policy", "told"), [("solve", EpisodeEnded), ("tests.standins.broken:crash", Died)]
)
def test_an_actor_says_that_it_is_there_and_then_how_its_episode_went(
    tmp_path: Path, policy: str, told: type
) -> None:
    world = ["point_world", "--environment", "point_world", "--out", str(tmp_path)]
    (run,) = plan_runs(read_options([*world, "--local-policy", policy, "--episodes", "1"]), None)
    player = RemotePlayer(run)
    assert player.next_report() is None
    player.play(run.keys[0])
    reports = [player.next_report()]
    while isinstance(reports[-1], Heartbeat | Opening):
        reports.append(player.next_report())
    assert isinstance(reports[-1], told)
    assert not list(tmp_path.iterdir())


def _scene(folder: Path, *flags: str) -> Scene:
    folder.mkdir()
    return Scene(lambda port: [sys.executable, "-m", SERVER, str(port)], folder, 8, 20.0, flags)


def _kill_one_that_plays(scene: Scene) -> None:
    """Kill workers until one had an episode in hand."""
    log = scene.folder / "evaluation.log"
    while "the worker ended" not in log.read_text():
        assert not scene.has_finished(), log.read_text()
        scene.go_on()  # on a busy machine Ray may give up starting
        if list(scene.folder.glob("*/episodes.jsonl")):
            scene.kill("worker")
        time.sleep(0.5)


@pytest.mark.timeout(600)  # Ray starts eight processes, and on a busy machine slowly
def test_ray_workers_play_what_one_process_plays(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray", reason="needs Ray: make install-ray")
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
