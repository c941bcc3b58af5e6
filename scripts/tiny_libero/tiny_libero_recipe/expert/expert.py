"""The scripted expert: for any scene of a task, the action that brings the goal nearer.

It reads the simulator's privileged state and is a pure function of it, given how the episode
began: `label` can therefore correct any state, whoever brought it about. Only `attempt` carries
anything from step to step: a `Watch` raises it when nothing moves, and the next best grasp is
tried.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deft_libero.errors import SimulationError
from deft_libero.simulator.assets import libero_folder
from deft_libero.simulator.environment import LiberoEnvironment
from deft_libero.simulator.scene import Goal, Pose, Scene, Vector
from deft_libero.simulator.suites import Task
from tiny_libero_recipe.expert.fixtures import Handle, PullDrawer, PushPlate, PushShut, TurnKnob
from tiny_libero_recipe.expert.geometry import build_clouds, pinch
from tiny_libero_recipe.expert.grasps import GraspFinder, category
from tiny_libero_recipe.expert.motion import Aim, Manner, steer
from tiny_libero_recipe.expert.pick import Intent, Phase, PickAndPlace, Place

_PREDICATE = re.compile(r"\((\w+)\s+(\w+)(?:\s+(\w+))?\s*\)")
_SPACING = 0.088  # metres between the middles of things that share a region
_OPEN_DRAWER = -0.10  # metres along the slide; fully open is -0.16, and an arm may bump it
_TOUCHING = (Phase.PULL, Phase.PUSH, Phase.TURN)
_EASE_METRES = 0.05  # the way in which the hand sets off
_STUCK_STEPS = 25
_STUCK_METRES = 0.004


@dataclass(frozen=True, eq=False)
class Label:
    """What the expert would do in a scene, and what it looks at while doing it."""

    action: NDArray[np.float64]  # 7 robosuite values
    phase: Phase
    target: Vector  # where it wants the grip site
    object_position: Vector  # what is being handled
    goal_position: Vector  # where that should end up


@dataclass(frozen=True, eq=False)
class Expert:
    """The expert for one episode; `start` is the scene after the idle steps."""

    goals: tuple[Goal, ...]
    start: Scene
    finder: GraspFinder
    manner: Manner = Manner()

    @classmethod
    def for_episode(cls, environment: LiberoEnvironment, manner: Manner | None = None) -> "Expert":
        """An expert for the episode the environment has just begun (after the idle steps)."""
        start, goals = environment.scene(), environment.goals()
        check_tasks([environment.task])
        finder = GraspFinder(build_clouds(start, environment.boxes()))
        return cls(goals, start, finder, manner or Manner())

    def label(self, scene: Scene, attempt: int = 0) -> Label:
        """What to do in this scene, in this episode's manner."""
        intent = self._intend(scene, attempt)
        moved = float(np.linalg.norm(scene.gripper.position - self.start.gripper.position))
        # What is pushed, pulled or turned leaves no room beside the way.
        manner = self.manner.straight() if intent.phase in _TOUCHING else self.manner
        action = steer(scene, intent.aim, manner, min(0.3 + moved / _EASE_METRES, 1.0))
        return Label(
            action,
            intent.phase,
            intent.aim.position,
            intent.object_position,
            intent.goal_position,
        )

    def _intend(self, scene: Scene, attempt: int) -> Intent:
        pairs = list(zip(self.goals, scene.goals_held, strict=True))
        # What is to be shut comes last: something may have to go in first.
        for goal, held in sorted(pairs, key=lambda pair: pair[0].predicate == "close"):
            if not held:
                return self._let_go(goal, scene) or self._work(goal, scene, attempt)
        return self._retreat(scene)

    def _let_go(self, goal: Goal, scene: Scene) -> Intent | None:
        """Open the fingers first where they still hold what an earlier goal was about."""
        for other in self.goals:
            if other.subject == goal.subject or other.subject not in self.finder.clouds:
                continue
            pose = scene.bodies[other.subject]
            held = pinch(self.finder.clouds[other.subject].at(pose), scene.gripper)
            if held is not None and scene.opening < held.width + 0.012:
                aim = Aim(scene.gripper.position, scene.gripper.rotation, closed=False)
                return Intent(aim, Phase.RELEASE, pose.position, pose.position)
        return None

    def _work(self, goal: Goal, scene: Scene, attempt: int) -> Intent:
        if goal.predicate == "open":
            return PullDrawer(self._handle(goal.subject, scene)).intend(scene)
        if goal.predicate == "close":
            return PushShut(self._handle(goal.subject, scene)).intend(scene)
        if goal.predicate == "turnon":
            return TurnKnob(goal.subject, f"{goal.subject}_button").intend(scene)
        return self._put(goal, goal.target or "", scene, attempt)

    def _handle(self, region: str, scene: Scene) -> Handle:
        cabinet = parent(region, scene)
        level = region.removeprefix(f"{cabinet}_").removesuffix("_region")
        drawer = next(
            name for name in scene.bodies if name.startswith(cabinet) and name.endswith(level)
        )
        points = self.finder.clouds[drawer].at(scene.bodies[drawer])
        return Handle.of_drawer(points, -scene.bodies[cabinet].rotation[:, 1])

    def _put(self, goal: Goal, target: str, scene: Scene, attempt: int) -> Intent:
        start = self.finder.clouds[goal.subject].at(self.start.bodies[goal.subject])
        rest = float(start[:, 2].min())
        if category(goal.subject) == "plate":
            return PushPlate(goal.subject, target, rest).intend(scene)
        drawer = drawer_joint(target, scene)
        if drawer is not None and scene.joints[drawer] > _OPEN_DRAWER:
            return PullDrawer(self._handle(target, scene)).intend(scene)
        up = self.start.bodies[goal.subject].rotation[2]
        skill = PickAndPlace(goal.subject, rest, up, self.finder)
        return skill.intend(scene, self._place(goal, target, scene), attempt)

    def _place(self, goal: Goal, target: str, scene: Scene) -> Place:
        if target in scene.bodies:
            position = scene.bodies[target].position
            return Place(position, float(position[2]) + 0.006, 0.008)
        position = scene.regions[target].position
        if goal.predicate == "in":
            return Place(position, float(position[2]) - 0.03)
        rack = next((name for name in scene.bodies if target.startswith(name)), "")
        if category(rack) == "wine_rack":
            # Up the slope from the trough; the goal holds as soon as the bottle touches the shelf.
            position = position + 0.03 * scene.bodies[rack].rotation[:, 1]
            return Place(position, float(position[2]) - 0.02)
        return Place(position + self._aside(goal, scene.regions[target]), float(position[2]))

    def _aside(self, goal: Goal, region: Pose) -> Vector:
        """Room for everything that is to stand on one region: side by side along its x axis."""
        sharing = [one.subject for one in self.goals if one.target == goal.target]
        place = sharing.index(goal.subject) - (len(sharing) - 1) / 2
        return np.asarray(_SPACING * place * region.rotation[:, 0])

    def _retreat(self, scene: Scene) -> Intent:
        up = scene.gripper.position + np.array([0.0, 0.0, 0.1])
        aim = Aim(up, scene.gripper.rotation, closed=False)
        return Intent(aim, Phase.RETREAT, up, up)


