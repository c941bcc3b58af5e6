"""Plays episodes in LIBERO and stores what the expert would have done at every step.

Who acts decides what the data are: the expert with noise gives demonstrations, a policy gives
DAgger data, in which the expert takes over for a while whenever the policy has got stuck.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.conventions import WAIT_STEPS, from_robosuite, to_robosuite, wait_action
from deft_client.libero.environment import LiberoEnvironment
from deft_client.libero.expert import Expert, Watch
from deft_client.libero.expert_pick import Label, Phase
from deft_client.libero.scene import Scene
from deft_client.types import Image
from deft_draft_training.policy.episodes import LabelledEpisode
from deft_draft_training.policy.noise import ActionNoise, NoiseConfig

_DECIMETRES = 10.0  # positions of a few decimetres become numbers of order one
_TAKEOVER_STEPS = 12


class Actor(Protocol):
    """A policy as the collection sees it: a frame of its own size to an action."""

    def begin(self, instruction: str) -> None:
        """Start an episode."""

    def act(self, frame: Image) -> NDArray[np.float64]:
        """The action for a frame, in the training data's dialect."""


@dataclass(frozen=True)
class CollectConfig:
    """What is played. Trials up to 39 are for training, 40 to 49 for evaluation only."""

    suite: str = "libero_object"
    tasks: tuple[int, ...] = (0, 1, 6)
    trials: tuple[int, ...] = tuple(range(40))
    rounds: int = 1  # episodes per trial
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    max_steps: int = 220
    seed: int = 0


@dataclass(frozen=True)
class EpisodeKey:
    """Which episode: its place on disk and its random numbers follow from this alone."""

    task: int
    trial: int
    round: int

    def path(self, folder: Path) -> Path:
        """Where the episode is stored."""
        return folder / f"task{self.task}" / f"trial{self.trial:02d}_round{self.round:02d}.npz"


def episode_keys(config: CollectConfig) -> list[EpisodeKey]:
    """All episodes of a collection, tasks outermost, because a task's scene is slow to build."""
    return [
        EpisodeKey(task, trial, number)
        for task in config.tasks
        for number in range(config.rounds)
        for trial in config.trials
    ]


def play(
    environment: LiberoEnvironment,
    key: EpisodeKey,
    config: CollectConfig,
    fit: Callable[[Image], Image],
    actor: Actor | None,
) -> LabelledEpisode:
    """Play one episode and label every step. Without an actor the expert acts, with noise."""
    generator = np.random.default_rng((config.seed, key.task, key.trial, key.round))
    environment.restart(key.trial)
    for _ in range(WAIT_STEPS):
        environment.advance(wait_action())
    player = _Player(environment, Expert.for_episode(environment), fit)
    noise = ActionNoise(config.noise, generator)
    if actor is not None:
        actor.begin(environment.task.instruction)
    done = False
    takeover = 0
    for _ in range(config.max_steps):
        frame, label, is_stuck = player.look()
        takeover = _TAKEOVER_STEPS if is_stuck else max(0, takeover - 1)
        if actor is None or takeover:
            action = noise.disturb(label.action)
        else:
            action = to_robosuite(actor.act(frame))
        player.store(action)
        done = environment.advance(action)
        if done:
            break
    return player.episode(done)


class _Player:
    """Gathers the steps of one episode."""

    def __init__(
        self, environment: LiberoEnvironment, expert: Expert, fit: Callable[[Image], Image]
    ) -> None:
        self._environment, self._expert, self._fit = environment, expert, fit
        self._watch = Watch()
        self._frames: list[Image] = []
        self._labels: list[Label] = []
        self._scenes: list[Scene] = []
        self._states: list[NDArray[np.float32]] = []
        self._executed: list[NDArray[np.float64]] = []

    def look(self) -> tuple[Image, Label, bool]:
        """The frame as the policy sees it, the expert's label, and whether nothing moves."""
        scene = self._environment.scene()
        before = self._watch.attempt
        attempt = self._watch.see(scene)
        label = self._expert.label(scene, attempt)
        view = self._environment.frame()
        frame = self._fit(view.image)
        self._frames.append(frame)
        self._labels.append(label)
        self._scenes.append(scene)
        self._states.append(view.state)
        return frame, label, attempt > before

    def store(self, action: NDArray[np.float64]) -> None:
        """Take note of what was executed after the last look."""
        self._executed.append(from_robosuite(action))

    def episode(self, succeeded: bool) -> LabelledEpisode:
        """Everything seen so far."""
        pairs = list(zip(self._scenes, self._labels, strict=True))
        return LabelledEpisode(
            instruction=self._environment.task.instruction,
            succeeded=succeeded,
            frames=self._frames,
            labels=np.stack([from_robosuite(one.action) for one in self._labels]),
            executed=np.stack(self._executed),
            positions=np.stack([_positions(scene, label) for scene, label in pairs]),
            phases=np.array([one.phase.value for one in self._labels]),
            state=np.stack(self._states),
        )


def _positions(scene: Scene, label: Label) -> NDArray[np.float32]:
    """What the auxiliary head is asked for: where everything that matters is, in decimetres."""
    hand = scene.gripper.position
    values = (
        hand,
        label.object_position,
        label.goal_position,
        label.object_position - hand,
        label.target - hand,
        np.array([scene.opening]),
    )
    return (np.concatenate(values) * _DECIMETRES).astype(np.float32)


def weight(phase: str) -> float:
    """How much a step counts in training: the grasp and what surrounds it decide an episode."""
    return _WEIGHTS.get(phase, 1.0)


_WEIGHTS = {
    Phase.DESCEND.value: 2.0,
    Phase.CLOSE.value: 3.0,
    Phase.LIFT.value: 2.0,
    Phase.LOWER.value: 1.5,
    Phase.RELEASE.value: 3.0,
}
