"""Frames drawn in two parts, what stands still and what moves, are those drawn in one."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from deft_client.libero.simulator.camera import Camera
from deft_client.libero.simulator.conventions import OPEN, wait_action
from deft_client.libero.simulator.graphics import Renderer, find_renderer
from deft_client.libero.simulator.still_layer import GraphicsContext, StillLayer
from tests.client.libero.simulated import needs_simulator, physics, settle

pytestmark = needs_simulator
TASK = ("libero_object", 5)
DOWN_AND_ASIDE = np.array([0.3, 0.2, -0.6, 0.1, 0.0, 0.2, OPEN])


@pytest.fixture
def stage() -> Iterator[GraphicsContext]:
    """A scene as real assets are drawn, with several samples a pixel."""
    environment = physics(*TASK)
    environment.restart(0)
    settle(environment)
    mujoco = import_module("mujoco")
    mujoco.set_mju_user_warning(None)
    camera = Camera(mujoco, environment._inner.sim, 64, find_renderer(Renderer.AUTO))
    if not camera.stage.drawing.offSamples:
        pytest.skip("this OpenGL takes one sample a pixel")
    yield camera.stage
    camera.close()


def view_of(stage: GraphicsContext, name: str) -> Any:
    view = stage.mujoco.MjvCamera()
    view.type = stage.mujoco.mjtCamera.mjCAMERA_FIXED
    view.fixedcamid = stage.model.camera(name).id
    return view


def compare(stage: GraphicsContext, name: str, num_frames: int = 12) -> list[int]:
    """Draw frames both ways while the arm moves; return how many things were kept in each."""
    view = view_of(stage, name)
    layer, environment, kept = StillLayer(stage, view), physics(*TASK), []
    for _ in range(num_frames):
        environment.advance(DOWN_AND_ASIDE)
        layer.draw()
        in_parts = stage.pixels()
        stage.draw(view, stage.options)
        np.testing.assert_array_equal(in_parts, stage.pixels())
        kept.append(int(layer.still.sum()))
    return kept


def test_pixels_are_the_same_and_most_things_are_drawn_once(stage: GraphicsContext):
    kept = compare(stage, "agentview")
    assert kept[0] == 0, "nothing is known of the first frame"
    assert kept[-1] > 10


def test_what_begins_to_move_is_drawn_again(stage: GraphicsContext):
    for _ in range(100):  # until the basket is at rest to the last bit that is drawn
        physics(*TASK).advance(wait_action())
    kept = compare(stage, "agentview")
    moved = stage.model.body("basket_1_main").dofadr[0]
    stage.data.qvel[moved] = 2.0  # metres per second: it slides through the next frames
    assert compare(stage, "agentview", 4)[-1] < kept[-1]


def test_what_comes_to_rest_later_is_kept_from_then_on(stage: GraphicsContext):
    num_kept = compare(stage, "agentview")[-1]
    basket = stage.model.body("basket_1_main").dofadr[0]
    view, environment = view_of(stage, "agentview"), physics(*TASK)
    layer = StillLayer(stage, view)
    for step in range(150):  # until the basket is at rest to the last bit that is drawn
        if step < 10:
            stage.data.qvel[basket] = 0.1  # metres per second
        environment.advance(wait_action())
        layer.draw()
    assert layer.still.sum() >= num_kept


def test_a_camera_that_moves_keeps_nothing(stage: GraphicsContext):
    assert compare(stage, "robot0_eye_in_hand", 5) == [0] * 5


def test_where_something_is_transparent_nothing_is_kept(stage: GraphicsContext):
    drawn = np.flatnonzero(stage.model.geom_group == 1)
    before = stage.model.geom_rgba[drawn].copy()
    stage.model.geom_rgba[drawn, 3] = 0.5
    assert compare(stage, "agentview", 5) == [0] * 5
    stage.model.geom_rgba[drawn] = before
