"""The animation of two runs: both start together, and each moves at the speed it had."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deft_client.libero.commands.report import main
from deft_client.libero.evaluation.episode import EpisodeLog
from deft_client.libero.evaluation.video import Caption, write_video
from deft_client.libero.report.picture import FPS, draw_race
from deft_client.libero.report.races import Racer
from deft_client.libero.results.store import ResultsStore, load_run
from deft_client.types import StageTimings
from tests.client.libero.episodes import header, record

pytest.importorskip("imageio_ffmpeg", reason="pip install 'deft-client[simulator]'")
NUM_STEPS = 5


def film(folder: Path, name: str, milliseconds: float) -> Path:
    """A run of one episode whose picture gets lighter with every step."""
    one = record(num_steps=NUM_STEPS)
    timings = StageTimings(round_trip_ms=milliseconds)
    answers = tuple(replace(answer, timings=timings) for answer in one.answers)
    one = replace(one, answers=answers)
    store = ResultsStore(folder / name, header(name, decoding=name))
    store.append(one)
    store.close()
    images = [np.full((64, 64, 3), 40 * step, np.uint8) for step in range(NUM_STEPS + 1)]
    log = EpisodeLog(images=images)
    write_video(folder / name / one.video, log, Caption(one.instruction, one.outcome, 280))
    return folder / name


def test_each_run_shows_the_step_it_had_reached(tmp_path: Path) -> None:
    runs = [load_run(film(tmp_path, *one)) for one in (("slow", 400.0), ("fast", 200.0))]
    racers = [Racer(run, run.records[0]) for run in runs]
    frames = list(draw_race(racers, ["slow", "fast"]))
    assert len(frames) == int((0.4 * NUM_STEPS + 1.5) * FPS) + 1
    after_a_second = frames[FPS]
    left, right = after_a_second[100, 100].mean(), after_a_second[100, -100].mean()
    assert left == pytest.approx(40 * 2, abs=6)  # 1 s / 0.4 s
    assert right == pytest.approx(40 * 5, abs=6)


@pytest.mark.parametrize("suffix", [".webp", ".gif"])
def test_the_report_writes_the_baseline_beside_the_quickest_run(
    tmp_path: Path, suffix: str
) -> None:
    for name, milliseconds in (("autoregressive", 100.0), ("lossless", 60.0), ("deft", 50.0)):
        film(tmp_path / "runs", name, milliseconds)
    picture = tmp_path / f"race{suffix}"
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "runs"), "--out", str(page), "--picture", str(picture)]) == 0
    with Image.open(picture) as shown:
        assert shown.is_animated
        assert shown.size == (488, 286)


def test_runs_without_videos_make_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ResultsStore(tmp_path / "run", header())
    store.append(record())
    store.close()
    asked = [str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]
    assert main([*asked, "--picture", str(tmp_path / "race.webp")]) == 2
    assert "--video all" in capsys.readouterr().err
