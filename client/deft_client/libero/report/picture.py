"""Two runs of one trial beside each other as a small animated picture, at the speed they had."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image as PillowImage
from PIL import ImageDraw, ImageFont

from deft_client.files import replacing
from deft_client.libero.errors import SelectionError, VideoError
from deft_client.libero.evaluation.video import PICTURE
from deft_client.libero.report.races import Racer

FPS = 12
SUFFIXES = (".webp", ".gif")
_SIDE, _GAP, _CAPTION = 240, 8, 46  # pixels
_REST_S = 1.5  # in which the end can be seen
_PAPER, _INK, _MUTED = (22, 24, 29), (240, 240, 236), (150, 152, 158)


def write_picture(path: Path, racers: Sequence[Racer], names: Sequence[str]) -> None:
    """Write the animation; it repeats for ever, and appears only when it is whole."""
    if path.suffix not in SUFFIXES:
        raise SelectionError(f"--picture {path}: a file of {' or '.join(SUFFIXES)} is written")
    shown = [PillowImage.fromarray(one) for one in draw_race(racers, names)]
    with replacing(path) as beside:
        shown[0].save(
            beside,
            format=path.suffix[1:],
            save_all=True,
            append_images=shown[1:],
            duration=round(1000 / FPS),
            loop=0,
            quality=50,
            method=4,
        )


def draw_race(racers: Sequence[Racer], names: Sequence[str]) -> Iterator[np.ndarray]:
    """The frames: every run at the step that it had reached by then."""
    films = [_read_frames(racer.path) for racer in racers]
    longest_s = max(racer.seconds for racer in racers)
    for number in range(int((longest_s + _REST_S) * FPS) + 1):
        size = (len(racers) * (_SIDE + _GAP) - _GAP, _SIDE + _CAPTION)
        canvas = PillowImage.new("RGB", size, _PAPER)
        for index, (racer, film, name) in enumerate(zip(racers, films, names, strict=True)):
            now_s = min(number / FPS, racer.seconds)
            step = min(int(1000 * now_s / racer.pace_ms), racer.record.num_steps, len(film) - 1)
            left = index * (_SIDE + _GAP)
            canvas.paste(film[step], (left, 0))
            ended = f", {racer.record.outcome.value}" if now_s == racer.seconds else ""
            _write(canvas, left, (name, f"{now_s:.1f} s, step {step}{ended}"))
        yield np.asarray(canvas)


def _write(canvas: PillowImage.Image, left: int, lines: tuple[str, str]) -> None:
    draw = ImageDraw.Draw(canvas)
    for line, colour, top in zip(lines, (_INK, _MUTED), (5, 24), strict=True):
        font = ImageFont.load_default(14)
        draw.text((left + 6, _SIDE + top), line, fill=colour, font=font)


def _read_frames(path: Path) -> list[PillowImage.Image]:
    """The camera's part of a video's frames, made small."""
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise VideoError(
            'reading videos needs imageio-ffmpeg: pip install "deft-client[simulator]"'
        ) from error
    cut = f"crop={PICTURE}:{PICTURE}:0:0,scale={_SIDE}:{_SIDE}:flags=area"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-vf", cut]
    done = subprocess.run(
        [*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True, check=False
    )
    if done.returncode or not done.stdout:
        raise VideoError(f"{path} cannot be read: {done.stderr.decode(errors='replace').strip()}")
    frames = np.frombuffer(done.stdout, np.uint8).reshape(-1, _SIDE, _SIDE, 3)
    return [PillowImage.fromarray(frame) for frame in frames]
