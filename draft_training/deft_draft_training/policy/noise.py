"""What is added to actions so that demonstrations also show how to come back (DART).

The noisy action is executed, the clean one is the label. Noise is a few random pushes on top of a
jitter whose size is drawn once per episode, so that there are calm episodes too.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.conventions import CLOSE, OPEN


@dataclass(frozen=True)
class NoiseConfig:
    """How much is added. Sizes are in action units: 1.0 is the most an action can ask for."""

    jitter: float = 0.25  # largest standard deviation of an episode's jitter
    push_chance: float = 0.02  # per step, that a push begins
    push_steps: int = 6  # longest push
    push_size: float = 0.9
    drop_chance: float = 0.003  # per step, that the fingers open or close against the label


class ActionNoise:
    """The disturbance of one episode."""

    def __init__(self, config: NoiseConfig, generator: np.random.Generator) -> None:
        self._config, self._generator = config, generator
        self._jitter = config.jitter * generator.random()
        self._push: NDArray[np.float64] = np.zeros(6)
        self._push_left = 0
        self._drop_left = 0

    def disturb(self, action: NDArray[np.float64]) -> NDArray[np.float64]:
        """The action to execute instead of a clean one, in robosuite's values."""
        self._begin()
        noisy = action.copy()
        noisy[:6] += self._jitter * self._generator.standard_normal(6)
        if self._push_left:
            self._push_left -= 1
            noisy[:6] += self._push
        if self._drop_left:
            self._drop_left -= 1
            noisy[6] = OPEN if action[6] == CLOSE else CLOSE
        return np.clip(noisy, -1.0, 1.0)

    def _begin(self) -> None:
        config, generator = self._config, self._generator
        if not self._push_left and generator.random() < config.push_chance:
            self._push_left = int(generator.integers(2, config.push_steps + 1))
            direction = generator.standard_normal(3)
            self._push[:3] = config.push_size * direction / np.linalg.norm(direction)
            self._push[3:] = 0.3 * config.push_size * generator.uniform(-1, 1, 3)
        if not self._drop_left and generator.random() < config.drop_chance:
            self._drop_left = int(generator.integers(1, 4))
