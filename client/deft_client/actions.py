"""What the numbers of an action mean to one robot, and which action it executes next.

There are two kinds of dimension. A *motion* is what the robot does in one period (a delta of the
pose, a velocity): zero stays. A *position* is where it shall be (an absolute joint, a gripper, each
of several grippers): zero is a place like any other, and staying means the position as it was. Of
either, a *switch* has nothing between its values (a gripper that is open or closed).

Actions come in chunks, one action a period. An answer takes time. Where the robot goes on
meanwhile, the answer's own actions for the periods that are over are skipped. Nothing here knows
clocks or threads.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from deft_core.errors import UnusableValueError, warn_renamed
from deft_core.types import ActionChunk, ChunkBlending

Action = NDArray[np.float64]  # [action_dim]
LARGEST = 1e12  # of any robot's units; beyond it float64 loses what a robot can move by
_WAITS_KEPT = 10  # answers whose times are remembered


@dataclass(frozen=True)
class Excess:
    """The limit that shortens an action most."""

    limit: str  # `max_step` or `max_change`
    dimension: int
    wanted: float
    allowed: float

    @property
    def ratio(self) -> float:
        """How many times too far it would go."""
        return self.wanted / self.allowed if self.allowed else np.inf


@dataclass(frozen=True)
class ActionRules:
    """The kinds and limits of a robot's actions; tuples are [action_dim], and None is no limit.

    `max_step` bounds what one period may do: of a motion its amount, of a position how far it is
    from the one before. `max_change` bounds how far any command is from the one before: a motion
    speeds up and slows down by so much a period. `low` and `high` bound the numbers themselves,
    and let a motion be zero.
    """

    is_motion: tuple[bool, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    max_step: tuple[float, ...] | None = None  # infinity where a dimension has no such limit
    is_switch: tuple[bool, ...] | None = None  # None: no dimension is
    max_change: tuple[float, ...] | None = None  # as max_step

    def __post_init__(self) -> None:
        for name in ("low", "high", "max_step", "is_switch", "max_change"):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != len(self.is_motion) or np.isnan(values).any():
                raise ValueError(
                    f"{name} must be {len(self.is_motion)} numbers, one for each entry of "
                    f"is_motion, got {values}"
                )
        if not self.is_motion or min((*(self.max_step or ()), *(self.max_change or ()), 0)) < 0:
            raise ValueError(
                f"at least one dimension, and no max_step or max_change below 0, are needed: {self}"
            )
        low, high = self._bounds(self.low, -np.inf), self._bounds(self.high)
        if (low > high).any() or ((low > 0) | (high < 0))[self.motions].any():
            raise ValueError(f"low must be at most high, and 0 between them for a motion: {self}")

    @property
    def motions(self) -> NDArray[np.bool_]:
        """Which dimensions are motions, [action_dim]; the others are positions."""
        return np.array(self.is_motion)

    @property
    def switches(self) -> NDArray[np.bool_]:
        """Which dimensions have nothing between their values, [action_dim]."""
        return np.array(self.is_switch or (False,) * len(self.is_motion))

    def check(self, actions: NDArray[np.float64]) -> None:
        """Refuse actions [step, action_dim] of another size, or beyond `low` and `high`."""
        check_actions(actions, len(self.is_motion))
        low, high = self._bounds(self.low, -np.inf), self._bounds(self.high)
        outside = (actions < low) | (actions > high)
        if outside.any():
            step, dimension = np.argwhere(outside)[0]
            raise UnusableValueError(
                "actions",
                f"{actions[step, dimension]:.6g} in dimension {dimension} of step {step} is "
                f"outside the robot's limits; nothing of the answer was executed",
            )

    def limited(self, action: Action, before: Action | None) -> Action | None:
        """Return the action as far as the rules allow: what may be commanded.

        `before` is the action commanded last, or one that holds what was measured. None where
        positions are unknown but needed: then nobody can say how far the action would go.
        """
        steps, changes = self._bounds(self.max_step), self._bounds(self.max_change)
        if before is None:
            if np.isfinite(np.minimum(steps, changes)[~self.motions]).any():
                return None
            before = np.zeros_like(action)  # of motions; what else there is has no limit
        near = np.clip(action, self._bounds(self.low, -np.inf), self._bounds(self.high))
        near = np.clip(near, before - changes, before + changes)
        origin = np.where(self.motions, 0.0, before)
        limited: Action = np.clip(near, origin - steps, origin + steps)
        return limited

    def excess(self, action: Action, before: Action | None) -> Excess | None:
        """Say which limit keeps an action from being commanded as it is; None where none does."""
        before = np.zeros_like(action) if before is None else before
        moved = np.abs(action - np.where(self.motions, 0.0, before))
        changed = np.abs(action - before)
        excesses = [
            Excess(name, dimension, float(wanted[dimension]), float(allowed[dimension]))
            for name, wanted, allowed in (
                ("max_step", moved, self._bounds(self.max_step)),
                ("max_change", changed, self._bounds(self.max_change)),
            )
            for dimension in np.flatnonzero(wanted > allowed).tolist()
        ]
        return max(excesses, key=lambda one: one.ratio, default=None)

    def hold(self, before: Action | None) -> Action | None:
        """Return the action that stays: no motion, every position as it was; None where unknown."""
        if before is None:
            return np.zeros(len(self.is_motion)) if all(self.is_motion) else None
        return np.where(self.motions, 0.0, before)

    def _bounds(
        self, limits: tuple[float, ...] | None, without: float = np.inf
    ) -> NDArray[np.float64]:
        return np.array(limits or (without,) * len(self.is_motion))


def check_actions(
    actions: NDArray[np.float64], action_dim: int | None = None, max_steps: int | None = None
) -> None:
    """Refuse actions no robot can execute: none at all, not finite, or of another size."""
    steps, dimensions = actions.shape
    expected = dimensions if action_dim is None else action_dim
    if not steps or not dimensions or dimensions != expected or steps > (max_steps or steps):
        wanted = "at least one step" if max_steps is None else f"1 to {max_steps} steps"
        raise UnusableValueError(
            "actions",
            f"must be {wanted} of {action_dim or 'at least 1'} numbers, got "
            f"{list(actions.shape)}; is this the server that the robot was set up for?",
        )
    if not (np.abs(actions) <= LARGEST).all():
        raise UnusableValueError("actions", f"must be finite and at most {LARGEST:g} in amount")


class ActionQueue:
    """The actions still to be executed: `ask` with each frame, `refill` with its answer, and one
    `next` in every period.

    `execute` is how many actions of a chunk are used if the next answer is in time; where it is
    late, the others are better than nothing, except with `ChunkBlending.WAIT`. With `blending=None`
    chunks of one action go by `SWITCH` and longer ones by `WAIT`.
    `weights` are of the chunks of an ensemble, the newest first; older ones do not count. Without
    them all count alike, and of a switch the newest.
    """

    def __init__(
        self,
        rules: ActionRules,
        blending: ChunkBlending | None = ChunkBlending.WAIT,
        execute: int | None = None,
        weights: Sequence[float] = (),
        seam: ChunkBlending | EllipsisType | None = ...,  # the earlier name of `blending`
    ) -> None:
        if not isinstance(seam, EllipsisType):
            warn_renamed("ActionQueue(seam=...)", "blending")
            blending = seam
        if execute is not None and execute < 1:
            raise ValueError(f"execute must be at least 1 action of each chunk, got {execute}")
        if any(not weight > 0 for weight in weights):
            raise ValueError(f"weights must be above 0, got {weights}")
        self._switches, self._execute = rules.switches, execute
        self._given = self.blending = blending  # `blending` is what the last chunk goes by
        self._weights = np.array(weights)
        self._chunks: list[NDArray[np.float64]] = []  # [step, action_dim], what is left of each
        self._waits: deque[int] = deque([0], maxlen=_WAITS_KEPT)  # periods from frame to answer
        self._num_periods = self._num_executed = 0
        self._num_wanted = 0  # actions until the next answer should be there
        self.chunk_length = 1  # of the last answer
        self._asked: tuple[int, int] | None = None  # periods and actions when the frame was taken
        self._answered: int | None = None  # actions when the frame was taken of the last answer

    def __len__(self) -> int:
        return max(map(len, self._chunks), default=0)

    @property
    def is_due(self) -> bool:
        """Is it time to ask, so that the answer is there when it is wanted?

        Goes by the slowest of the latest answers. A caller asks one question at a time.
        """
        if self.blending in (None, ChunkBlending.WAIT):
            return not self._chunks
        return self.blending is ChunkBlending.ENSEMBLE or self._num_wanted <= max(self._waits)

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
        self.chunk_length = len(chunk.actions)
        if self._given is None:
            self.blending = ChunkBlending.SWITCH if self.chunk_length == 1 else ChunkBlending.WAIT
        self._answered = executed if len(chunk.actions) > 1 else None
        # An answer that comes when all of it is over still says what to do last.
        first = min(self._num_executed - executed, len(chunk.actions) - 1)
        left = np.array(chunk.actions[first:])  # whoever made them may write them again
        self._num_wanted = max((self._execute or len(chunk.actions)) - first, 1)
        if self.blending is ChunkBlending.WAIT:
            left = left[: self._num_wanted]
        self._chunks = [*self._chunks, left] if self.blending is ChunkBlending.ENSEMBLE else [left]
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
