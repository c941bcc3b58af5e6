"""Chunks of actions, one action a period: what a robot executes next, and when to ask again.

An answer takes time. Where the robot goes on meanwhile, the answer's own actions for the periods
that are over are skipped. Counts periods; knows neither clocks nor threads nor limits.
"""

from collections import deque
from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deft_client.actions import Action, ActionRules
from deft_client.types import ActionChunk

_WAITS_KEPT = 10  # answers whose times are remembered


class Seam(Enum):
    """How a chunk gives way to the next one."""

    WAIT = "wait"  # the next one is asked for when nothing is left, and the robot holds meanwhile
    SWITCH = "switch"  # asked for early; the newest chunk's action for a period is executed
    ENSEMBLE = "ensemble"  # asked for all the time; the mean of all chunks with an action for it


class ActionQueue:
    """The actions still to be executed: `ask` with each frame, `refill` with its answer, and one
    `next` in every period.

    `execute` is how many actions of a chunk are used if the next answer is in time; where it is
    late, the others are better than nothing, except with `Seam.WAIT`.
    `weights` are of the chunks of an ensemble, the newest first; older ones do not count. Without
    them all count alike, and of a switch the newest.
    """

    def __init__(
        self,
        rules: ActionRules,
        seam: Seam = Seam.WAIT,
        execute: int | None = None,
        weights: Sequence[float] = (),
    ) -> None:
        if execute is not None and execute < 1:
            raise ValueError(f"execute must be at least 1 action of each chunk, got {execute}")
        if any(not weight > 0 for weight in weights):
            raise ValueError(f"weights must be above 0, got {weights}")
        self._switches, self._seam, self._execute = rules.switches, seam, execute
        self._weights = np.array(weights)
        self._chunks: list[NDArray[np.float64]] = []  # [step, action_dim], what is left of each
        self._waits: deque[int] = deque([0], maxlen=_WAITS_KEPT)  # periods from frame to answer
        self._num_periods = self._num_executed = 0
        self._num_wanted = 0  # actions until the next answer should be there
        self._asked: tuple[int, int] | None = None  # periods and actions when the frame was taken
        self._answered: int | None = None  # actions when the frame was taken of the last answer

    def __len__(self) -> int:
        return max(map(len, self._chunks), default=0)

    @property
    def is_due(self) -> bool:
        """Is it time to ask, so that the answer is there when it is wanted?

        Goes by the slowest of the latest answers. A caller asks one question at a time.
        """
        if self._seam is Seam.WAIT:
            return not self._chunks
        return self._seam is Seam.ENSEMBLE or self._num_wanted <= max(self._waits)

    def ask(self) -> int | None:
        """Say that a frame has been taken, before this period's action: `refill` answers it.

        Returns how many actions were executed since the last frame that was answered with several.
        """
        self._asked = self._num_periods, self._num_executed
        return None if self._answered is None else self._num_executed - self._answered

    def refill(self, chunk: ActionChunk) -> None:
        """Take the answer to the frame. It is void where the queue was cleared in between."""
        if self._asked is None:
            return
        (periods, executed), self._asked = self._asked, None
        self._waits.append(self._num_periods - periods)
        self._answered = executed if len(chunk.actions) > 1 else None
        # An answer that comes when all of it is over still says what to do last.
        first = min(self._num_executed - executed, len(chunk.actions) - 1)
        left = np.array(chunk.actions[first:])  # whoever made them may write them again
        self._num_wanted = max((self._execute or len(chunk.actions)) - first, 1)
        if self._seam is Seam.WAIT:
            left = left[: self._num_wanted]
        self._chunks = [*self._chunks, left] if self._seam is Seam.ENSEMBLE else [left]
        if len(self._weights):
            self._chunks = self._chunks[-len(self._weights) :]

    def next(self) -> Action | None:
        """Take this period's action. None where there is none: the robot holds."""
        self._num_periods += 1
        if not self._chunks:
            return None
        self._num_executed += 1
        self._num_wanted -= 1
        actions = np.array([chunk[0] for chunk in self._chunks])
        self._chunks = [chunk[1:] for chunk in self._chunks if len(chunk) > 1]
        if len(self._weights):
            return self._weighted(actions[::-1])
        action: Action = np.where(self._switches, actions[-1], np.mean(actions, axis=0))
        return action

    def _weighted(self, newest_first: NDArray[np.float64]) -> Action:
        mean = np.average(newest_first, axis=0, weights=self._weights[: len(newest_first)])
        # A switch is as most of the weight says, or the newest where it is even.
        nearest = np.abs(newest_first - mean).argmin(axis=0)
        switches = newest_first[nearest, np.arange(len(mean))]
        action: Action = np.where(self._switches, switches, mean)
        return action

    def clear(self) -> None:
        """Forget what is left, and the question under way: nothing from before is executed."""
        self._chunks, self._asked, self._num_wanted, self._answered = [], None, 0, None