@dataclass
class Watch:
    """Counts attempts: one more whenever the hand stays where it is for too long."""

    attempt: int = 0
    _places: list[np.ndarray] = field(default_factory=list)

    def see(self, scene: Scene) -> int:
        """Take note of a scene; the attempt to pass to `label`."""
        self._places.append(np.append(scene.gripper.position, scene.opening))
        recent = self._places[-_STUCK_STEPS:]
        if len(recent) == _STUCK_STEPS and np.ptp(recent, axis=0).max() < _STUCK_METRES:
            self.attempt += 1
            self._places.clear()
        return self.attempt


def check_tasks(tasks: Iterable[Task]) -> None:
    """Raise SimulationError for tasks the expert cannot do: doors and what lies behind them."""
    refused = [
        f"task {task.number} of {task.suite} (it knows no way to reach {goal})"
        for task in tasks
        for goal in read_goals(task)
        if not _is_known(goal)
    ]
    if refused:
        raise SimulationError(f"the expert cannot do {', '.join(refused)}; leave them out")


def _is_known(goal: Goal) -> bool:
    if goal.predicate in ("open", "close"):
        return goal.subject.endswith("_region")  # a drawer's; doors have none
    if goal.predicate in ("in", "on"):
        return goal.target is not None and not goal.target.startswith("microwave")
    return goal.predicate == "turnon"


def parent(region: str, scene: Scene) -> str:
    """The body a region belongs to: `wooden_cabinet_1` for `wooden_cabinet_1_top_region`."""
    for name in scene.bodies:
        if region.startswith(name):
            return name
    raise SimulationError(f"no body of this scene has a region {region}")


def drawer_joint(region: str, scene: Scene) -> str | None:
    """The joint that moves a region, if it is a drawer's."""
    joint = region.replace("_region", "_level")
    return joint if joint in scene.joints else None


def read_goals(task: Task) -> tuple[Goal, ...]:
    """The predicates that must all hold for an episode of the task to succeed."""
    path = libero_folder() / "bddl_files" / task.suite / task.bddl_file
    try:
        goal = path.read_text("utf-8").partition("(:goal")[2]
    except OSError as error:
        raise SimulationError(f"{path} cannot be read: {error.strerror}") from error
    found = _PREDICATE.findall(goal)
    return tuple(Goal(name.lower(), subject, target or None) for name, subject, target in found)
