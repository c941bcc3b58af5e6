"""The environment: the same episodes whatever ran before, upright frames, clear errors."""

import os
import subprocess
import sys

import numpy as np
import pytest

from deft_client.libero.errors import AssetsError, GraphicsError, UnstableError
from deft_client.libero.simulator.assets import STAND_INS
from deft_client.libero.simulator.environment import (
    EnvironmentSettings,
    LiberoEnvironment,
    Variation,
)
from deft_client.libero.simulator.graphics import Renderer
from deft_client.libero.simulator.standins.build import build
from deft_client.libero.simulator.suites import find_task
from tests.client.libero.simulated import PHYSICS, needs_simulator, physics

pytestmark = needs_simulator
TASK = ("libero_object", 5)


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
    environment = physics(*task)
    played = []
    for advance in (environment.advance, environment.advance_with_robosuite):
        environment.restart(0)
        settle_by = [np.array([0.0] * 6 + [-1.0])] * 4
        for action in [*settle_by, *actions(12), *actions(8, gripper=1.0)]:
            advance(action)
        played.append(environment.simulator_state())
    np.testing.assert_allclose(played[0], played[1], atol=2e-6)


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


def test_a_frame_shows_the_scene_upright():
    """The robot stands at the far side, so it is above; the floor in front is lighter below."""
    settings = EnvironmentSettings(frame_size=128, assets_folder=STAND_INS)
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
    settings = EnvironmentSettings(frame_size=64, wrist_camera=True, assets_folder=STAND_INS)
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
    with pytest.raises(ValueError, match="trials 0 to 49, got 50"):
        environment.restart(50)
    environment.restart(0)
    with pytest.raises(ValueError, match="7 finite numbers"):
        environment.advance(np.zeros(6))
    with pytest.raises(ValueError, match="7 finite numbers"):
        environment.advance(np.full(7, np.nan))


def test_a_simulation_that_blows_up_is_an_error_until_the_next_reset():
    environment = physics(*TASK)
    environment.restart(0)
    environment._inner.sim.data.qvel[:] = 1e12
    with pytest.raises(UnstableError, match="unstable"):
        environment.advance(np.zeros(7))
    environment.restart(0)
    assert not environment.advance(np.zeros(7))


def test_assets_that_lack_a_file_are_an_error_that_names_it(tmp_path):
    build(tmp_path)
    (tmp_path / "stable_hope_objects" / "tomato_sauce" / "tomato_sauce.xml").unlink()
    settings = EnvironmentSettings(renderer=Renderer.NONE, assets_folder=tmp_path)
    with pytest.raises(AssetsError, match=r"tomato_sauce\.xml"):
        LiberoEnvironment(find_task(*TASK), settings)


def test_nothing_is_asked_on_the_terminal_printed_or_written_to_the_home_folder(tmp_path):
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    program = (
        "from deft_client.libero.simulator.assets import STAND_INS\n"
        "from deft_client.libero.simulator.environment import EnvironmentSettings\n"
        "from deft_client.libero.simulator.environment import open_environment\n"
        "from deft_client.libero.simulator.suites import find_task\n"
        "import numpy as np\n"
        "task = find_task('libero_object', 5)\n"
        "settings = EnvironmentSettings(assets_folder=STAND_INS)\n"
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
