"""The live line of an evaluation: how far, how good, how fast, how long still.

On a terminal one line is redrawn in place; elsewhere a line is written now and then.
"""

import shutil
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from deft_client.libero.results.records import EpisodeRecord, Outcome
from deft_client.libero.results.statistics import wilson_interval

_REDRAW_S = 0.2
_LINE_EVERY_S = 30.0  # where there is no terminal
_RECENT = 20  # episodes that the shown speed is averaged over
_BAR = 16


class ProgressLine:
    """Counts episodes and draws. `clock` gives seconds."""

    def __init__(
        self,
        name: str,
        num_episodes: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._num_episodes = num_episodes
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._counts = dict.fromkeys(Outcome, 0)
        self._recent_ms: deque[float] = deque(maxlen=_RECENT)  # per action, by episode
        self._newest_ms = 0.0  # of a running episode
        self._started_s = clock()
        self._next_draw_s = self._started_s
        self._num_before = 0
        self._width = 0

    def resume(self, records: tuple[EpisodeRecord, ...]) -> None:
        """Count the episodes of an earlier sitting."""
        for record in records:
            self._counts[record.outcome] += 1
        self._num_before = len(records)

    @property
    def num_errored(self) -> int:
        """Episodes that Errored in this sitting."""
        return self._counts[Outcome.ERRORED]

    def heard(self, round_trip_ms: float) -> None:
        """Note how fast a running episode is answered."""
        self._newest_ms = round_trip_ms

    def count(self, record: EpisodeRecord) -> None:
        """Count a finished episode."""
        self._counts[record.outcome] += 1
        if record.num_steps:
            spent_ms = sum(one.timings.round_trip_ms for one in record.answers)
            self._recent_ms.append(spent_ms / record.num_steps)
        if not self._is_terminal:
            self.draw()

    def say(self, text: str) -> None:
        """Write a line that stays, above the live one."""
        self._erase()
        self._stream.write(f"{text}\n")
        if self._is_terminal:
            self._next_draw_s = self._clock()
            self.draw()
        else:
            self._stream.flush()

    def draw(self) -> None:
        """Draw if it is time to."""
        now_s = self._clock()
        if now_s < self._next_draw_s:
            return
        self._next_draw_s = now_s + (_REDRAW_S if self._is_terminal else _LINE_EVERY_S)
        line = self.line()
        if self._is_terminal:
            line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line stays behind
            padding = " " * max(0, self._width - len(line))
            self._stream.write(f"\r{line}{padding}")
            self._width = len(line)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def finish(self) -> None:
        """Leave the last line on the screen."""
        self._next_draw_s = self._clock()
        self.draw()
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()
        self._width = 0

    def line(self) -> str:
        """What is drawn."""
        done = sum(self._counts.values())
        filled = _BAR * done // max(1, self._num_episodes)
        parts = [
            f"{self._name} [{'#' * filled}{'.' * (_BAR - filled)}] {done}/{self._num_episodes}",
            self._success(),
        ]
        if self._counts[Outcome.ERRORED]:
            parts.append(f"{self._counts[Outcome.ERRORED]} errored")
        recent = self._recent_ms or [self._newest_ms]
        if any(recent):
            parts.append(f"{sum(recent) / len(recent):.1f} ms/action")
        parts.append(self._remaining(done))
        return "  ".join(part for part in parts if part)

    def _success(self) -> str:
        succeeded = self._counts[Outcome.SUCCEEDED]
        judged = succeeded + self._counts[Outcome.FAILED]
        if not judged:
            return ""
        interval = wilson_interval(succeeded, judged)
        share = f"{100 * succeeded / judged:.0f}%"
        return f"{share} success ({100 * interval.low:.0f}-{100 * interval.high:.0f})"

    def _remaining(self, done: int) -> str:
        played = done - self._num_before
        if not played or done >= self._num_episodes:
            return ""
        seconds = (self._clock() - self._started_s) / played * (self._num_episodes - done)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return (
            f"ETA {hours}:{minutes:02d}:{seconds:02d}" if hours else f"ETA {minutes}:{seconds:02d}"
        )

    def _erase(self) -> None:
        if self._is_terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
