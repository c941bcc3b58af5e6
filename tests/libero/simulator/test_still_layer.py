"""Frames drawn in two parts, what stands still and what moves, are those drawn in one."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from deft_libero.simulator.camera import Camera, StillLayer
from deft_libero.simulator.conventions import OPEN, wait_action
from deft_libero.simulator.graphics import Renderer, find_renderer
from tests.libero.simulated import physics, settle

pytestmark = pytest.mark.libero
TASK = ("libero_object", 5)
DOWN_AND_ASIDE = np.array([0.3, 0.2, -0.6, 0.1, 0.0, 0.2, OPEN])


@pytest.fixture
def camera() -> Iterator[Camera]:
    """A scene as real assets are drawn, with several samples a pixel."""
    environment = physics(*TASK)
    environment.restart(0)
    settle(environment)
    mujoco = import_module("mujoco")
    mujoco.set_mju_user_warning(None)
    camera = Camera(mujoco, environment._inner.sim, 64, find_renderer(Renderer.AUTO))
    if not camera.drawing.offSamples:
        pytest.skip("this OpenGL takes one sample a pixel")
    yield camera
    camera.close()


def view_of(camera: Camera, name: str) -> Any:
    view = camera.mujoco.MjvCamera()
    view.type = camera.mujoco.mjtCamera.mjCAMERA_FIXED
    view.fixedcamid = camera.model.camera(name).id
    return view


def compare(camera: Camera, name: str, num_frames: int = 12) -> list[int]:
    """Draw frames both ways while the arm moves; return how many things were kept in each."""
    view = view_of(camera, name)
    layer, environment, kept = StillLayer(camera, view), physics(*TASK), []
    for _ in range(num_frames):
        environment.advance(DOWN_AND_ASIDE)
        layer.draw()
        in_parts = camera.pixels()
        camera.draw(view)
        np.testing.assert_array_equal(in_parts, camera.pixels())
        kept.append(int(layer.still.sum()))
    return kept


def test_pixels_are_the_same_and_most_things_are_drawn_once(camera: Camera):
    kept = compare(camera, "agentview")
    assert kept[0] == 0, "nothing is known of the first frame"
    assert kept[-1] > 10


def test_what_begins_to_move_is_drawn_again(camera: Camera):
    for _ in range(100):  # until the basket is at rest to the last bit that is drawn
        physics(*TASK).advance(wait_action())
    kept = compare(camera, "agentview")
    moved = camera.model.body("basket_1_main").dofadr[0]
    camera.data.qvel[moved] = 2.0  # metres per second: it slides through the next frames
    assert compare(camera, "agentview", 4)[-1] < kept[-1]


def test_what_comes_to_rest_later_is_kept_from_then_on(camera: Camera):
    num_kept = compare(camera, "agentview")[-1]
    basket = camera.model.body("basket_1_main").dofadr[0]
    view, environment = view_of(camera, "agentview"), physics(*TASK)
    layer = StillLayer(camera, view)
    for step in range(150):  # until the basket is at rest to the last bit that is drawn
        if step < 10:
            camera.data.qvel[basket] = 0.1  # metres per second
        environment.advance(wait_action())
        layer.draw()
    assert layer.still.sum() >= num_kept


def test_a_camera_that_moves_keeps_nothing(camera: Camera):
    assert compare(camera, "robot0_eye_in_hand", 5) == [0] * 5


def test_where_something_is_transparent_nothing_is_kept(camera: Camera):
    drawn = np.flatnonzero(camera.model.geom_group == 1)
    before = camera.model.geom_rgba[drawn].copy()
    camera.model.geom_rgba[drawn, 3] = 0.5
    assert compare(camera, "agentview", 5) == [0] * 5
    camera.model.geom_rgba[drawn] = before
