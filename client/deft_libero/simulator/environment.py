"""One LIBERO task as an environment: the only file that imports LIBERO, robosuite or MuJoCo.

One environment per process at a time: OpenGL, numpy's global generator and LIBERO's module state
are shared by the process. An episode's outcome depends on task, trial, seed and actions alone, not
on what the process ran before. The simulator's imports happen when the first environment opens.
"""

import contextlib
import hashlib
import io
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deft_core.files import write_atomically
from deft_core.types import Image
from deft_libero.errors import AssetsError, SimulatorMissingError, UnstableError
from deft_libero.simulator import conventions
from deft_libero.simulator.assets import (
    HOW_TO_INSTALL,
    Assets,
    cache_folder,
    find_assets,
    libero_folder,
)
from deft_libero.simulator.camera import Camera
from deft_libero.simulator.graphics import Renderer, announce_renderer, find_renderer
from deft_libero.simulator.init_states import draw_shifts, footprint, load_initial_states
from deft_libero.simulator.mujoco_version import warning
from deft_libero.simulator.scene import Box, Goal, Pose, Scene
from deft_libero.simulator.stepping import LeanStepper
from deft_libero.simulator.suites import Task

logger = logging.getLogger("deft_libero")


@dataclass(frozen=True, eq=False)
class Frame:
    """What a policy may see after a step: upright pictures and the robot's own state."""

    image: Image  # agent view, uint8 [size, size, 3]
    state: NDArray[np.float32]  # [8]: position, axis-angle, two finger joints
    cameras: Mapping[str, Image] = field(default_factory=dict)  # {"wrist": ...} when asked for


@dataclass(frozen=True, eq=False)
class StepResult:
    """The frame after an action, and whether the task's goal holds now."""

    frame: Frame
    done: bool


class Environment(Protocol):
    """One task that can be tried from each of its recorded initial states."""

    task: Task
    num_trials: int

    def reset(self, trial: int) -> Frame:
        """Start an episode from that trial's initial state."""

    def step(self, action: NDArray[np.float64]) -> StepResult:
        """Execute one action of 7 robosuite values for 1/20 s of simulated time."""

    def close(self) -> None:
        """Free simulator and renderer; the environment is of no use afterwards."""


@dataclass(frozen=True)
class Variation:
    """What an episode's beginning depends on besides the trial.

    The seed places the fixtures, which initial states do not hold. Things lie up to `widen_metres`
    from where the recorded state has them, drawn by seed, task and trial. Two things may have
    `exchanged` their places, and other `goals` than the task's own be asked for.
    """

    seed: int = 0
    widen_metres: float = 0.0
    exchanged: tuple[str, str] | None = None
    goals: tuple[Goal, ...] = ()


@dataclass(frozen=True)
class EnvironmentSettings:
    """How environments are made; the same settings give the same episodes everywhere."""

    seed: int = 0
    widen_metres: float = 0.0
    frame_size: int = conventions.FRAME_SIZE
    wrist_camera: bool = False
    renderer: Renderer = Renderer.AUTO
    assets_folder: Path | None = None  # None: LIBERO's own
    fast: bool = False  # physics by `LeanStepper`: robosuite's own up to the solver's tolerance


def open_environment(
    task: Task, settings: EnvironmentSettings | None = None
) -> "LiberoEnvironment":
    """Build a task's scene (about a second; the first time in a process several)."""
    return LiberoEnvironment(task, settings or EnvironmentSettings())


