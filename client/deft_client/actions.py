"""What the numbers of an action mean to one robot.

There are two kinds of dimension. A *motion* is what the robot does in one period (a delta of the
pose, a velocity): zero stays. A *position* is where it shall be (an absolute joint, a gripper, each
of several grippers): zero is a place like any other, and staying means the position as it was. Of
either, a *switch* has nothing between its values (a gripper that is open or closed).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_client.errors import UnusableValueError

Action = NDArray[np.float64]  # [action_dim]
LARGEST = 1e12  # of any robot's units; beyond it float64 loses what a robot can move by


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
