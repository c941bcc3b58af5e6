"""An episode as an MP4: what the policy saw, what it was told, and how its tokens came about.

Drawn after the episode, so that drawing takes no time while latency is measured.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image as PillowImage
from PIL import ImageDraw, ImageFont

from deft_client.files import replacing
from deft_client.libero.errors import VideoError
from deft_client.libero.evaluation.episode import EpisodeLog
from deft_client.libero.results.records import AnswerRecord, Outcome
from deft_client.libero.simulator import conventions
from deft_client.types import Image

FPS = conventions.CONTROL_HZ  # a frame per step: true speed
PICTURE = 512  # pixels; camera frames are scaled up to it
PANEL = 112
SIZE = (PICTURE, PICTURE + PANEL)
_LAST_FRAME_REPEATS = FPS  # the outcome stays on the screen for a second

_ENCODING = ["-crf", "23", "-preset", "veryfast", "-movflags", "+faststart"]

_INK, _MUTED, _PAPER = (240, 240, 236), (150, 152, 158), (22, 24, 29)
_DRAFTED, _OWN = (64, 180, 166), (92, 96, 106)
_COLOURS = {
    Outcome.SUCCEEDED: (88, 190, 110),
    Outcome.FAILED: (224, 90, 80),
    Outcome.ERRORED: (230, 170, 60),
}
_TOKEN, _GAP, _PASS_GAP = 16, 3, 10  # pixels


@dataclass(frozen=True)
class Caption:
    """What is written under every frame."""

    instruction: str
    outcome: Outcome
    step_limit: int


def write_video(path: Path, log: EpisodeLog, caption: Caption) -> None:
    """Write an episode's frames with their overlay; the file appears only when it is whole."""
    imageio_ffmpeg = _import_ffmpeg()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_earlier_tries(path)
        with replacing(path) as beside:
            writer = imageio_ffmpeg.write_frames(
                str(beside),
                SIZE,
                fps=FPS,
                quality=None,
                output_params=_ENCODING,
                ffmpeg_log_level="error",
            )
            with closing(writer):
                writer.send(None)
                for frame in draw_frames(log, caption):
                    writer.send(np.ascontiguousarray(frame))
    except OSError as error:
        raise VideoError(f"cannot write {path}: {error}") from error


def join_videos(paths: Sequence[Path], joined: Path) -> None:
    """Put videos side by side, each at its own speed; one that ends early keeps its last frame."""
    imageio_ffmpeg = _import_ffmpeg()
    longest_s = max(imageio_ffmpeg.count_frames_and_secs(str(path))[1] for path in paths)
    inputs = [part for path in paths for part in ("-i", str(path))]
    places = range(len(paths))
    held = "".join(f"[{n}]tpad=stop_mode=clone:stop_duration={longest_s}[v{n}];" for n in places)
    graph = held + "".join(f"[v{n}]" for n in places) + f"hstack=inputs={len(paths)}"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", *inputs]
    command += ["-filter_complex", graph, "-t", str(longest_s), *_ENCODING, str(joined)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise VideoError(f"cannot write {joined}: {done.stderr.strip()}")


def _import_ffmpeg() -> ModuleType:
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise VideoError(
            'videos need imageio-ffmpeg: pip install "deft-client[libero]", or use --video none'
        ) from error
    found: ModuleType = imageio_ffmpeg
    return found


def draw_frames(log: EpisodeLog, caption: Caption) -> Iterator[Image]:
    """The frames of the video, in order."""
    answer: AnswerRecord | None = None
    waiting = list(log.answers)
    for step, image in enumerate(log.images):
        while waiting and waiting[0].used_step <= step:
            answer = waiting.pop(0)
        is_last = step == len(log.images) - 1
        frame = _draw_frame(image, step, answer, caption)
        if is_last:
            _draw_outcome(frame, caption.outcome)
        drawn = np.asarray(frame)
        for _ in range(_LAST_FRAME_REPEATS if is_last else 1):
            yield drawn


def _remove_earlier_tries(path: Path) -> None:
    """An episode that is played again may end otherwise; its old video must not stay."""
    stem = path.stem.rpartition("-")[0]
    for old in path.parent.glob(f"{stem}-*.mp4"):
        old.unlink()


def _draw_frame(
    image: Image, step: int, answer: AnswerRecord | None, caption: Caption
) -> PillowImage.Image:
    frame = PillowImage.new("RGB", SIZE, _PAPER)
    scaled = PillowImage.fromarray(image).resize((PICTURE, PICTURE), PillowImage.Resampling.BICUBIC)
    frame.paste(scaled)
    draw = ImageDraw.Draw(frame)
    _draw_instruction(draw, caption.instruction)
    place = f"step {step} of {caption.step_limit}"
    if answer is not None and answer.method:
        place = f"{answer.method}, {place}"
    if answer is not None and answer.used_step > answer.asked_step:
        place += f", acting on the frame of step {answer.asked_step}"
    draw.text((16, PICTURE + 46), place, fill=_MUTED, font=_font(16))
    if answer is not None:
        _draw_answer(draw, answer)
    return frame


def _draw_answer(draw: ImageDraw.ImageDraw, answer: AnswerRecord) -> None:
    milliseconds = f"{answer.timings.round_trip_ms:.1f} ms"
    draw.text((PICTURE - 16, PICTURE + 46), milliseconds, fill=_MUTED, font=_font(16), anchor="ra")
    if not answer.accepted:
        return
    top = PICTURE + 79
    x = 16.0
    for accepted in answer.accepted:
        for number in range(accepted + 1):
            colour = _DRAFTED if number < accepted else _OWN
            draw.rounded_rectangle((x, top, x + _TOKEN, top + _TOKEN), radius=4, fill=colour)
            x += _TOKEN + _GAP
        x += _PASS_GAP - _GAP
    passes, drafted = len(answer.accepted), sum(answer.accepted)
    words = f"{passes} pass{'es' if passes > 1 else ''}, {drafted} drafted token"
    words += "s accepted" if drafted != 1 else " accepted"
    draw.text((PICTURE - 16, top - 2), words, fill=_INK, font=_font(16), anchor="ra")


def _draw_outcome(frame: PillowImage.Image, outcome: Outcome) -> None:
    draw = ImageDraw.Draw(frame)
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
    while draw.textlength(text, font=_font(size)) > room:
        text = text[:-2].rstrip() + "…"
    draw.text((16, PICTURE + 24), text, fill=_INK, font=_font(size), anchor="lm")


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)