class LiberoEnvironment:
    """A task of LIBERO in MuJoCo. Physics and pictures are apart: `advance` does not render."""

    def __init__(self, task: Task, settings: EnvironmentSettings) -> None:
        self.task = task
        self.settings = settings
        cache = cache_folder()
        self._renderer = find_renderer(settings.renderer)
        root = libero_folder(task.suite)
        self.assets = find_assets(settings.assets_folder)
        path = root / "init_files" / task.suite / task.initial_states_file
        self.initial_states = load_initial_states(path)  # [trial, state]
        self.num_trials = len(self.initial_states)
        _prepare_process(cache, root, self.assets, self._renderer)
        self._control = _build(root / "bddl_files" / task.suite / task.bddl_file, self.assets)
        self._inner: Any = self._control.env
        self._inner._observables = {}  # frames are made here; robosuite's are slower and stale
        self._own_goals: list[list[str]] = self._inner.parsed_problem["goal_state"]
        self._goal_parts = self._own_goals
        self._camera: Camera | None = None
        self._stepper: LeanStepper | None = None
        self._is_ready = False
        if self._inner.sim.model.nq + self._inner.sim.model.nv + 1 != self.initial_states.shape[1]:
            raise AssetsError(
                f"{task.name}: with the assets in {self.assets.folder} a state has "
                f"{self._inner.sim.model.nq + self._inner.sim.model.nv + 1} numbers, LIBERO's "
                f"initial states have {self.initial_states.shape[1]}; the assets do not fit"
            )

    def reset(self, trial: int) -> Frame:
        """Start an episode from that trial's recorded state; 10 idle steps usually follow."""
        self.restart(trial)
        return self.frame()

    def restart(self, trial: int, variation: Variation | None = None) -> None:
        """`reset` without a picture; a variation replaces the settings' one.

        Fixtures are placed by numpy's global generator, which is seeded here and put back after.
        """
        if not 0 <= trial < self.num_trials:
            raise ValueError(f"{self.task.name} has trials 0 to {self.num_trials - 1}, got {trial}")
        if variation is None:
            variation = Variation(self.settings.seed, self.settings.widen_metres)
        before = np.random.get_state()
        np.random.seed((variation.seed, trial))
        try:
            with _quiet():
                self._inner.reset()
        finally:
            np.random.set_state(before)
        self._ask_for(variation.goals)
        state = self.initial_states[trial].copy()
        if variation.exchanged is not None:
            first, second = (self._place_of(name) for name in variation.exchanged)
            state[first], state[second] = state[second].copy(), state[first].copy()
        self._control.set_init_state(state)
        if variation.widen_metres > 0:
            self._move_about(state, trial, variation)
            self._control.set_init_state(state)
        self._is_ready = True
        if self.settings.fast:
            self._stepper = LeanStepper(_mujoco(), self._inner)

    def step(self, action: NDArray[np.float64]) -> StepResult:
        """Execute one action of 7 robosuite values, then look."""
        done = self.advance(action)
        return StepResult(self.frame(), done)

    def advance(self, action: NDArray[np.float64]) -> bool:
        """Execute one action without rendering; true while the task's goal holds."""
        if action.shape != (conventions.ACTION_DIM,) or not np.isfinite(action).all():
            raise ValueError(f"an action is 7 finite numbers, got {action!r}")
        if not self._is_ready:
            raise RuntimeError("reset the environment before the first action")
        if self._stepper is None:
            *_, done, _ = self._control.step(action)
            self._check_stability()
            return bool(done)
        self._stepper.advance(action)
        self._check_stability()
        self._inner._post_process()
        return bool(self._inner._check_success())

    def _check_stability(self) -> None:
        """MuJoCo begins anew by itself when its numbers become infinite, as if nothing had been."""
        counts = self._inner.sim.data._data.warning
        kinds = _mujoco().mjtWarning
        for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC):
            if counts[kind].number:
                raise UnstableError(
                    f"{self.task.name}: the simulation became unstable; reset the environment"
                )

    def frame(self) -> Frame:
        """What the cameras and the robot report now."""
        if self._camera is None:
            size = self.settings.frame_size
            self._camera = Camera(_mujoco(), self._inner.sim, size, self._renderer)
        image = self._camera.look("agentview")
        wrist = self.settings.wrist_camera
        cameras = {"wrist": self._camera.look("robot0_eye_in_hand")} if wrist else {}
        return Frame(image, self.robot_state(), cameras)

    def pixels(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where points of the world [point, 3] are in the agent view, [point, 2]: x, y.

        In shares of the upright picture's sides, from its upper left corner.
        """
        sim = self._inner.sim
        number = sim.model.camera_name2id("agentview")
        rotation = np.array(sim.data.cam_xmat[number]).reshape(3, 3)
        seen = (points - sim.data.cam_xpos[number]) @ rotation  # x right, y up, z towards us
        half = np.tan(np.radians(float(sim.model.cam_fovy[number])) / 2)
        flat = seen[:, :2] / (-seen[:, 2:] * half)
        # Upright pictures are mirrored, as those policies were trained on.
        return np.asarray((1.0 - flat) / 2)

    def robot_state(self) -> NDArray[np.float32]:
        """The 8 numbers of the robot itself, without rendering."""
        data, robot = self._inner.sim.data, self._inner.robots[0]
        w, x, y, z = data.get_body_xquat(robot.robot_model.eef_name)
        fingers = np.array(data.qpos[robot._ref_gripper_joint_pos_indexes])
        position = np.array(data.site_xpos[robot.eef_site_id])
        return conventions.robot_state(position, np.array([x, y, z, w]), fingers)

    def simulator_state(self) -> NDArray[np.float64]:
        """Time, positions and velocities, as initial states are stored."""
        return np.asarray(self._control.get_sim_state(), dtype=np.float64)

    def scene(self) -> Scene:
        """The privileged state, for the scripted expert and auxiliary losses only."""
        inner, data = self._inner, self._inner.sim.data
        fingers = data.qpos[inner.robots[0]._ref_gripper_joint_pos_indexes]
        bodies = {
            name: Pose(np.array(data.xpos[number]), np.array(data.xmat[number]).reshape(3, 3))
            for name, number in self._bodies.items()
        }
        joints = {
            joint: float(data.get_joint_qpos(joint))
            for fixture in inner.fixtures_dict.values()
            for joint in fixture.joints
        }
        regions = {name: self._site(name) for name in inner.object_sites_dict}
        gripper = self._site(inner.sim.model.site_id2name(inner.robots[0].eef_site_id))
        held = tuple(bool(inner._eval_predicate(goal)) for goal in self._goal_parts)
        opening, base = float(fingers[0] - fingers[1]), np.array(inner.robots[0].base_pos)
        return Scene(gripper, opening, bodies, joints, regions, base, held)

    def boxes(self) -> dict[str, tuple[Box, ...]]:
        """The collision shapes of every object and fixture where they are now, as boxes.

        What is not a box is given by the box around it; furniture and robot are left out.
        """
        model, data = self._inner.sim.model._model, self._inner.sim.data
        roots = {number: name for name, number in self._bodies.items()}
        found: dict[str, list[Box]] = {name: [] for name in roots.values()}
        for geom in np.flatnonzero(model.geom_group == 0):
            body = model.geom_bodyid[geom]
            while body not in roots and body != 0:
                body = model.body_parentid[body]
            if body in roots:
                rotation = np.array(data.geom_xmat[geom]).reshape(3, 3)
                middle, half = model.geom_aabb[geom][:3], np.array(model.geom_aabb[geom][3:])
                pose = Pose(data.geom_xpos[geom] + rotation @ middle, rotation)
                found[roots[body]].append(Box(pose, half))
        return {name: tuple(boxes) for name, boxes in found.items()}

    def overlaps(self) -> list[tuple[str, str, float]]:
        """Shapes that touch now, by name, with how deep one is in the other (metres)."""
        model, data = self._inner.sim.model, self._inner.sim.data._data
        return [
            (
                model.geom_id2name(contact.geom1),
                model.geom_id2name(contact.geom2),
                -float(contact.dist),
            )
            for contact in data.contact
        ]

    @property
    def things(self) -> tuple[str, ...]:
        """Everything that can be moved about."""
        return tuple(self._inner.objects_dict)

    @property
    def _bodies(self) -> dict[str, int]:
        """Objects and fixtures, and what moves in fixtures: drawers, doors and knobs."""
        inner, model = self._inner, self._inner.sim.model
        moving = [
            model.jnt_bodyid[model.joint_name2id(joint)]
            for fixture in inner.fixtures_dict.values()
            for joint in fixture.joints
        ]
        return {**inner.obj_body_id, **{model.body_id2name(body): body for body in moving}}

    def goals(self) -> tuple[Goal, ...]:
        """The predicates that must all hold for the episode to succeed."""
        return tuple(Goal(*parts) for parts in self._goal_parts)

    def broken_premises(self) -> tuple[Goal, ...]:
        """What the task's file says of how things begin, and is not so now.

        Only between things: regions of floor and tables are boxes to draw positions from.
        """
        inner = self._inner
        things = (*inner.objects_dict, *inner.fixtures_dict)
        return tuple(
            Goal(*parts)
            for parts in inner.parsed_problem["initial_state"]
            if parts[-1].startswith(things) and not inner._eval_predicate(parts)
        )

    def _ask_for(self, goals: Sequence[Goal]) -> None:
        """Let success mean that these hold; the task's own if there are none."""
        parts = [
            [goal.predicate, goal.subject, *([goal.target] if goal.target else [])]
            for goal in goals
        ]
        self._goal_parts = self._inner.parsed_problem["goal_state"] = parts or self._own_goals

    def _place_of(self, name: str) -> slice:
        """Where a state holds a thing's x and y."""
        joint = self._inner.objects_dict[name].joints[-1]
        start = 1 + self._inner.sim.model.get_joint_qpos_addr(joint)[0]  # after the time
        return slice(start, start + 2)

    def _move_about(self, state: NDArray[np.float64], trial: int, variation: Variation) -> None:
        """Move things in a state that was just set; the same for the same seed."""
        prints = {
            name: footprint(boxes, name in self._inner.objects_dict)
            for name, boxes in self.boxes().items()
        }
        generator = np.random.default_rng((variation.seed, self.task.number, trial))
        for name, shift in draw_shifts(prints, variation.widen_metres, generator).items():
            state[self._place_of(name)] += shift

    def close(self) -> None:
        """Free simulator and renderer; the environment is of no use afterwards."""
        if self._camera is not None:
            self._camera.close()
            self._camera = None
        self._control.close()

    def _site(self, name: str) -> Pose:
        data, number = self._inner.sim.data, self._inner.sim.model.site_name2id(name)
        position = np.array(data.site_xpos[number])
        return Pose(position, np.array(data.site_xmat[number]).reshape(3, 3))


def _mujoco() -> Any:
    import mujoco

    return mujoco


def _prepare_process(cache: Path, libero: Path, assets: Assets, renderer: Renderer) -> None:
    """Settle everything the simulator reads at import: graphics, caches, configuration."""
    announce_renderer(renderer)
    os.environ.setdefault("MPLCONFIGDIR", str(cache / "matplotlib"))
    if "LIBERO_CONFIG_PATH" not in os.environ:
        # LIBERO asks on stdin for what this file answers, and would write it to the home folder.
        digest = hashlib.sha256(str((libero, assets.folder)).encode()).hexdigest()[:8]
        folder = cache / f"libero_config-{digest}"
        folder.mkdir(exist_ok=True)
        lines = f"bddl_files: {libero / 'bddl_files'}\ninit_states: {libero / 'init_files'}\n"
        lines += f"assets: {assets.folder}\n"
        write_atomically(folder / "config.yaml", lines.encode())
        os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    if "robosuite" not in sys.modules:
        # robosuite looks for private macros, warns on the terminal when there are none, and
        # overrides MUJOCO_GL unless they tell it not to. Compiling what only resets call would take
        # many seconds in every new cache.
        macros = types.ModuleType("robosuite.macros_private")
        macros.__dict__.update(MUJOCO_GPU_RENDERING=False, ENABLE_NUMBA=False)
        sys.modules["robosuite.macros_private"] = macros


def _build(bddl_file: Path, assets: Assets) -> Any:
    """LIBERO's own wrapper around the scene, without any of its renderers."""
    try:
        with _quiet():
            import libero.libero
            from libero.libero.envs.env_wrapper import ControlEnv
    except ImportError as error:
        raise SimulatorMissingError(f"{error}: {HOW_TO_INSTALL}") from error
    text = warning(_mujoco().__version__)
    if text and assets.is_real:
        logger.warning("%s", text)
    # Its own handler prints, and writes a file into the current folder.
    _mujoco().set_mju_user_warning(lambda text: logger.debug("MuJoCo: %s", text))
    libero.libero._assets_path_cache = str(assets.folder)
    try:
        with _quiet():
            return ControlEnv(
                bddl_file_name=str(bddl_file),
                has_renderer=False,
                has_offscreen_renderer=False,
                use_camera_obs=False,
                hard_reset=False,
                ignore_done=True,
            )
    except OSError as error:
        raise AssetsError(
            f"{bddl_file.stem}: {error}; the {assets.label} assets in {assets.folder} lack it"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the simulator's prints and warnings from the terminal; its exceptions pass.

    Where warnings are errors, robosuite could not even be imported: compiling it warns of escapes.
    """
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
