"""A simulator of one point on a table, for trying the evaluation without LIBERO or a GPU.

The point goes where actions push it; an episode succeeds when it rests in the circle. Use it with
`--environment point_world`; `--local-policy solve` always gets there. It is also the example
to follow for connecting another simulator.

The suite `point_world_grasp` is for policies that answer chunks, such as `plan`: an episode fails
when the gripper closes beside the circle.
"""

import numpy as np
from numpy.typing import NDArray

from deft_core.types import ActionChunk, Image, Observation
from deft_libero.errors import SelectionError
from deft_libero.policies.source import EpisodePolicy
from deft_libero.simulator.environment import Environment, EnvironmentSettings, Frame, StepResult
from deft_libero.simulator.suites import NUM_TRIALS, Suite, Task

SUITE, GRASP_SUITE = "point_world", "point_world_grasp"
_TASKS = ("push_the_point_left", "push_the_point_away", "push_the_point_to_the_corner")
_STEP_LIMIT = 80
_METRES_PER_ACTION = 0.02
_REACH = 0.03  # metres between point and circle at which the goal holds
_EDGE = 0.5  # metres from the middle of the table
_CIRCLES = np.array([[-0.35, 0.0, 0.0], [0.0, 0.35, 0.0], [0.33, 0.33, 0.0]])  # [task, xyz]
# Of the policy that plans: actions in a chunk; errors of its sight, in shares of the distance, and
# of its direction, in radians; how much of the way it makes in a step, at most a whole action.
_CHUNK, _SIGHT_ERROR, _TURN_ERROR, _GAIN = 8, 0.07, 0.3, 0.5
_TINY = 1e-9
_SEED_GRID = 1e4  # per metre: so fine that errors differ, so coarse that no rounding matters
_BACKGROUND, _CIRCLE, _POINT = (236, 232, 224), (90, 160, 110), (190, 60, 50)


def find_suite(name: str) -> Suite:
    """The suites of this simulator, as `--environment` asks for them."""
    if name not in (SUITE, GRASP_SUITE):
        raise SelectionError(f"unknown suite {name!r}; known suites: {SUITE}, {GRASP_SUITE}")
    tasks = tuple(Task(name, number, task) for number, task in enumerate(_TASKS))
    return Suite(name, _STEP_LIMIT, name, tasks)


def open_environment(task: Task, settings: EnvironmentSettings) -> "PointWorld":
    """Build a task's table."""
    return PointWorld(task, settings)


def solve(environment: Environment) -> EpisodePolicy:
    """A policy that pushes the point straight into the circle."""
    return _Solver(_point_world(environment))


def plan(environment: Environment) -> EpisodePolicy:
    """A policy that answers chunks, each by the frame alone and a little differently."""
    return _Planner(_point_world(environment))


def _point_world(environment: Environment) -> "PointWorld":
    if not isinstance(environment, PointWorld):
        raise TypeError(f"solves only PointWorld, got {type(environment).__name__}")
    return environment


class PointWorld:
    """One table. The circle is the task's, the start is the trial's."""

    def __init__(self, task: Task, settings: EnvironmentSettings) -> None:
        self.task = task
        self.num_trials = NUM_TRIALS
        self.circle = _CIRCLES[task.number]
        self.point = np.zeros(3)
        self._settings = settings
        self._is_closed = False
        self._is_lost = False

    def reset(self, trial: int) -> Frame:
        """Put the point where the trial has it."""
        rng = np.random.default_rng((self._settings.seed, self.task.number, trial))
        self.point = np.append(rng.uniform(-_EDGE / 2, _EDGE / 2, size=2), 0.0)
        self._is_closed = self._is_lost = False
        return self._frame()

    def step(self, action: NDArray[np.float64]) -> StepResult:
        """Push the point; closing the gripper inside the circle is the goal."""
        self.point = np.clip(self.point + action[:3] * _METRES_PER_ACTION, -_EDGE, _EDGE)
        self._is_closed = bool(action[6] > 0)
        away = float(np.linalg.norm(self.point[:2] - self.circle[:2]))
        is_inside = self._is_closed and away < _REACH
        if self._is_closed and not is_inside and self.task.suite == GRASP_SUITE:
            self._is_lost = True
        return StepResult(self._frame(), is_inside and not self._is_lost)

    def close(self) -> None:
        """Nothing to free."""

    def _frame(self) -> Frame:
        size = self._settings.frame_size
        image = np.full((size, size, 3), _BACKGROUND, dtype=np.uint8)
        _paint_disc(image, self.circle, 0.05, _CIRCLE)
        _paint_disc(image, self.point, 0.025, _POINT)
        fingers = 0.0 if self._is_closed else 0.04
        state = np.concatenate([self.point, np.zeros(3), [fingers, -fingers]]).astype(np.float32)
        cameras = {"wrist": image} if self._settings.wrist_camera else {}
        return Frame(image, state, cameras)


class _Solver:
    """Knows where point and circle are. Its answers are in robosuite's units."""

    def __init__(self, world: PointWorld) -> None:
        self._world = world

    def start(self, session_id: str) -> None:
        """Nothing to forget."""

    def act(self, observation: Observation) -> ActionChunk:
        """One action straight ahead."""
        away = (self._world.circle - self._world.point) / _METRES_PER_ACTION
        push = away / max(1.0, float(np.abs(away).max()))
        return ActionChunk(np.concatenate([push, np.zeros(3), [1.0]])[None])

    def close(self) -> None:
        """Nothing to close."""


class _Planner(_Solver):
    """Sees the point in the frame, and the circle not quite where it is, the less so the farther.

    Each chunk sets out in a direction of its own and then turns towards the circle.
    """

    def act(self, observation: Observation) -> ActionChunk:
        """The pushes to the circle, slower near it, and then a closed gripper."""
        assert observation.state is not None
        place = observation.state[:2].astype(np.float64)
        rng = np.random.default_rng(np.round(place * _SEED_GRID).astype(np.int64).view(np.uint64))
        circle = self._world.circle[:2]
        far = float(np.linalg.norm(circle - place))
        circle = circle + _SIGHT_ERROR * far * rng.standard_normal(2)
        turn = _TURN_ERROR * rng.standard_normal()
        actions = np.zeros((_CHUNK, 7))
        for step, action in enumerate(actions):
            away = (circle - place) / _METRES_PER_ACTION
            push = away * min(_GAIN, 1 / max(float(np.linalg.norm(away)), _TINY))
            action[:2] = _turned(push, turn * (1 - step / _CHUNK))
            place = place + action[:2] * _METRES_PER_ACTION
            action[6] = 1.0 if np.linalg.norm(circle - place) < _REACH / 2 else -1.0
        return ActionChunk(actions)


def _turned(push: NDArray[np.float64], radians: float) -> NDArray[np.float64]:
    along, across = np.cos(radians) * push, np.sin(radians) * push
    return np.array([along[0] - across[1], along[1] + across[0]])


def _paint_disc(
    image: Image, centre: NDArray[np.float64], radius: float, colour: tuple[int, int, int]
) -> None:
    size = len(image)
    metres = np.linspace(-_EDGE, _EDGE, size)
    away = (metres[None, :] - centre[0]) ** 2 + (-metres[:, None] - centre[1]) ** 2
    image[away < radius**2] = colour
