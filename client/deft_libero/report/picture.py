"""Trials that were filmed: the videos of their runs, with the pace that is true for them.

`write_picture` shows runs of one trial beside each other, as a small animation.
"""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image as PillowImage
from PIL import ImageDraw, ImageFont

from deft_core.files import replacing
from deft_core.reasoning import parse_reasoning
from deft_libero.errors import SelectionError, VideoError, needed
from deft_libero.evaluation.video import PICTURE
from deft_libero.report.summary import STEPS_PER_S
from deft_libero.results.records import EpisodeRecord, Outcome, TrialKey
from deft_libero.results.store import RunResults

FRAME_MS = 80  # GIF counts hundredths of a second
SUFFIXES = (".webp", ".gif")
_SIDE, _GAP, _CAPTION = 360, 8, 92  # pixels; letters are read at half of it on a telephone
_SAID = 32  # further pixels, where it thinks aloud
_REST_MS = 1500  # in which the end can be seen
_PAPER, _INK, _MUTED, _GOOD = (22, 24, 29), (240, 240, 236), (165, 167, 173), (98, 212, 138)


@dataclass(frozen=True)
class Racer:
    """One run's video of a trial."""

    run: RunResults
    record: EpisodeRecord
    path: Path  # of the video

    @property
    def pace_ms(self) -> float:
        """Milliseconds a step took: its answer, or where nothing waited for it the robot's 50."""
        if self.run.header.options.get("pacing") == "real-time":
            return 1000 / STEPS_PER_S
        spent_ms = sum(answer.timings.round_trip_ms for answer in self.record.answers)
        return spent_ms / self.record.num_steps or 1000 / STEPS_PER_S

    @property
    def seconds(self) -> float:
        """How long the episode took."""
        return self.pace_ms * self.record.num_steps / 1000

    @property
    def thinks(self) -> bool:
        """Whether there are texts to show."""
        return any(one.reasoning for one in self.record.answers)

    def words(self, step: int) -> str:
        """What it was about to do by the last text before a step."""
        texts = [one.reasoning for one in self.record.answers if one.used_step <= step]
        parts = parse_reasoning(texts[-1]).parts if texts else ()
        return next((one.text for one in parts if one.tag == "SUBTASK"), "")


def find_races(runs: Sequence[RunResults]) -> Mapping[TrialKey, Sequence[Racer]]:
    """The filmed trials: those of most runs first, of these those that went differently."""
    races: dict[TrialKey, list[Racer]] = {}
    for run in runs:
        for record in run.records:
            path = run.video(record)
            if record.num_steps and path is not None:
                races.setdefault(record.key, []).append(Racer(run, record, path))

    def rank(key: TrialKey) -> tuple[int, bool, int, TrialKey]:
        outcomes = [racer.record.outcome for racer in races[key]]
        lost = sum(one is not Outcome.SUCCEEDED for one in outcomes)
        return -len(races[key]), len(set(outcomes)) == 1, lost, key

    return {key: races[key] for key in sorted(races, key=rank)}


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
            duration=FRAME_MS,
            loop=0,
            quality=50,
            method=4,
        )


def draw_race(racers: Sequence[Racer], names: Sequence[str]) -> Iterator[np.ndarray]:
    """The frames: every run at the step that it had reached by then."""
    films = [_read_frames(racer.path) for racer in racers]
    longest_ms = 1000 * max(racer.seconds for racer in racers)
    height = _SIDE + _CAPTION + _SAID * any(racer.thinks for racer in racers)
    size = (len(racers) * (_SIDE + _GAP) - _GAP, height)
    for number in range(int((longest_ms + _REST_MS) / FRAME_MS) + 1):
        canvas = PillowImage.new("RGB", size, _PAPER)
        for index, (racer, film, name) in enumerate(zip(racers, films, names, strict=True)):
            panel = _draw_panel(racer, film, name, number * FRAME_MS / 1000, height)
            canvas.paste(panel, (index * (_SIDE + _GAP), 0))
        yield np.asarray(canvas)


def _draw_panel(
    racer: Racer, film: Sequence[PillowImage.Image], name: str, now_s: float, height: int
) -> PillowImage.Image:
    """One run at a moment: its picture, and below it name, words, time, and step or outcome."""
    has_ended, outcome = now_s >= racer.seconds, racer.record.outcome
    step = racer.record.num_steps if has_ended else int(1000 * now_s / racer.pace_ms)
    panel = PillowImage.new("RGB", (_SIDE, height), _PAPER)
    panel.paste(film[min(step, len(film) - 1)], (0, 0))
    draw, base = ImageDraw.Draw(panel), height - 10
    ink, muted = (_GOOD, _GOOD) if has_ended and outcome is Outcome.SUCCEEDED else (_INK, _MUTED)
    time, state = (
        f"{min(now_s, racer.seconds):.1f} s",
        outcome.value if has_ended else f"step {step}",
    )
    for place, anchor, text, size, colour in (
        ((8, _SIDE + 8), "la", name, _size_of(name, 26), _INK),
        ((8, _SIDE + 44), "la", racer.words(step), _size_of(racer.words(step), 22), _MUTED),
        ((8, base), "ls", time, 36, ink),
        ((_SIDE - 8, base), "rs", state, 26, muted),
    ):
        draw.text(place, text, fill=colour, font=ImageFont.load_default(size), anchor=anchor)
    return panel


def _size_of(text: str, most: int) -> int:
    """At most so many pixels a letter, and as many as let it fit below its picture."""
    return int(
        min(most, most * (_SIDE - 16) / max(1, ImageFont.load_default(most).getlength(text)))
    )


def _read_frames(path: Path) -> list[PillowImage.Image]:
    """The camera's part of a video's frames, made small."""
    with needed("reading videos needs imageio-ffmpeg", "simulator", VideoError):
        import imageio_ffmpeg
    cut = f"crop={PICTURE}:{PICTURE}:0:0,scale={_SIDE}:{_SIDE}:flags=area"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-vf", cut]
    done = subprocess.run(
        [*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True, check=False
    )
    if done.returncode or not done.stdout:
        raise VideoError(f"{path} cannot be read: {done.stderr.decode(errors='replace').strip()}")
    frames = np.frombuffer(done.stdout, np.uint8).reshape(-1, _SIDE, _SIDE, 3)
    return [PillowImage.fromarray(frame) for frame in frames]
