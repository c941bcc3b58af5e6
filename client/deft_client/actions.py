"""The actions of a chunk, one at a time, and what their numbers mean to one robot.

There are two kinds of dimension. A *motion* is what the robot does in one period (a delta of the
pose, a velocity): zero stays. A *position* is where it shall be (an absolute joint, a gripper, each
of several grippers): zero is a place like any other, and staying means the position as it was.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_client.errors import UnusableValueError
from deft_client.types import ActionChunk

Action = NDArray[np.float64]  # [action_dim]


@dataclass(frozen=True)
class ActionRules:
    """The kinds and limits of a robot's actions; tuples are [action_dim], and None is no limit.

    `max_step` bounds what one period may do: of a motion its amount, of a position how far it is
    from the one before. `low` and `high` bound the numbers themselves.
    """

    is_motion: tuple[bool, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    max_step: tuple[float, ...] | None = None  # infinity where a dimension has no such limit

    def __post_init__(self) -> None:
        for name in ("low", "high", "max_step"):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != len(self.is_motion) or np.isnan(values).any():
                raise ValueError(
                    f"{name} must be {len(self.is_motion)} numbers, one for each entry of "
                    f"is_motion, got {values}"
                )
        if not self.is_motion or (self.max_step is not None and min(self.max_step) < 0):
            raise ValueError(f"at least one dimension and no max_step below 0 are needed: {self}")

    def check(self, actions: NDArray[np.float64]) -> None:
        """Refuse actions [step, action_dim] of another size, or beyond `low` and `high`."""
        check_actions(actions, len(self.is_motion))
        low = -np.inf if self.low is None else np.array(self.low)
        high = np.inf if self.high is None else np.array(self.high)
        outside = (actions < low) | (actions > high)
        if outside.any():
            step, dimension = np.argwhere(outside)[0]
            raise UnusableValueError(
                "actions",
                f"{actions[step, dimension]:.6g} in dimension {dimension} of step {step} is "
                f"outside the robot's limits; nothing of the answer was executed",
            )

    def limited(self, action: Action, before: Action | None) -> Action | None:
        """Return the action as far as `max_step` allows.

        `before` holds the positions commanded last, or measured. None where they are unknown but
        needed: then nobody can say how far the action would go.
        """
        if self.max_step is None:
            return action
        steps = np.array(self.max_step)
        if before is None:
            if np.isfinite(steps[~self._motions]).any():
                return None
            before = np.zeros_like(action)  # of motions; what else there is has no limit
        origin = np.where(self._motions, 0.0, before)
        return np.clip(action, origin - steps, origin + steps)

    def hold(self, before: Action | None) -> Action | None:
        """Return the action that stays: no motion, every position as it was; None where unknown."""
        if before is None:
            return np.zeros(len(self.is_motion)) if all(self.is_motion) else None
        return np.where(self._motions, 0.0, before)

    @property
    def _motions(self) -> NDArray[np.bool_]:
        return np.array(self.is_motion)


def check_actions(actions: NDArray[np.float64], action_dim: int | None = None) -> None:
    """Refuse actions no robot can execute: none at all, NaN, infinity, or of another size."""
    steps, dimensions = actions.shape
    expected = dimensions if action_dim is None else action_dim
    if not steps or not dimensions or dimensions != expected:
        raise UnusableValueError(
            "actions",
            f"must be at least one step of {action_dim or 'at least 1'} numbers, got "
            f"{list(actions.shape)}; is this the server that the robot was set up for?",
        )
    if not np.isfinite(actions).all():
        raise UnusableValueError("actions", "must be finite, got NaN or infinity")


class ActionQueue:
    """The actions still to be executed.

    `execute` limits how many actions of a chunk are used before a fresh observation is worth more
    than the rest of the plan; None means all of them.
    """

    def __init__(self, execute: int | None = None) -> None:
        if execute is not None and execute < 1:
            raise ValueError(f"execute must be at least 1 action of each chunk, got {execute}")
        self._execute = execute
        self._actions: deque[Action] = deque()

    def __len__(self) -> int:
        return len(self._actions)

    @property
    def is_empty(self) -> bool:
        """Is it time to ask the policy again?"""
        return not self._actions

    def refill(self, chunk: ActionChunk) -> None:
        """Replace what is left by the actions of a newer chunk."""
        self._actions = deque(chunk.actions[: self._execute])

    def next(self) -> Action:
        """Take the next action."""
        if not self._actions:
            raise IndexError("the queue is empty: refill it with the answer to a new observation")
        return self._actions.popleft()

    def clear(self) -> None:
        """Forget what is left: an episode starts, or something went wrong."""
        self._actions.clear()
