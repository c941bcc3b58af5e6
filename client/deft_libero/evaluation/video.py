"""An episode as an MP4: what the policy saw, the instruction, and how its tokens came about.

Drawn after the episode, so that drawing takes no time while latency is measured.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from PIL import Image as PillowImage
from PIL import ImageDraw, ImageFont

from deft_core.files import replacing
from deft_core.measures.answers import AnswerRecord
from deft_core.reasoning import PICTURE as POINTED
from deft_core.reasoning import Reasoning, parse_reasoning
from deft_core.types import Image
from deft_libero.errors import VideoError, needed
from deft_libero.results.records import VIDEO_FPS, EpisodeRecord, Outcome

PICTURE = 512  # pixels; camera frames are scaled up to it
PANEL = 112
SIZE = (PICTURE, PICTURE + PANEL)
_TOLD = ("PLAN", "SUBTASK", "MOVE")  # of what a policy writes: a line each, below the panel
_LINE = 24
_LAST_FRAME_REPEATS = VIDEO_FPS  # the outcome stays on the screen for a second

_INK, _MUTED, _PAPER = (240, 240, 236), (150, 152, 158), (22, 24, 29)
_DRAFTED, _OWN = (64, 180, 166), (92, 96, 106)
_COLOURS = {
    Outcome.SUCCEEDED: (88, 190, 110),
    Outcome.FAILED: (224, 90, 80),
    Outcome.ERRORED: (230, 170, 60),
}
_BOX, _GRIPPER = (255, 211, 77), (255, 111, 181)
_TOKEN, _GAP, _PASS_GAP = 16, 3, 10  # pixels


def write_video(
    path: Path, record: EpisodeRecord, images: Sequence[Image], step_limit: int
) -> None:
    """Write an episode's frames with their overlay; the file appears only when it is whole.

    There is a picture before each action, and one after the last.
    """
    with needed("videos need imageio-ffmpeg", "libero", VideoError, "; or use --video none"):
        import imageio_ffmpeg
    with _replacing_earlier_tries(path) as beside:
        writer = imageio_ffmpeg.write_frames(
            str(beside),
            _size_of(record),
            fps=VIDEO_FPS,
            quality=None,
            output_params=["-crf", "23", "-preset", "veryfast", "-movflags", "+faststart"],
            ffmpeg_log_level="error",
        )
        with closing(writer):
            writer.send(None)
            for frame in draw_frames(record, images, step_limit):
                writer.send(np.ascontiguousarray(frame))


def keep_video(path: Path, content: bytes) -> None:
    """Write a video that was made elsewhere."""
    with _replacing_earlier_tries(path) as beside:
        beside.write_bytes(content)


def draw_frames(record: EpisodeRecord, images: Sequence[Image], step_limit: int) -> Iterator[Image]:
    """The frames of the video, in order."""
    answer: AnswerRecord | None = None
    waiting = list(record.answers)
    for step, image in enumerate(images):
        while waiting and waiting[0].used_step <= step:
            answer = waiting.pop(0)
        is_last = step == len(images) - 1
        frame = PillowImage.new("RGB", _size_of(record), _PAPER)
        frame.paste(
            PillowImage.fromarray(image).resize((PICTURE, PICTURE), PillowImage.Resampling.BICUBIC)
        )
        draw = ImageDraw.Draw(frame)
        _draw_instruction(draw, record.instruction)
        place = f"step {step} of {step_limit}"
        if answer is not None and answer.used_step > answer.asked_step:
            place += f", acting on the frame of step {answer.asked_step}"
        draw.text((16, PICTURE + 46), place, fill=_MUTED, font=_font(16))
        if answer is not None:
            _draw_answer(draw, answer)
        if is_last:
            _draw_outcome(draw, record.outcome)
        drawn = np.asarray(frame)
        for _ in range(_LAST_FRAME_REPEATS if is_last else 1):
            yield drawn


@contextmanager
def _replacing_earlier_tries(path: Path) -> Iterator[Path]:
    """A name to write to. An episode that is played again may end otherwise; no old video stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*.mp4"):
            old.unlink()
        with replacing(path) as beside:
            yield beside
    except OSError as error:
        raise VideoError(f"cannot write {path}: {error}") from error


