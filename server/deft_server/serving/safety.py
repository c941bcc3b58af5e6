"""What robots may execute of a policy's answer."""

import math

import numpy as np
from numpy.typing import NDArray

from deft_policies.base import ActionLimits
from deft_server.errors import UnsafeAnswerError
from deft_server.settings import ActionRange

# Actions are computed from the same statistics as the range; only rounding may set them apart.
ROUNDING = 1e-6


def checked_actions(
    actions: NDArray[np.float64],  # [step, action_dim]
    action_dim: int,
    limits: ActionLimits | None,
    beyond: ActionRange,
) -> NDArray[np.float64]:
    """Return what robots may execute of a policy's answer, the same array if nothing was clamped.

    Finite, of the right shape, in the range that the policy says; raises `UnsafeAnswerError` for
    what no robot should do. Limits on the change from one action to the next are the robot's, which
    alone knows what was executed.
    """
    if actions.shape[0] < 1 or actions.shape[1] != action_dim:
        raise UnsafeAnswerError(
            f"the policy's answer has shape {list(actions.shape)}, not [steps, {action_dim}]; it "
            "was withheld"
        )
    if not all(map(math.isfinite, actions.ravel().tolist())):  # quicker than numpy for so few
        raise UnsafeAnswerError("the policy's answer holds NaN or infinity; it was withheld")
    if limits is None:
        return actions
    slack = ROUNDING * (limits.high - limits.low)
    outside = (actions < limits.low - slack) | (actions > limits.high + slack)
    if not outside.any():
        return actions
    if not limits.may_exceed:
        step, dimension = np.argwhere(outside)[0]
        raise UnsafeAnswerError(
            f"the policy's answer has {actions[step, dimension]:.6g} in dimension {dimension} "
            f"of step {step}; the statistics allow {limits.low[dimension]:.6g} to "
            f"{limits.high[dimension]:.6g}; it was withheld"
        )
    return actions if beyond == "peer" else np.clip(actions, limits.low, limits.high)
