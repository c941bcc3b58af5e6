"""Disturbances for demonstrations (DART): the noisy action is executed, the clean one is stored.

So that a policy trained on them has seen how to come back. The size of the jitter is drawn per
episode, hence some are calm; now and then a push of a few steps moves the hand further away.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.conventions import CLOSE, OPEN

_MOTIONS = 6


@dataclass(frozen=True)
class NoiseSettings:
    """How much to disturb, in action units (1.0 is the most an action can ask for)."""

    sigma: float = 0.2  # largest standard deviation of the jitter
    push_chance: float = 0.02  # of a push beginning, per step
    push_size: float = 0.8
    push_steps: int = 6  # longest
    slip_chance: float = 0.002  # of the gripper doing the opposite for a moment, per step
    slip_steps: int = 3  # longest


class Disturbance:
    """The noise of one episode; the same generator gives the same noise."""

    def __init__(self, settings: NoiseSettings, generator: np.random.Generator) -> None:
        self._settings, self._generator = settings, generator
        self.sigma = float(settings.sigma * generator.random())
        self._push: NDArray[np.float64] = np.zeros(_MOTIONS)
        self._push_left = self._slip_left = 0

    def disturb(self, action: NDArray[np.float64]) -> NDArray[np.float64]:
        """What to execute instead of a clean action of 7 robosuite values."""
        self._start()
        noisy = action.copy()
        noisy[:_MOTIONS] += self.sigma * self._generator.standard_normal(_MOTIONS)
        if self._push_left:
            self._push_left -= 1
            noisy[:_MOTIONS] += self._push
        if self._slip_left:
            self._slip_left -= 1
            noisy[-1] = OPEN if action[-1] == CLOSE else CLOSE
        return np.clip(noisy, -1.0, 1.0)

    def _start(self) -> None:
        settings, generator = self._settings, self._generator
        if not self._push_left and generator.random() < settings.push_chance:
            self._push_left = int(generator.integers(2, settings.push_steps + 1))
            direction = generator.standard_normal(_MOTIONS)
            self._push = settings.push_size * direction / np.linalg.norm(direction)
        if not self._slip_left and generator.random() < settings.slip_chance:
            self._slip_left = int(generator.integers(1, settings.slip_steps + 1))
