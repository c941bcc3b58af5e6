"""Whether a loaded policy can be trusted with a robot: it answers known frames before anybody asks.

Finds what no look at the files can: numbers that are each in order and together are not, a library
or a device that computes wrongly.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from deft_core.types import ActOptions, Observation
from deft_policies.base import ActionLimits, Policy, PolicyRequest
from deft_policies.errors import PolicyError

_INSTRUCTION = "pick up the cup"
_ROUNDING = 1e-6  # of the range

Same = Callable[[Observation], Observation]


def self_test(
    policy: Policy,
    limits: ActionLimits | None,
    plain_method: str | None = None,
    complete: Same = lambda observation: observation,
    asked: ActOptions | None = None,
) -> None:
    """Raise `PolicyError` unless every answer is finite, inside the limits, and repeats itself.

    Repeated are answers by `plain_method`, because others may take another way the second time.
    `complete` adds what the policy reads of an observation besides the frame. The options `asked`
    may be the start of a text, which need not hold an action.
    """
    info = policy.info
    key = info.default_statistics_key or info.statistics_keys[0]
    by_default = replace(asked or ActOptions(), statistics_key=key)
    plainly = replace(by_default, decoding=plain_method)
    for name, image in _known_frames(info.image_height, info.image_width).items():
        observation = complete(Observation(image, _INSTRUCTION))
        answers = [
            policy.act([PolicyRequest(observation, options=options)])[0]
            for options in (plainly, plainly, by_default)
        ]
        for answer in answers:
            if answer.error is None:
                _check(name, answer.chunk.actions, limits)
        first, again = (answer.chunk.actions for answer in answers[:2])
        texts = [answer.chunk.reasoning for answer in answers[:2]]
        if not np.array_equal(first, again) or texts[0] != texts[1]:
            raise PolicyError(
                f"the {name} frame was answered with {texts[0] or first.tolist()} and then with "
                f"{texts[1] or again.tolist()}; this device does not compute reliably"
            )


def _known_frames(height: int, width: int) -> dict[str, NDArray[np.uint8]]:
    across, down = np.linspace(0, 255, width), np.linspace(0, 255, height)
    red, green = np.meshgrid(across, down)
    smooth = np.stack([red, green, np.full_like(red, 128)], axis=2).astype(np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return {"smooth": smooth, "noisy": noise}


def _check(name: str, actions: NDArray[np.float64], limits: ActionLimits | None) -> None:
    answer = f"the {name} frame was answered with {actions.tolist()}"
    if not actions.size or not np.isfinite(actions).all():
        raise PolicyError(f"{answer}; expected finite actions")
    if limits is None:
        return
    slack = _ROUNDING * (limits.high - limits.low)
    if ((actions < limits.low - slack) | (actions > limits.high + slack)).any():
        raise PolicyError(
            f"{answer}; the statistics allow {limits.low.tolist()} to {limits.high.tolist()}"
        )
