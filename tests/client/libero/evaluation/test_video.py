from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deft_client.libero.errors import VideoError
from deft_client.libero.evaluation.episode import EpisodeLog
from deft_client.libero.evaluation.video import (
    PICTURE,
    SIZE,
    Caption,
    draw_frames,
    write_video,
)
from deft_client.libero.results.records import VIDEO_FPS, AnswerRecord, Outcome
from deft_client.types import StageTimings

CAPTION = Caption("pick up the alphabet soup and place it in the basket", Outcome.SUCCEEDED, 280)


def _log(num_steps: int = 4) -> EpisodeLog:
    log = EpisodeLog()
    log.images = [np.full((64, 64, 3), 40 * step, dtype=np.uint8) for step in range(num_steps + 1)]
    log.answers = [
        AnswerRecord(step, step, StageTimings(round_trip_ms=9.0), (3, 2), 7)
        for step in range(num_steps)
    ]
    return log


def test_every_frame_the_policy_saw_is_drawn_and_the_last_one_stays_for_a_second() -> None:
    frames = list(draw_frames(_log(), CAPTION))
    assert len(frames) == 5 + VIDEO_FPS - 1
    assert all(frame.shape == (SIZE[1], SIZE[0], 3) for frame in frames)
    middle = [int(frame[PICTURE // 2, PICTURE // 2, 0]) for frame in frames[:5]]
    assert middle == [0, 40, 80, 120, 160]


def _panel(log: EpisodeLog, caption: Caption = CAPTION) -> bytes:
    return next(iter(draw_frames(log, caption)))[PICTURE:].tobytes()


def test_the_panel_shows_instruction_step_passes_and_accepted_tokens() -> None:
    """Each of them changes the picture under the frame."""
    plain = _panel(_log())
    other_tokens, slower = _log(), _log()
    other_tokens.answers[0] = AnswerRecord(0, 0, StageTimings(round_trip_ms=9.0), (6,), 7)
    slower.answers[0] = AnswerRecord(0, 0, StageTimings(round_trip_ms=99.0), (3, 2), 7)
    panels = {
        plain,
        _panel(other_tokens),
        _panel(slower),
        _panel(_log(), Caption("pick up the milk", Outcome.SUCCEEDED, 280)),
        _panel(_log(), Caption(CAPTION.instruction, Outcome.SUCCEEDED, 300)),
    }
    assert len(panels) == 5


def test_an_answer_is_shown_from_the_step_that_executed_it() -> None:
    log = _log()
    log.answers = [AnswerRecord(0, 2, StageTimings(round_trip_ms=120.0), (3, 2), 7)]
    frames = list(draw_frames(log, CAPTION))
    tokens = slice(PICTURE + 79, PICTURE + 95)
    assert (frames[1][tokens, 16:150] == frames[1][tokens, :1]).all()  # nothing there yet
    assert not (frames[2][tokens, 16:150] == frames[2][tokens, :1]).all()


def test_a_very_long_instruction_stays_inside_the_picture() -> None:
    caption = Caption("put the bowl " * 20, Outcome.FAILED, 520)
    frame = next(iter(draw_frames(_log(), caption)))
    assert (frame[PICTURE:, -15:] == frame[-1, -1]).all()


def test_the_file_appears_whole_and_an_earlier_one_of_that_episode_goes(tmp_path: Path) -> None:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "videos" / "task00-trial01-succeeded.mp4"
    path.parent.mkdir()
    path.with_name("task00-trial01-failed.mp4").write_bytes(b"of an earlier try")
    path.with_name("task00-trial11-failed.mp4").write_bytes(b"another episode")
    write_video(path, _log(), CAPTION)
    assert sorted(one.name for one in path.parent.iterdir()) == [
        "task00-trial01-succeeded.mp4",
        "task00-trial11-failed.mp4",
    ]
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(path))
    assert frames == 5 + VIDEO_FPS - 1
    assert seconds == pytest.approx(frames / VIDEO_FPS, abs=0.05)


def test_a_video_that_cannot_be_written_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "videos").write_text("in the way")
    with pytest.raises(VideoError, match="cannot write"):
        write_video(tmp_path / "videos" / "task00-trial01-failed.mp4", _log(), CAPTION)


TEXT = (
    " Lift it. PLAN: reach, lift VISIBLE OBJECTS: cup [10, 20, 90, 110], odd [9, 9, 400, 2] "
    "SUBTASK: reach MOVE: {} GRIPPER POSITION: [60, 60, 70, 80] ACTION: x"
)


def test_what_a_policy_writes_is_below_the_panel_and_what_it_points_at_in_the_picture() -> None:
    plain, thinking, other = _log(), _log(), _log()
    for log, move in ((thinking, "move up"), (other, "move down " * 40)):
        log.answers = [replace(one, reasoning=TEXT.format(move)) for one in log.answers]
    first, second, third = (
        next(iter(draw_frames(log, CAPTION))) for log in (plain, thinking, other)
    )
    assert second.shape[0] == third.shape[0] > first.shape[0]
    assert (second[:PICTURE] != first[:PICTURE]).any()
    assert (second[:PICTURE] == third[:PICTURE]).all()
    assert (second[SIZE[1] :] != third[SIZE[1] :]).any()
    assert (third[SIZE[1] :, -15:] == third[-1, -1]).all()  # cut where there is no room
