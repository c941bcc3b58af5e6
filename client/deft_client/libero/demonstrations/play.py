"""Records demonstrations: a task is played, every step is stored with the expert's clean label.

Who plays is an `Actor`: the expert with noise (DART), or a policy that is to be corrected (DAgger).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.demonstrations.files import (
    COLUMNS,
    Demonstration,
    DemonstrationHeader,
    encode_frame,
    episode_path,
)
from deft_client.libero.errors import UnstableError
from deft_client.libero.expert.expert import Expert, Watch
from deft_client.libero.expert.motion import Disturbance, NoiseSettings
from deft_client.libero.expert.pick import Label, Phase
from deft_client.libero.simulator.conventions import WAIT_STEPS, from_robosuite, wait_action
from deft_client.libero.simulator.environment import Frame, LiberoEnvironment, Variation
from deft_client.libero.simulator.scene import Scene
from deft_client.libero.simulator.suites import find_suite

PHASES = tuple(phase.value for phase in Phase)


@dataclass(frozen=True)
class DemosSettings:
    """What to record. Changing any of it changes the episodes, so a folder keeps to one."""

    suite: str
    tasks: tuple[int, ...]
    episodes: int = 40  # per task; episode e starts from trial trials[e % len(trials)]
    trials: tuple[int, ...] = tuple(range(40))  # 40 to 49 are kept for evaluation
    seed: int = 0
    noise: NoiseSettings = field(default_factory=NoiseSettings)
    widen_metres: float = 0.0  # every other episode starts from a widened state
    frame_size: int = 256
    encoding: str = "jpeg"
    actor: str = "expert"  # who plays; the labels are the expert's whoever it is


@dataclass(frozen=True)
class DemoKey:
    """One episode of a recording; its random numbers follow from this and the seed alone."""

    task: int
    episode: int

    def path(self, folder: Path) -> Path:
        """Where the episode is stored."""
        return episode_path(folder, self.task, self.episode)


def episode_keys(settings: DemosSettings) -> list[DemoKey]:
    """Every episode, tasks outermost, because building a task's scene takes longest."""
    return [
        DemoKey(task, episode) for task in settings.tasks for episode in range(settings.episodes)
    ]


def variation(settings: DemosSettings, key: DemoKey) -> Variation:
    """How an episode begins: a seed per round, every other episode widened, if any is."""
    seed = settings.seed + key.episode // len(settings.trials)
    return Variation(seed, settings.widen_metres if key.episode % 2 else 0.0)


class Actor(Protocol):
    """Plays one episode, step by step; it may do as the expert would."""

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on what is executed, in action units."""

    def act(self, frame: Frame, scene: Scene, label: Label) -> NDArray[np.float64]:
        """What to execute, 7 robosuite values."""


# Called after the idle steps of an episode, so it may look at how the episode begins.
ActorFactory = Callable[[LiberoEnvironment, DemosSettings, DemoKey], Actor]


class NoisyExpert:
    """The expert, disturbed."""

    def __init__(self, disturbance: Disturbance) -> None:
        self._disturbance = disturbance

    @property
    def sigma(self) -> float:
        """The jitter of this episode."""
        return self._disturbance.sigma

    def act(self, frame: Frame, scene: Scene, label: Label) -> NDArray[np.float64]:
        """The label with noise."""
        return self._disturbance.disturb(label.action)


def noisy_expert(environment: LiberoEnvironment, settings: DemosSettings, key: DemoKey) -> Actor:
    """The default actor; its noise follows from seed, task and episode."""
    generator = np.random.default_rng((settings.seed, key.task, key.episode))
    return NoisyExpert(Disturbance(settings.noise, generator))


def play(
    environment: LiberoEnvironment,
    settings: DemosSettings,
    key: DemoKey,
    new_actor: ActorFactory = noisy_expert,
) -> Demonstration:
    """Play one episode; it may fail, and says so."""
    trial = settings.trials[key.episode % len(settings.trials)]
    beginning = variation(settings, key)
    environment.restart(trial, beginning)
    for _ in range(WAIT_STEPS):
        environment.advance(wait_action())
    actor = new_actor(environment, settings, key)
    expert, watch = Expert.for_episode(environment), Watch()
    rows: list[_Row] = []
    succeeded = False
    for _ in range(find_suite(settings.suite).step_limit):
        scene, frame = environment.scene(), environment.frame()
        label = expert.label(scene, watch.see(scene))
        executed = actor.act(frame, scene, label)
        rows.append(
            _Row(
                encode_frame(frame.image, settings.encoding),
                labels=from_robosuite(label.action),
                executed=from_robosuite(executed),
                state=frame.state,
                privileged=privileged_numbers(scene, label),
                phase=PHASES.index(label.phase.value),
                simulator=environment.simulator_state(),
            )
        )
        try:
            succeeded = environment.advance(executed)
        except UnstableError:
            break
        if succeeded:
            break
    header = DemonstrationHeader(
        suite=settings.suite,
        task=key.task,
        episode=key.episode,
        trial=trial,
        instruction=environment.task.instruction,
        succeeded=succeeded,
        assets=environment.assets.label,
        seed=settings.seed,
        noise_sigma=actor.sigma,
        widened_metres=beginning.widen_metres,
        frame_size=settings.frame_size,
        encoding=settings.encoding,
        phases=PHASES,
    )
    encoded, *columns = zip(*rows, strict=True)
    arrays = zip(COLUMNS.items(), columns, strict=True)
    return Demonstration(
        header, encoded, **{name: np.array(values, dtype) for (name, dtype), values in arrays}
    )


class _Row(NamedTuple):
    """One step, in the order of a demonstration's columns."""

    encoded: bytes
    labels: NDArray[np.float64]
    executed: NDArray[np.float64]
    state: NDArray[np.float32]
    privileged: NDArray[np.float32]
    phase: int
    simulator: NDArray[np.float64]


def privileged_numbers(scene: Scene, label: Label) -> NDArray[np.float32]:
    """The row of numbers that `demonstrations.PRIVILEGED` names."""
    return np.concatenate(
        [
            scene.gripper.position,
            [scene.opening],
            label.object_position,
            label.goal_position,
            label.target,
        ]
    ).astype(np.float32)
