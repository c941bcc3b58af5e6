"""Chunks of actions that overlap: what a robot executes in each period, and when to ask again.

An answer takes time, and the robot goes on: what it executes meanwhile is settled, and the answer's
own actions for those periods are void. Counts periods; knows neither clocks nor threads nor robots.
"""

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deft_client.actions import Action, ActionRules
from deft_client.types import ActionChunk

_WAITS_KEPT = 10  # answers whose times are remembered
# Of being off a chunk's way, per period. Larger is smoother, smaller is sooner where it should be.
_SHARE_LEFT = 0.7


class Seam(Enum):
    """How a chunk gives way to the next one."""

    WAIT = "wait"  # the next one is asked for when nothing is left, and the robot holds
    SWITCH = "switch"  # asked for early; what the newest chunk has for a period is executed
    ENSEMBLE = (
        "ensemble"  # asked for all the time; the mean of all that have something for a period
    )
    FREEZE = "freeze"  # the newest chunk, led up to from what was executed before it came


@dataclass(frozen=True, eq=False)
class Moment:
    """When a frame was taken: after so many periods, and so many actions with this sum."""

    periods: int = 0
    actions: int = 0
    moved: Action | float = 0.0  # [action_dim]


@dataclass(frozen=True)
class SeamSizes:
    """The largest change of any dimension, switches left out, from one action to the next.

    Where commands change more than chunks do inside, as they were answered, they do so at seams.
    From a hold nothing is counted.
    """

    commanded: float = 0.0
    inside: float = 0.0


@dataclass(frozen=True, eq=False)
class _Entry:
    """An action to execute, and how many chunks it is the mean of."""

    action: Action
    num_chunks: int = 1


class ActionQueue:
    """The actions still to be executed: one call of `next` in every period.

    `execute` is how many actions of a chunk are used if the next answer is in time; where it is
    late, the others are better than nothing, except with `Seam.WAIT`.
    """

    def __init__(
        self, rules: ActionRules, seam: Seam = Seam.FREEZE, execute: int | None = None
    ) -> None:
        if execute is not None and execute < 1:
            raise ValueError(f"execute must be at least 1 action of each chunk, got {execute}")
        self._rules, self._seam, self._execute = rules, seam, execute
        self._sizes = SeamSizes()
        self._waits: deque[int] = deque([0], maxlen=_WAITS_KEPT)
        self._now = Moment()
        self._left: deque[_Entry] = deque()
        self._last: Action | None = None  # None after a hold
        self._num_wanted = 0  # actions until the next answer should be there

    def __len__(self) -> int:
        return len(self._left)

    @property
    def is_empty(self) -> bool:
        """Is there nothing to execute?"""
        return not self._left

    @property
    def is_due(self) -> bool:
        """Is it time to ask, so that the answer is there when it is wanted?

        From the slowest of the latest answers; a caller asks one question at a time.
        """
        if self._seam is Seam.WAIT:
            return self.is_empty
        if self._seam is Seam.ENSEMBLE:
            return True
        return self._num_wanted <= max(self._waits)

    @property
    def now(self) -> Moment:
        """For a frame that is taken before this period's action."""
        return self._now

    @property
    def seams(self) -> SeamSizes:
        """How smooth the commands were."""
        return self._sizes

    def refill(self, chunk: ActionChunk, asked: Moment | None = None) -> None:
        """Take the answer to the frame of a moment, or of now, in place of what is left."""
        asked = asked or self._now
        self._waits.append(self._now.periods - asked.periods)
        actions = chunk.actions
        inside = self._largest(np.diff(actions, axis=0), self._sizes.inside)
        self._sizes = replace(self._sizes, inside=inside)
        executed = self._now.actions - asked.actions
        # An answer that comes when all of it is over still says what to do last.
        first = min(executed, len(actions) - 1)
        self._num_wanted = max((self._execute or len(actions)) - first, 1)
        leads = self._seam is Seam.FREEZE and self._last is not None
        if leads and 0 < executed < len(actions):
            left = self._led_up_to(actions, first, self._now.moved - asked.moved)
        else:
            left = [_Entry(action) for action in actions[first:]]
        if self._seam is Seam.ENSEMBLE:
            left = [*map(self._mean, self._left, left), *left[len(self._left) :]]
        self._left = deque(left[: self._num_wanted] if self._seam is Seam.WAIT else left)

    def next(self) -> Action | None:
        """Take this period's action. None where there is none: the robot holds."""
        self._now = replace(self._now, periods=self._now.periods + 1)
        if not self._left:
            self._last = None
            return None
        action = self._left.popleft().action
        if self._last is not None:
            commanded = self._largest(action - self._last, self._sizes.commanded)
            self._sizes = replace(self._sizes, commanded=commanded)
        self._num_wanted -= 1
        self.note(action)
        return action

    def note(self, action: Action) -> None:
        """Say what moved the robot on in a period for which there was no action here."""
        now = self._now
        self._last = action
        self._now = replace(now, actions=now.actions + 1, moved=now.moved + action)

    def clear(self) -> None:
        """Forget what is left: an episode starts, or something went wrong."""
        self._left.clear()
        self._last, self._num_wanted = None, 0

    def _mean(self, old: _Entry, new: _Entry) -> _Entry:
        count = old.num_chunks + 1
        mean = old.action + (new.action - old.action) / count
        return _Entry(np.where(self._rules.switches, new.action, mean), count)

    def _led_up_to(
        self, actions: NDArray[np.float64], first: int, moved: Action | float
    ) -> list[_Entry]:
        """The actions from `first` on, changed so that they start from what was executed.

        The robot is off the chunk's way: in place, because it was moved otherwise while the answer
        was awaited, and in speed. Both fade as those of a spring that is damped critically do.
        """
        assert self._last is not None
        rules, before = self._rules, actions[first - 1]
        off = np.where(rules.motions, moved - actions[:first].sum(axis=0), self._last - before)
        speed = np.where(rules.motions, self._last - before, 0.0)
        entries = []
        for action in actions[first:]:
            speed = _SHARE_LEFT**2 * speed - (1 - _SHARE_LEFT) ** 2 * off
            off = off + speed
            change = np.where(rules.motions, speed, off)
            entries.append(_Entry(np.where(rules.switches, action, action + change)))
        return entries

    def _largest(self, steps: NDArray[np.float64], known: float) -> float:
        """The largest of changes [..., action_dim], or what is known where that is larger."""
        return max(known, float(np.abs(steps[..., ~self._rules.switches]).max(initial=0.0)))
