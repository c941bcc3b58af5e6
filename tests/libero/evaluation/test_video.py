from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deft_core.measures.answers import AnswerRecord
from deft_core.types import Image, StageTimings
from deft_libero.errors import VideoError
from deft_libero.evaluation.video import PICTURE, SIZE, draw_frames, write_video
from deft_libero.results.records import VIDEO_FPS, EpisodeRecord, Outcome
from tests.libero.episodes import record

IMAGES = [np.full((64, 64, 3), 40 * step, dtype=np.uint8) for step in range(5)]
LIMIT = 280


def _record(**changes: object) -> EpisodeRecord:
    answers = tuple(
        AnswerRecord(step, step, StageTimings(round_trip_ms=9.0), (3, 2), 7) for step in range(4)
    )
    told = "pick up the alphabet soup and place it in the basket"
    return replace(record(), **{"answers": answers, "instruction": told, **changes})


def _frames(one: EpisodeRecord, step_limit: int = LIMIT) -> list[Image]:
    return list(draw_frames(one, IMAGES, step_limit))


def test_every_frame_is_drawn_and_the_last_stays_a_second() -> None:
    frames = _frames(_record())
    assert len(frames) == 5 + VIDEO_FPS - 1
    assert all(frame.shape == (SIZE[1], SIZE[0], 3) for frame in frames)
    middle = [int(frame[PICTURE // 2, PICTURE // 2, 0]) for frame in frames[:5]]
    assert middle == [0, 40, 80, 120, 160]


def _panel(one: EpisodeRecord, step_limit: int = LIMIT) -> bytes:
    return _frames(one, step_limit)[0][PICTURE:].tobytes()


def test_the_panel_shows_instruction_step_passes_and_accepted_tokens() -> None:
    """Each of them changes the picture under the frame."""
    first, *rest = _record().answers
    slow = AnswerRecord(0, 0, StageTimings(round_trip_ms=99.0), (3, 2), 7)
    panels = {
        _panel(_record()),
        _panel(_record(answers=(replace(first, accepted=(6,)), *rest))),
        _panel(_record(answers=(slow, *rest))),
        _panel(_record(instruction="pick up the milk")),
        _panel(_record(), step_limit=300),
    }
    assert len(panels) == 5


def test_an_answer_is_shown_from_the_step_that_executed_it() -> None:
    late = AnswerRecord(0, 2, StageTimings(round_trip_ms=120.0), (3, 2), 7)
    frames = _frames(_record(answers=(late,)))
    tokens = slice(PICTURE + 79, PICTURE + 95)
    assert (frames[1][tokens, 16:150] == frames[1][tokens, :1]).all()  # nothing there yet
    assert not (frames[2][tokens, 16:150] == frames[2][tokens, :1]).all()


def test_a_very_long_instruction_stays_inside_the_picture() -> None:
    frame = _frames(_record(instruction="put the bowl " * 20, outcome=Outcome.FAILED))[0]
    assert (frame[PICTURE:, -15:] == frame[-1, -1]).all()


def test_the_file_appears_whole_and_an_earlier_one_of_that_episode_goes(tmp_path: Path) -> None:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "videos" / "task00-trial01-succeeded.mp4"
    path.parent.mkdir()
    path.with_name("task00-trial01-failed.mp4").write_bytes(b"of an earlier try")
    path.with_name("task00-trial11-failed.mp4").write_bytes(b"another episode")
    write_video(path, _record(), IMAGES, LIMIT)
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
        write_video(tmp_path / "videos/task00-trial01-failed.mp4", _record(), IMAGES, LIMIT)


TEXT = (
    " Lift it. PLAN: reach, lift VISIBLE OBJECTS: cup [10, 20, 90, 110], odd [9, 9, 400, 2] "
    "SUBTASK: reach MOVE: {} GRIPPER POSITION: [60, 60, 70, 80] ACTION: x"
)


def test_reasoning_stands_below_the_panel_and_boxes_in_the_picture() -> None:
    plain = _record()
    thinking = [
        _record(answers=tuple(replace(one, reasoning=TEXT.format(move)) for one in plain.answers))
        for move in ("move up", "move down " * 40)
    ]
    first, second, third = (_frames(one)[0] for one in (plain, *thinking))
    assert second.shape[0] == third.shape[0] > first.shape[0]
    assert (second[:PICTURE] != first[:PICTURE]).any()
    assert (second[:PICTURE] == third[:PICTURE]).all()
    assert (second[SIZE[1] :] != third[SIZE[1] :]).any()
    assert (third[SIZE[1] :, -15:] == third[-1, -1]).all()  # cut where there is no room
