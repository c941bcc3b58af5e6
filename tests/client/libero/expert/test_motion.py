import numpy as np
import pytest

from deft_client.libero.expert.geometry import Cloud, pinch, tallest_on_way
from deft_client.libero.expert.motion import (
    DOWN,
    SPEEDS,
    TURNS,
    UP,
    Aim,
    downward,
    rotation_vector,
    steer,
    tipped,
    turn_to,
)
from deft_client.libero.simulator.camera import thinned_faces
from deft_client.libero.simulator.conventions import CLOSE, OPEN
from deft_client.libero.simulator.scene import Pose, Scene
from deft_client.libero.simulator.stepping import rotation_error, turned

Y = np.array([0.0, 1.0, 0.0])


def scene_at(position, rotation=None, opening=0.08) -> Scene:
    hand = Pose(np.array(position, float), downward(Y) if rotation is None else rotation)
    return Scene(hand, opening, {}, {}, {})


def test_far_away_the_straight_way_is_taken_at_full_speed():
    aim = Aim(np.array([0.4, 0.2, 0.0]), downward(Y), closed=False)
    action = steer(scene_at([0, 0, 0]), aim)
    np.testing.assert_allclose(action, [1.0, 0.5, 0, 0, 0, 0, OPEN], atol=1e-9)


@pytest.mark.parametrize(
    ("millimetres", "speed"), [(30, 0.5), (10, 0.25), (3, 0.0625), (-3, -0.0625), (1, 0.0)]
)
def test_near_the_goal_the_action_shrinks_with_the_distance_in_steps(millimetres, speed):
    aim = Aim(np.array([0.0, millimetres / 1000, 0.0]), downward(Y), closed=True)
    action = steer(scene_at([0, 0, 0]), aim)
    assert action[1] == speed
    assert action[-1] == CLOSE


def test_nothing_but_a_few_speeds_and_turns_is_ever_asked_for():
    generator = np.random.default_rng(0)
    for _ in range(50):
        rotation = downward(generator.normal(size=3), generator.normal(size=3))
        action = steer(scene_at([0, 0, 0]), Aim(generator.normal(size=3) / 20, rotation, True))
        assert set(np.abs(action[:3])) <= set(SPEEDS)
        assert set(np.abs(action[3:6])) <= set(TURNS)


def test_rising_can_be_slower_than_moving():
    aim = Aim(np.array([0.5, 0.0, 0.5]), downward(Y), closed=True, rise=0.25)
    np.testing.assert_allclose(steer(scene_at([0, 0, 0]), aim)[:3], [1.0, 0.0, 0.25])


def test_the_shorter_turn_is_taken_because_fingers_are_alike():
    hand = Pose(np.zeros(3), downward(Y))
    almost_reversed = downward(np.array([0.1, -1.0, 0.0]))
    assert np.linalg.norm(turn_to(almost_reversed, hand)) < 0.2


def test_a_lean_tips_the_hand_without_turning_it():
    rotation = downward(Y, np.array([0.3, 0.0, 0.0]))
    assert rotation[0, 2] > 0.25
    np.testing.assert_allclose(rotation[:, 0], Y, atol=1e-12)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)


def test_tipping_brings_an_axis_where_it_should_be():
    tilted = np.array([0.2, -0.1, 1.0]) / np.linalg.norm([0.2, -0.1, 1.0])
    rotation = tipped(downward(Y), tilted, UP)
    step = rotation @ downward(Y).T
    np.testing.assert_allclose(step @ tilted, UP, atol=1e-9)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-9)


def test_rotation_vectors_and_turning_are_inverse():
    vector = np.array([0.2, -0.5, 0.3])
    np.testing.assert_allclose(rotation_vector(turned(np.eye(3), vector)), vector, atol=1e-12)
    small = 1e-3 * vector
    error = rotation_error(turned(np.eye(3), small), np.eye(3))
    np.testing.assert_allclose(error, small, rtol=1e-5)


def test_only_what_lies_between_the_pads_is_pinched():
    hand = Pose(np.zeros(3), downward(Y))
    across = np.linspace(-0.02, 0.02, 9)
    bar = np.stack([np.zeros(9), across, np.zeros(9)], axis=1)
    found = pinch(bar, hand)
    assert found is not None
    assert found.width == pytest.approx(0.04)
    assert pinch(bar + np.array([0.03, 0, 0]), hand) is None
    assert pinch(bar + 0.05 * DOWN, hand) is None


def test_only_what_is_near_the_way_counts_for_its_height():
    points = np.array([[0.5, 0.02, 0.3], [0.5, 0.4, 0.9], [2.0, 0.0, 0.8]])
    start, end = np.zeros(3), np.array([1.0, 0.0, 0.0])
    assert tallest_on_way(points, start, end, 0.05) == 0.3
    assert tallest_on_way(points, start, end, 0.01) == -np.inf


def test_a_cloud_moves_with_its_body():
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    world = Cloud(np.array([[1.0, 0.0, 0.0]])).at(Pose(np.array([0.0, 0.0, 5.0]), turn))
    np.testing.assert_allclose(world, [[0.0, 1.0, 5.0]], atol=1e-12)


def test_thinning_keeps_the_outline_and_drops_what_cannot_be_seen():
    """A fine grid of a square: far fewer faces, the same corners."""
    side = np.linspace(0.0, 0.1, 51, dtype=np.float32)
    x, y = np.meshgrid(side, side)
    vertices = np.stack([x.ravel(), y.ravel(), np.zeros(x.size, np.float32)], axis=1)
    first = (np.arange(50)[:, None] * 51 + np.arange(50)).ravel()
    faces = np.concatenate(
        [
            np.stack([first, first + 1, first + 51], 1),
            np.stack([first + 1, first + 52, first + 51], 1),
        ]
    ).astype(np.int32)
    kept, rows = thinned_faces(vertices, faces, cell=0.01)
    assert 0 < len(kept) < len(faces) / 10
    assert rows.max() < len(faces)
    used = vertices[np.unique(kept)]
    assert used.min() < 0.01
    assert used.max() > 0.09
