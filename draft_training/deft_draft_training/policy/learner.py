"""A policy that plays while the expert looks over its shoulder (DAgger).

It decides what is executed, so that the frames are those it will meet itself; what is stored are
the expert's labels. Where it does not move any more the expert leads it on for a few steps, as an
episode that hangs shows the same frame over and over; and so where its gripper does the opposite
of what is needed, as an episode played out with empty fingers teaches nothing.
"""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.conventions import METRES_PER_UNIT, to_robosuite
from deft_client.libero.demos import Actor, DemoKey, DemosSettings
from deft_client.libero.environment import Frame, LiberoEnvironment
from deft_client.libero.expert_pick import Label
from deft_client.libero.scene import Scene
from deft_client.types import Observation
from deft_policies.base import ActRequest, Policy
from deft_policies.openvla.load import load_policy
from deft_policies.openvla.options import OpenVLAOptions, Precision


@dataclass(frozen=True)
class TakeoverSettings:
    """When the expert leads, and for how long."""

    stuck_steps: int = 12  # without moving further than this:
    stuck_metres: float = 0.15 * METRES_PER_UNIT
    wrong_steps: int = 6  # in a row with the gripper the wrong way
    steps: int = 12
    chance: float = 0.01  # per step, so that what comes later is seen even by a poor policy


class Learner:
    """Plays one episode with a policy."""

    def __init__(
        self,
        policy: Policy,
        instruction: str,
        takeover: TakeoverSettings,
        generator: np.random.Generator,
    ) -> None:
        self._policy, self._instruction = policy, instruction
        self._takeover, self._generator = takeover, generator
        self._session = policy.open_session()
        self._places: deque[NDArray[np.float64]] = deque(maxlen=takeover.stuck_steps)
        self._led = self._num_wrong = 0

    @property
    def sigma(self) -> float:
        """Nothing is added to what the policy says."""
        return 0.0

    def act(self, frame: Frame, scene: Scene, label: Label) -> NDArray[np.float64]:
        """The policy's action, or the expert's while it leads."""
        request = ActRequest(Observation(frame.image, self._instruction), self._session)
        answer = to_robosuite(self._policy.act([request])[0].actions[0])
        if not self._led and self._needs_help(scene, answer[-1] != label.action[-1]):
            self._led, self._num_wrong = self._takeover.steps, 0
            self._places.clear()
        if self._led:
            self._led -= 1
            return label.action
        return answer

    def _needs_help(self, scene: Scene, is_wrong: bool) -> bool:
        self._num_wrong = self._num_wrong + 1 if is_wrong else 0
        self._places.append(np.append(scene.gripper.position, scene.opening))
        if self._num_wrong >= self._takeover.wrong_steps:
            return True
        if self._generator.random() < self._takeover.chance:
            return True
        if len(self._places) < self._takeover.stuck_steps:
            return False
        return bool(np.ptp(np.stack(self._places), axis=0).max() < self._takeover.stuck_metres)


@dataclass(frozen=True)
class LearnerFactory:
    """Makes learners in whichever process it is called; each loads the policy once."""

    checkpoint: Path
    statistics_key: str
    takeover: TakeoverSettings = field(default_factory=TakeoverSettings)

    def __call__(
        self, environment: LiberoEnvironment, settings: DemosSettings, key: DemoKey
    ) -> Actor:
        """A learner for the episode that has just begun."""
        policy = _Loaded.policy(self.checkpoint, self.statistics_key)
        generator = np.random.default_rng((settings.seed, key.task, key.episode))
        return Learner(policy, environment.task.instruction, self.takeover, generator)


class _Loaded:
    """The policy this process has loaded."""

    _checkpoint: Path | None = None
    _policy: Policy | None = None

    @classmethod
    def policy(cls, checkpoint: Path, statistics_key: str) -> Policy:
        if cls._policy is None or cls._checkpoint != checkpoint:
            options = OpenVLAOptions(
                checkpoint=str(checkpoint),
                statistics_key=statistics_key,
                device="cpu",
                precision=Precision.FLOAT32,
                decoding="autoregressive",
                num_threads=1,
            )
            cls._policy, cls._checkpoint = load_policy(options), checkpoint
        return cls._policy