def _size_of(record: EpisodeRecord) -> tuple[int, int]:
    """The same for all frames of an episode."""
    thinks = any(one.reasoning for one in record.answers)
    return SIZE[0], SIZE[1] + thinks * _LINE * len(_TOLD)


def _draw_answer(draw: ImageDraw.ImageDraw, answer: AnswerRecord) -> None:
    milliseconds = f"{answer.timings.round_trip_ms:.1f} ms"
    draw.text((PICTURE - 16, PICTURE + 46), milliseconds, fill=_MUTED, font=_font(16), anchor="ra")
    if answer.reasoning:
        _draw_reasoning(draw, parse_reasoning(answer.reasoning))
    if not answer.accepted:
        return
    top = PICTURE + 79
    x = 16.0
    for accepted in () if answer.reasoning else answer.accepted:  # a text has hundreds
        for number in range(accepted + 1):
            colour = _DRAFTED if number < accepted else _OWN
            draw.rounded_rectangle((x, top, x + _TOKEN, top + _TOKEN), radius=4, fill=colour)
            x += _TOKEN + _GAP
        x += _PASS_GAP - _GAP
    passes, drafted = len(answer.accepted), sum(answer.accepted)
    words = f"{passes} pass{'es' if passes > 1 else ''}, {drafted} drafted token"
    words += "s accepted" if drafted != 1 else " accepted"
    draw.text((PICTURE - 16, top - 2), words, fill=_INK, font=_font(16), anchor="ra")


def _draw_reasoning(draw: ImageDraw.ImageDraw, found: Reasoning) -> None:
    """What it points at, in the picture; some of its words, below everything else."""
    scale = PICTURE / POINTED
    for box in found.boxes:
        left, top, right, bottom = (min(scale * one, PICTURE - 1) for one in box.corners)
        corners = (min(left, right), min(top, bottom), max(left, right), max(top, bottom))
        draw.rectangle(corners, outline=_BOX, width=2)
        draw.text((corners[0] + 4, corners[1] + 2), _cut(draw, box.name, 14), _BOX, _font(14))
    points = [(scale * x, scale * y) for x, y in found.gripper]
    if points and all(max(one) < PICTURE for one in points):
        draw.line(points, fill=_GRIPPER, width=3)
        x, y = points[0]  # where it is; a policy may foresee nothing
        draw.ellipse((x - 5, y - 5, x + 5, y + 5), fill=_GRIPPER)
    for number, tag in enumerate(_TOLD):
        part = next((one.text for one in found.parts if one.tag == tag), "")
        place = (16, SIZE[1] + number * _LINE)
        draw.text(place, _cut(draw, f"{tag}: {part}", 15), fill=_INK, font=_font(15))


def _cut(draw: ImageDraw.ImageDraw, text: str, size: int) -> str:
    """As much of a text as fits on a line."""
    text, room = " ".join(text.split())[:200], PICTURE - 32
    while draw.textlength(text, font=_font(size)) > room:
        text = text[:-2].rstrip() + "…"
    return text


def _draw_outcome(draw: ImageDraw.ImageDraw, outcome: Outcome) -> None:
    colour = _COLOURS[outcome]
    draw.rectangle((0, 0, PICTURE - 1, PICTURE - 1), outline=colour, width=6)
    font = _font(22)
    width = draw.textlength(outcome.value, font=font)
    draw.rounded_rectangle((20, 20, 44 + width, 58), radius=8, fill=colour)
    draw.text((32, 25), outcome.value, fill=_PAPER, font=font)


def _draw_instruction(draw: ImageDraw.ImageDraw, text: str) -> None:
    """On one line: smaller if it must be, cut if even that does not help."""
    room = PICTURE - 32
    size = next((one for one in (20, 18, 16) if draw.textlength(text, font=_font(one)) <= room), 15)
    text = _cut(draw, text, size)
    draw.text((16, PICTURE + 24), text, fill=_INK, font=_font(size), anchor="lm")


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)
