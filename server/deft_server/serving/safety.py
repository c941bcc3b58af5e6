"""Stands between the policy's answers and the robots: finite, in range, not too sudden.

Knows nothing of HTTP or queues. What the range is, the policy says.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from deft_policies.base import ActionLimits
from deft_policies.errors import RequestError
from deft_server.errors import UnsafeAnswerError
from deft_server.hosting.host import HostedPolicy
from deft_server.serving.sessions import RobotSession
from deft_server.settings import ActionRange, OnSuddenStep, Settings, SettingsError

# Actions are computed from the same statistics as the range; only rounding may set them apart.
ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class CheckedActions:
    """Actions that a robot may execute."""

    actions: NDArray[np.float64]  # [step, action_dim]
    is_clamped: bool = False


class SafetyGuard:
    """Checks every answer of one policy."""

    def __init__(self, policy: HostedPolicy, settings: Settings) -> None:
        self._limits_by_key = policy.limits
        self._action_dim = policy.info.action_dim
        self._on_sudden_step = settings.on_sudden_step
        self._range = settings.range
        self._step_limits = {
            pattern: np.array(row) for pattern, row in settings.step_limits.items()
        }
        self._limits: dict[str | None, ActionLimits] = {}
        for pattern, limit in self._step_limits.items():
            if limit.size != self._action_dim:
                raise SettingsError(
                    f"step_limits of {pattern!r} has {limit.size} numbers, but an action of "
                    f"{policy.info.policy} has {self._action_dim} dimensions"
                )

    def check(
        self,
        actions: NDArray[np.float64],  # [step, action_dim]
        session: RobotSession,
        statistics_key: str | None,
    ) -> CheckedActions:
        """Return what may be executed, or raise `UnsafeAnswerError`."""
        if actions.shape[0] < 1 or actions.shape[1] != self._action_dim:
            raise UnsafeAnswerError(
                f"the policy's answer has shape {list(actions.shape)}, not "
                f"[steps, {self._action_dim}]; it was withheld"
            )
        if not all(map(math.isfinite, actions.ravel().tolist())):  # quicker than numpy for so few
            raise UnsafeAnswerError("the policy's answer holds NaN or infinity; it was withheld")
        limits = self._limits_of(statistics_key)
        in_range = actions if limits is None else self._limit_range(actions, limits)
        step_limit = _first_match(self._step_limits, session) if self._step_limits else None
        if step_limit is None:
            return CheckedActions(in_range, is_clamped=in_range is not actions)
        safe = self._limit_steps(in_range, _last_action(session), step_limit)
        return CheckedActions(safe, is_clamped=safe is not actions)

    def require_memory(self, session: RobotSession) -> None:
        """Raise `RequestError` where steps are limited, but nobody knows the action before."""
        if session.session_id is None and _first_match(self._step_limits, session) is not None:
            raise RequestError(
                "session_id",
                f"needed: step_limits hold for frames of {session.caller}, and are measured from "
                "the session's last action",
            )

    def hold(self, session: RobotSession, statistics_key: str | None) -> NDArray[np.float64] | None:
        """Return the action that keeps a robot where it is, or None where nobody knows how.

        Nobody does where the policy tells no limits, or where a gripper was never commanded.
        """
        limits = self._limits_of(statistics_key)
        if limits is None:
            return None
        last = _last_action(session)
        if last is None:
            if not limits.is_motion.all():
                return None
            last = np.zeros_like(limits.low)
        return np.where(limits.is_motion, 0.0, last)[None, :]

    def _limits_of(self, statistics_key: str | None) -> ActionLimits | None:
        if self._limits_by_key is None:
            return None
        if statistics_key not in self._limits:
            self._limits[statistics_key] = self._limits_by_key(statistics_key)
        return self._limits[statistics_key]

    def _limit_range(
        self, actions: NDArray[np.float64], limits: ActionLimits
    ) -> NDArray[np.float64]:
        """Return the same array where nothing is beyond the range, or where that may be."""
        slack = ROUNDING * (limits.high - limits.low)
        outside = (actions < limits.low - slack) | (actions > limits.high + slack)
        if not outside.any():
            return actions
        if not limits.may_exceed:
            raise _beyond(actions, outside, limits)
        if self._range is ActionRange.PEER:
            return actions
        return np.clip(actions, limits.low, limits.high)

    def _limit_steps(
        self,
        actions: NDArray[np.float64],
        last: NDArray[np.float64] | None,
        limit: NDArray[np.float64],  # [action_dim]
    ) -> NDArray[np.float64]:
        limited = limit_steps(actions, last, limit)
        if np.array_equal(limited, actions):
            return actions
        if self._on_sudden_step is OnSuddenStep.ERROR:
            raise UnsafeAnswerError(
                "a step of the policy's answer is larger than step_limits allow"
            )
        return limited


def _last_action(session: RobotSession) -> NDArray[np.float64] | None:
    last = session.memory.last_action
    return None if last is None else np.array(last)


def limit_steps(
    actions: NDArray[np.float64],  # [step, action_dim]
    last: NDArray[np.float64] | None,  # [action_dim]
    limit: NDArray[np.float64],  # [action_dim]
) -> NDArray[np.float64]:
    """Return the actions with no step larger than the limit, each measured from the one before."""
    limited = np.empty_like(actions)
    for index, action in enumerate(actions):
        limited[index] = action if last is None else np.clip(action, last - limit, last + limit)
        last = limited[index]
    return limited


def _beyond(
    actions: NDArray[np.float64], outside: NDArray[np.bool_], limits: ActionLimits
) -> UnsafeAnswerError:
    step, dimension = np.argwhere(outside)[0]
    return UnsafeAnswerError(
        f"the policy's answer has {actions[step, dimension]:.6g} in dimension {dimension} of "
        f"step {step}; the statistics allow {limits.low[dimension]:.6g} to "
        f"{limits.high[dimension]:.6g}; it was withheld"
    )


def _first_match(
    limits: Mapping[str, NDArray[np.float64]], session: RobotSession
) -> NDArray[np.float64] | None:
    """Return the limit whose pattern fits the session id, or the caller's name."""
    names = (session.session_id, session.caller)
    for pattern, limit in limits.items():
        if any(name is not None and fnmatchcase(name, pattern) for name in names):
            return limit
    return None
