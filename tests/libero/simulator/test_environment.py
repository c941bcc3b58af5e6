"""The environment: the same episodes whatever ran before, upright frames, clear errors."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from deft_libero.errors import AssetsError, GraphicsError, UnstableError
from deft_libero.simulator.environment import EnvironmentSettings, LiberoEnvironment, Variation
from deft_libero.simulator.graphics import Renderer
from deft_libero.simulator.scene import Goal
from deft_libero.simulator.suites import find_task
from tests.libero.simulated import PHYSICS, physics
from tests.standins import stand_ins
from tests.standins.build import build

pytestmark = pytest.mark.libero
TASK = ("libero_object", 5)
SLOW = replace(PHYSICS, fast=False)


def actions(num_steps: int, gripper: float = -1.0) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.append(rng.uniform(-0.6, 0.6, (num_steps, 6)), np.full((num_steps, 1), gripper), 1)


def states(environment: LiberoEnvironment, num_steps: int) -> np.ndarray:
    rows = []
    for action in actions(num_steps):
        environment.advance(action)
        rows.append(environment.simulator_state())
    return np.stack(rows)


def test_an_episode_is_the_same_bit_for_bit_whatever_ran_before():
    environment = physics(*TASK)
    environment.restart(3)
    first = states(environment, 15)
    environment.restart(7)
    states(environment, 5)
    np.random.seed(99)
    environment.restart(3)
    np.testing.assert_array_equal(states(environment, 15), first)


def test_resetting_leaves_numpys_global_generator_alone():
    environment = physics(*TASK)
    np.random.seed(5)
    expected = np.random.random(3)
    np.random.seed(5)
    environment.restart(0)
    np.testing.assert_array_equal(np.random.random(3), expected)


def test_a_fresh_environment_plays_the_same_episode():
    used = physics(*TASK)
    used.restart(1)
    states(used, 5)
    used.restart(2)
    fresh = LiberoEnvironment(find_task(*TASK), PHYSICS)
    fresh.restart(2)
    np.testing.assert_array_equal(states(used, 12), states(fresh, 12))
    fresh.close()


@pytest.mark.parametrize("task", [TASK, ("libero_spatial", 4)])
def test_lean_stepping_agrees_with_robosuites_own_loop(task):
    """Idle steps, motion with rotation, and closing fingers, in contact with the floor or not."""
    played = []
    for environment in (physics(*task), slow := LiberoEnvironment(find_task(*task), SLOW)):
        advance = environment.advance
        environment.restart(0)
        settle_by = [np.array([0.0] * 6 + [-1.0])] * 4
        for action in [*settle_by, *actions(12), *actions(8, gripper=1.0)]:
            advance(action)
        played.append(environment.simulator_state())
    slow.close()
    np.testing.assert_allclose(played[0], played[1], atol=2e-6)


def test_without_fast_an_action_is_what_libero_itself_does_with_it():
    """To the last bit, and with the same word on success."""
    environment = LiberoEnvironment(find_task(*TASK), SLOW)
    played = []
    for step in (environment.advance, lambda action: environment._control.env.step(action)[2]):
        environment.restart(0)
        done = [bool(step(action)) for action in actions(6)]
        played.append((done, environment.simulator_state().tobytes()))
    environment.close()
    assert played[0] == played[1]


def test_recorded_states_are_taken_as_they_are():
    environment = physics(*TASK)
    environment.restart(11)
    np.testing.assert_array_equal(environment.simulator_state(), environment.initial_states[11])


def test_widening_moves_things_by_centimetres_and_leaves_the_robot():
    environment = physics(*TASK)
    environment.restart(0)
    before, robot = environment.scene(), environment.robot_state()
    environment.restart(0, Variation(seed=1, widen_metres=0.04))
    after = environment.scene()
    shifts = [
        np.abs(after.bodies[name].position - before.bodies[name].position) for name in before.bodies
    ]
    assert all(shift[:2].max() <= 0.04 + 1e-9 for shift in shifts)
    assert sum(shift[:2].max() > 0.003 for shift in shifts) >= 4
    np.testing.assert_allclose(environment.robot_state(), robot, atol=1e-6)


def test_every_task_and_trial_is_moved_by_a_draw_of_its_own():
    shifts = []
    for number, trial in ((5, 0), (5, 1), (7, 0)):
        environment = physics("libero_object", number)
        places = []
        for moved in (0.0, 0.04):
            environment.restart(trial, Variation(seed=1, widen_metres=moved))
            places.append(environment.scene().bodies["basket_1"].position[:2])
        shifts.append(places[1] - places[0])
    assert len({tuple(shift.round(9)) for shift in shifts}) == 3


def test_two_things_can_change_places():
    environment = physics(*TASK)
    environment.restart(0)
    before = environment.scene().bodies
    first, second = [name for name in environment.things if not name.startswith("basket")][:2]
    environment.restart(0, Variation(exchanged=(first, second)))
    after = environment.scene().bodies
    for one, other in ((first, second), (second, first)):
        np.testing.assert_allclose(after[one].position[:2], before[other].position[:2], atol=1e-6)
        assert after[one].position[2] == pytest.approx(before[one].position[2])
    environment.restart(0)
    np.testing.assert_allclose(
        environment.scene().bodies[first].position, before[first].position, atol=1e-9
    )


def test_another_thing_can_be_asked_for_until_the_next_restart():
    environment = physics("libero_object", 5)
    own = environment.goals()
    other = next(name for name in environment.things if name not in (own[0].subject, "basket_1"))
    asked = (Goal("in", other, own[0].target),)
    environment.restart(0, Variation(goals=asked))
    assert environment.goals() == asked
    assert environment.scene().goals_held == (False,)
    environment.restart(0)
    assert environment.goals() == own


def test_points_of_the_world_are_found_in_the_picture():
    """The pixels that change when a thing is moved lie around where it is said to be."""
    settings = EnvironmentSettings(frame_size=128, assets_folder=stand_ins())
    environment = LiberoEnvironment(find_task("libero_object", 5), settings)
    names = tuple(name for name in environment.things if not name.startswith("basket"))[:2]
    frame = environment.reset(0).image.astype(int)
    places = np.stack([environment.scene().bodies[name].position for name in names])
    found = environment.pixels(places) * 128
    environment.restart(0, Variation(exchanged=(names[0], names[1])))
    changed = np.abs(environment.frame().image.astype(int) - frame).sum(axis=2) > 60
    environment.close()
    rows, columns = np.nonzero(changed)
    distances = np.linalg.norm(np.stack([columns, rows], axis=1)[:, None] - found[None], axis=2)
    assert len(rows) > 20
    assert (distances.min(axis=1) < 22).mean() > 0.9
    assert (distances < 22).any(axis=0).all()


def test_a_frame_shows_the_scene_upright():
    """The robot stands at the far side, so it is above; the floor in front is lighter below."""
    settings = EnvironmentSettings(frame_size=128, assets_folder=stand_ins())
    environment = LiberoEnvironment(find_task(*TASK), settings)
    frame = environment.reset(0)
    assert frame.image.shape == (128, 128, 3)
    assert frame.image.dtype == np.uint8
    assert frame.state.shape == (8,)
    assert np.isfinite(frame.state).all()
    grey = frame.image.astype(float).mean(axis=2)
    assert grey[100:].mean() > grey[:16].mean() + 20
    result = environment.step(np.array([0.0] * 6 + [-1.0]))
    assert not result.done
    assert np.abs(result.frame.image.astype(int) - frame.image).mean() < 5
    again = environment.frame()
    np.testing.assert_array_equal(again.image, result.frame.image)
    environment.close()


def test_the_wrist_camera_is_there_when_asked_for():
    settings = EnvironmentSettings(frame_size=64, wrist_camera=True, assets_folder=stand_ins())
    environment = LiberoEnvironment(find_task(*TASK), settings)
    frame = environment.reset(0)
    assert frame.cameras["wrist"].shape == (64, 64, 3)
    assert (frame.cameras["wrist"] != frame.image).any()
    environment.close()


def test_an_environment_without_renderer_says_so_when_asked_for_a_frame():
    environment = physics(*TASK)
    environment.restart(0)
    with pytest.raises(GraphicsError, match="without a renderer"):
        environment.frame()


def test_actions_and_trials_are_checked():
    environment = physics(*TASK)
    with pytest.raises(ValueError, match="got 50"):
        environment.restart(50)
    environment.restart(0)
    with pytest.raises(ValueError, match="7 finite numbers"):
        environment.advance(np.zeros(6))
    with pytest.raises(ValueError, match="7 finite numbers"):
        environment.advance(np.full(7, np.nan))


def test_a_simulation_that_blows_up_is_an_error_until_the_next_reset():
    for settings in (PHYSICS, SLOW):
        environment = LiberoEnvironment(find_task(*TASK), settings)
        environment.restart(0)
        environment._inner.sim.data.qvel[:] = 1e12
        with pytest.raises(UnstableError, match="unstable"):
            environment.advance(np.zeros(7))
        environment.restart(0)
        assert not environment.advance(np.zeros(7))
        environment.close()


def test_assets_that_lack_a_file_are_an_error_that_names_it(tmp_path):
    build(tmp_path)
    (tmp_path / "stable_hope_objects" / "tomato_sauce" / "tomato_sauce.xml").unlink()
    settings = EnvironmentSettings(renderer=Renderer.NONE, assets_folder=tmp_path)
    with pytest.raises(AssetsError, match=r"tomato_sauce\.xml"):
        LiberoEnvironment(find_task(*TASK), settings)


def test_nothing_is_written_to_the_home_folder_or_asked(tmp_path):
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    program = (
        "from pathlib import Path\n"
        "from deft_libero.simulator.environment import EnvironmentSettings\n"
        "from deft_libero.simulator.environment import open_environment\n"
        "from deft_libero.simulator.suites import find_task\n"
        "import numpy as np\n"
        "task = find_task('libero_object', 5)\n"
        f"settings = EnvironmentSettings(assets_folder=Path({str(stand_ins())!r}))\n"
        "environment = open_environment(task, settings)\n"
        "environment.reset(0)\n"
        "environment.step(np.zeros(7))\n"
        "environment.close()\n"
    )
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    paths = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, **paths, "HOME": str(home), "DEFT_CACHE_DIR": str(cache)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=home, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout, ran.stderr) == ("", "")
    assert list(home.iterdir()) == []
    assert cache.is_dir()
