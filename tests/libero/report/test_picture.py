"""The animation of two runs: both start together, and each moves at the speed it had."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from deft_core.types import StageTimings
from deft_libero.commands.report import main
from deft_libero.evaluation.video import write_video
from deft_libero.report.picture import FRAME_MS, Racer, draw_race
from deft_libero.results.store import ResultsStore, load_run
from tests.libero.episodes import header, record

pytest.importorskip("imageio_ffmpeg", reason="pip install 'deft-client[simulator]'")
NUM_STEPS = 5


def film(folder: Path, name: str, *milliseconds: float) -> Path:
    """A run, an episode for each pace; the picture gets lighter with every step."""
    images = [np.full((64, 64, 3), 40 * step, np.uint8) for step in range(NUM_STEPS + 1)]
    store = ResultsStore(folder / name, header(name, decoding=name))
    for trial, pace in enumerate(milliseconds):
        one = record(trial=trial, num_steps=NUM_STEPS)
        timings = StageTimings(round_trip_ms=pace)
        answers = tuple(replace(answer, timings=timings) for answer in one.answers)
        one = replace(one, answers=answers, video=f"{trial}.mp4")
        store.append(one)
        write_video(folder / name / one.video, replace(one, answers=()), images, 280)
    store.close()
    return folder / name


def test_each_run_shows_the_step_it_had_reached(tmp_path: Path) -> None:
    runs = [load_run(film(tmp_path, *one)) for one in (("slow", 400.0), ("fast", 200.0))]
    racers = [Racer(run, run.records[0], run.folder / run.records[0].video) for run in runs]
    frames = list(draw_race(racers, ["slow", "fast"]))
    assert len(frames) == (400 * NUM_STEPS + 1500) // FRAME_MS + 1
    after_a_second = frames[1000 // FRAME_MS + 1]
    left, right = after_a_second[100, 100].mean(), after_a_second[100, -100].mean()
    assert left == pytest.approx(40 * 2, abs=6)  # 1 s / 0.4 s
    assert right == pytest.approx(40 * 5, abs=6)


def test_what_a_run_says_it_is_about_to_do_stands_below(tmp_path: Path) -> None:
    run = load_run(film(tmp_path, "slow", 400.0))
    (one,) = run.records
    first, *later = one.answers
    first = replace(first, reasoning="PLAN: all SUBTASK: reach it MOVE: right ACTION:")
    racer = Racer(run, replace(one, answers=(first, *later)), run.folder / one.video)
    assert [racer.words(step) for step in (0, 1)] == ["reach it", ""]
    silent, thinking = (
        next(draw_race([each], ["slow"])) for each in (Racer(run, one, racer.path), racer)
    )
    assert thinking.shape[0] == silent.shape[0] + 32


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
        assert shown.size == (728, 452)


def test_of_several_trials_the_one_with_the_median_lead_is_shown(tmp_path: Path) -> None:
    film(tmp_path / "runs", "autoregressive", 400.0, 110.0, 200.0)
    film(tmp_path / "runs", "deft", 100.0, 100.0, 100.0)
    picture = tmp_path / "race.gif"
    asked = [str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")]
    assert main([*asked, "--picture", str(picture)]) == 0
    with Image.open(picture) as shown:
        lasts_ms = sum(one.info["duration"] for one in ImageSequence.Iterator(shown))
    assert lasts_ms == pytest.approx(200 * NUM_STEPS + 1500, abs=FRAME_MS)


def test_runs_without_videos_make_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ResultsStore(tmp_path / "run", header())
    store.append(record())
    store.close()
    asked = [str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]
    assert main([*asked, "--picture", str(tmp_path / "race.webp")]) == 2
    assert "--video all" in capsys.readouterr().err
