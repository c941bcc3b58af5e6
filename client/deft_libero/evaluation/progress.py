"""The live line of an evaluation: how far, how good, how fast, how long still.

On a terminal one line is redrawn in place; elsewhere a line is written now and then.
"""

import io
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from deft_core.measures.statistics import wilson_interval
from deft_libero.errors import needed
from deft_libero.results.records import EpisodeRecord, Outcome

_REDRAW_S = 0.2
_LINE_EVERY_S = 30.0  # where there is no terminal
_OPENS_LONG_S = 2.0  # a scene that takes longer is said to, where there is no terminal
_RECENT = 20  # episodes that the shown speed is averaged over
# A narrow terminal cuts the end, so the time that remains stands before the figures.
_FORMAT = "{desc} {n_fmt}/{total_fmt} [{bar:10}] ETA {remaining}{postfix}"


class ProgressLine:
    """Counts episodes and draws. `clock` gives seconds."""

    def __init__(
        self,
        name: str,
        num_episodes: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        with needed("this needs tqdm", "libero"):
            from tqdm import tqdm
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._counts = dict.fromkeys(Outcome, 0)
        self._recent_ms: deque[float] = deque(maxlen=_RECENT)  # per action, by episode
        self._newest_ms = 0.0  # of a running episode
        self._scene, self._opens_since_s, self._is_scene_said = "", 0.0, False
        self._next_line_s = clock()
        self._bar = tqdm(
            desc=name,
            total=num_episodes,
            file=stream if self._is_terminal else io.StringIO(),
            mininterval=_REDRAW_S,
            miniters=0,
            smoothing=0,  # the time that remains follows from the mean of this sitting
            ascii=".#",
            dynamic_ncols=True,
            bar_format=_FORMAT,
        )

    def resume(self, records: Sequence[EpisodeRecord]) -> None:
        """Count the episodes of an earlier sitting."""
        for record in records:
            self._counts[record.outcome] += 1
        self._bar.n = self._bar.initial = len(records)

    @property
    def num_errored(self) -> int:
        """Episodes that Errored in this sitting."""
        return self._counts[Outcome.ERRORED]

    def opens(self, scene: str) -> None:
        """Note that a scene is being opened."""
        self._scene, self._opens_since_s, self._is_scene_said = scene, self._clock(), False

    def heard(self, round_trip_ms: float) -> None:
        """Note how fast a running episode is answered."""
        self._newest_ms, self._scene = round_trip_ms, ""

    def count(self, record: EpisodeRecord) -> None:
        """Count a finished episode."""
        self._scene = ""
        self._counts[record.outcome] += 1
        if record.num_steps:
            spent_ms = sum(one.timings.round_trip_ms for one in record.answers)
            self._recent_ms.append(spent_ms / record.num_steps)
        self._bar.n += 1
        self.draw()

    def say(self, text: str) -> None:
        """Write a line that stays, above the live one."""
        self._bar.write(text, file=self._stream)
        self._stream.flush()

    def draw(self) -> None:
        """Draw if it is time to."""
        self._bar.set_postfix_str(", ".join(self._facts()), refresh=False)
        if self._is_terminal:
            self._bar.update(0)
        elif (
            self._scene
            and not self._is_scene_said
            and (self._clock() > self._opens_since_s + _OPENS_LONG_S)
        ):
            self._is_scene_said = True
            self._write_line()
        elif self._clock() >= self._next_line_s:
            self._next_line_s = self._clock() + _LINE_EVERY_S
            self._write_line()

    def finish(self) -> None:
        """Leave the last line on the screen."""
        self._bar.set_postfix_str(", ".join(self._facts()), refresh=False)
        if not self._is_terminal:
            self._write_line()
        self._bar.close()

    def _write_line(self) -> None:
        self._stream.write(f"{self._bar}\n")
        self._stream.flush()

    def _facts(self) -> Iterator[str]:
        succeeded, errored = self._counts[Outcome.SUCCEEDED], self._counts[Outcome.ERRORED]
        judged = succeeded + self._counts[Outcome.FAILED]
        if judged:
            interval = wilson_interval(succeeded, judged)
            spread = f"{100 * interval.low:.0f}-{100 * interval.high:.0f}"
            yield f"{100 * succeeded / judged:.0f}% success (95%: {spread})"
        if errored:
            yield f"{errored} errored"
        if self._scene:
            yield f"opening {self._scene}"
        recent = self._recent_ms or [self._newest_ms]
        if any(recent):
            yield f"{sum(recent) / len(recent):.1f} ms/action"
