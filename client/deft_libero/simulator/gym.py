"""LIBERO's tasks behind Gymnasium's interface, for programs that were written against it.

Pictures are upright and actions are in robosuite's dialect, -1 to 1 with the gripper -1 open and +1
closed; `deft_core.peers.conventions.to_robosuite` makes such actions of a policy's answers.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from deft_libero.simulator.conventions import ACTION_DIM, WAIT_STEPS, wait_action
from deft_libero.simulator.environment import (
    Environment,
    EnvironmentSettings,
    Frame,
    open_environment,
)
from deft_libero.simulator.suites import find_suite

Seen = dict[str, NDArray[Any]]
STATE_LIMIT = 10.0  # metres and radians; the arm reaches neither


class LiberoGym(gymnasium.Env[Seen, NDArray[np.float64]]):
    """One task; the reward is 1 in the step that reaches its goal, which ends the episode.

    `reset(options={"trial": N})` chooses the initial state; without, they come in turn. A step is
    1/20 s. After the suite's limit of steps an episode is truncated.
    """

    def __init__(self, environment: Environment, size: int) -> None:
        self.environment = environment
        self.instruction = environment.task.instruction
        self.step_limit = find_suite(environment.task.suite).step_limit
        self.action_space = spaces.Box(-1.0, 1.0, (ACTION_DIM,), np.float64)
        self.observation_space: spaces.Space[Any] = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (size, size, 3), np.uint8),
                "state": spaces.Box(-STATE_LIMIT, STATE_LIMIT, (8,), np.float32),
            }
        )
        self._next_trial = self._num_steps = 0

    @classmethod
    def open(
        cls, suite: str, task: int, settings: EnvironmentSettings | None = None
    ) -> "LiberoGym":
        """Build a task's scene by its suite and number."""
        settings = settings or EnvironmentSettings()
        environment = open_environment(find_suite(suite).task(task), settings)
        return cls(environment, settings.frame_size)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Seen, dict[str, Any]]:
        """Start an episode and let things fall into place. Placements come from the settings."""
        super().reset(seed=seed)
        trial = (options or {}).get("trial", self._next_trial)
        self._next_trial = (trial + 1) % self.environment.num_trials
        self._num_steps = 0
        frame = self.environment.reset(trial)
        for _ in range(WAIT_STEPS):
            frame = self.environment.step(wait_action()).frame
        return _seen(frame), {"trial": trial, "instruction": self.instruction}

    def step(self, action: NDArray[np.float64]) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """Execute one action: observation, reward, terminated, truncated, info."""
        result = self.environment.step(np.asarray(action, dtype=np.float64))
        self._num_steps += 1
        is_late = self._num_steps >= self.step_limit and not result.done
        info = {"is_success": result.done}
        return _seen(result.frame), float(result.done), result.done, is_late, info

    def close(self) -> None:
        """Free simulator and renderer."""
        self.environment.close()


def _seen(frame: Frame) -> Seen:
    return {"image": frame.image, "state": frame.state, **frame.cameras}
