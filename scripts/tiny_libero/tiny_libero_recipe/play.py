"""Records demonstrations: a task is played, every step is stored with the expert's clean label.

Who plays is an `Actor`: the expert with noise (DART), or a policy that is to be corrected (DAgger).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deft_core.datasets.demonstrations import (
    COLUMNS,
    Demonstration,
    DemonstrationHeader,
    episode_path,
)
from deft_core.peers.conventions import from_robosuite
from deft_libero.errors import UnstableError
from deft_libero.simulator.conventions import WAIT_STEPS, wait_action
from deft_libero.simulator.environment import Frame, LiberoEnvironment, Variation
from deft_libero.simulator.scene import Goal, Scene
from deft_libero.simulator.suites import find_suite
from tiny_libero_recipe.demonstration_writer import encode_frame
from tiny_libero_recipe.expert.expert import Expert, Label, Watch, parent, read_goals
from tiny_libero_recipe.expert.motion import Disturbance, Manner, NoiseSettings
from tiny_libero_recipe.expert.pick import Phase
from tiny_libero_recipe.language import sentence, spoken

HELD_OUT = "30-39"  # initial states that nothing but the last evaluation plays
PHASES = tuple(phase.value for phase in Phase)


@dataclass(frozen=True)
class DemosSettings:
    """What to record. Changing any of it changes the episodes, so a folder keeps to one."""

    suite: str
    tasks: tuple[int, ...]
    episodes: int = 40  # per task; episode e starts from trial trials[e % len(trials)]
    trials: tuple[int, ...] = tuple(range(25))  # others are for choosing and for evaluation
    seed: int = 0
    noise: NoiseSettings = field(default_factory=NoiseSettings)
    moved_metres: float = 0.0  # most episodes start with things moved by up to so much
    rearranged: float = 0.0  # share of episodes with things exchanged, or another one asked for
    varied_words: bool = False  # say what is asked for in different ways
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


def variation(
    settings: DemosSettings, key: DemoKey, goals: Sequence[Goal], others: Sequence[str]
) -> Variation:
    """How an episode begins: a seed per round, three of four episodes moved, if any is.

    `others` are things of the scene that may change places with what is asked for, or be asked for
    in its place.
    """
    seed = settings.seed + key.episode // len(settings.trials)
    moved = settings.moved_metres if key.episode % 4 else 0.0
    generator = random_numbers(settings, key, "beginning")
    if generator.random() >= settings.rearranged or not others:
        return Variation(seed, moved)
    other = str(generator.choice(others))
    if generator.random() < 0.5:
        return Variation(seed, moved, exchanged=(goals[0].subject, other))
    return Variation(seed, moved, goals=(replace(goals[0], subject=other),))


def random_numbers(settings: DemosSettings, key: DemoKey, purpose: str) -> np.random.Generator:
    """Random numbers of an episode, of their own for every purpose."""
    entropy = (settings.seed, key.task, key.episode, *purpose.encode())
    return np.random.default_rng(entropy)


class Actor(Protocol):
    """Plays one episode, step by step; it may do as the expert would."""

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on what is executed, in action units."""

    def act(self, frame: Frame, scene: Scene, label: Label) -> NDArray[np.float64]:
        """What to execute, 7 robosuite values."""


# Called when an episode begins, with what the policy is asked for.
ActorFactory = Callable[[DemosSettings, DemoKey, str], Actor]


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


def noisy_expert(settings: DemosSettings, key: DemoKey, instruction: str) -> Actor:
    """The default actor; its noise follows from seed, task and episode."""
    return NoisyExpert(Disturbance(settings.noise, random_numbers(settings, key, "noise")))


def play(
    environment: LiberoEnvironment,
    settings: DemosSettings,
    key: DemoKey,
    new_actor: ActorFactory = noisy_expert,
) -> Demonstration:
    """Play one episode; it may fail, and says so."""
    trial = settings.trials[key.episode % len(settings.trials)]
    goals = read_goals(environment.task)
    beginning = variation(settings, key, goals, _others(environment, goals))
    environment.restart(trial, beginning)
    for _ in range(WAIT_STEPS):
        environment.advance(wait_action())
    goal, instruction = environment.goals()[0], environment.task.instruction
    thing, place = spoken(goal.subject), spoken(goal.target or "")
    words = random_numbers(settings, key, "words")
    if settings.varied_words:
        instruction = sentence(thing, place, words)
    elif beginning.goals:
        instruction = sentence(thing, place, words, plain=1.0)
    actor = new_actor(settings, key, instruction)
    manner = Manner.draw(random_numbers(settings, key, "manner"))
    expert, watch = Expert.for_episode(environment, manner), Watch()
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
                privileged=privileged_numbers(environment, expert, scene, label),
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
        instruction=instruction,
        succeeded=succeeded,
        assets=environment.assets.label,
        seed=settings.seed,
        noise_sigma=actor.sigma,
        widened_metres=beginning.widen_metres,
        frame_size=settings.frame_size,
        encoding=settings.encoding,
        phases=PHASES,
        subject=thing,
        place=place,
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


def privileged_numbers(
    environment: LiberoEnvironment, expert: Expert, scene: Scene, label: Label
) -> NDArray[np.float32]:
    """The row of numbers that `demonstrations.PRIVILEGED` names."""
    goal = environment.goals()[0]
    boxes = (
        _box_in_picture(environment, expert, scene, name)
        for name in (goal.subject, parent(goal.target, scene) if goal.target else goal.subject)
    )
    return np.concatenate(
        [
            scene.gripper.position,
            [scene.opening],
            label.object_position,
            label.goal_position,
            label.target,
            environment.pixels(scene.gripper.position[None])[0],
            *boxes,
        ]
    ).astype(np.float32)


def _box_in_picture(
    environment: LiberoEnvironment, expert: Expert, scene: Scene, name: str
) -> NDArray[np.float64]:
    """Left, top, right and bottom of a thing; nothing but zeros where it has no shape."""
    cloud = expert.finder.clouds.get(name)
    if cloud is None or not len(cloud.points):
        return np.zeros(4)
    pixels = environment.pixels(cloud.at(scene.bodies[name]))
    return np.concatenate([pixels.min(axis=0), pixels.max(axis=0)])


def _others(environment: LiberoEnvironment, goals: Sequence[Goal]) -> list[str]:
    """Things of the scene that could be put where the one thing that is asked for belongs."""
    if len(goals) > 1 or goals[0].predicate != "in":
        return []
    target = goals[0].target or ""
    return [
        name
        for name in environment.things
        if name != goals[0].subject and not target.startswith(name)
    ]
