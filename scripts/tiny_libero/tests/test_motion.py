import numpy as np
import pytest

from deft_libero.simulator.conventions import CLOSE, OPEN
from deft_libero.simulator.scene import Pose, Scene
from deft_libero.simulator.stepping import rotation_error, turned
from tiny_libero_recipe.expert.geometry import Cloud, pinch, tallest_on_way
from tiny_libero_recipe.expert.motion import (
    DOWN,
    UP,
    Aim,
    Manner,
    downward,
    rotation_vector,
    steer,
    tipped,
    turn_to,
)

Y = np.array([0.0, 1.0, 0.0])


def scene_at(position, rotation=None, opening=0.08) -> Scene:
    hand = Pose(np.array(position, float), downward(Y) if rotation is None else rotation)
    return Scene(hand, opening, {}, {}, {})


def test_far_away_the_straight_way_is_taken_at_nearly_full_speed():
    aim = Aim(np.array([0.4, 0.3, 0.0]), downward(Y), closed=False)
    action = steer(scene_at([0, 0, 0]), aim, Manner())
    np.testing.assert_allclose(action, [0.8, 0.6, 0, 0, 0, 0, OPEN], atol=1e-3)


def test_near_the_goal_the_action_shrinks_smoothly_with_the_distance():
    actions = [
        steer(scene_at([0, 0, 0]), Aim(np.array([0.0, y, 0.0]), downward(Y), True), Manner())
        for y in np.linspace(0.0, 0.1, 200)
    ]
    speeds = np.array(actions)[:, 1]
    assert speeds[0] == 0
    assert (np.diff(speeds) > 0).all()
    assert np.diff(speeds).max() < 0.02
    assert speeds[20] == pytest.approx(20 * 0.01, rel=0.05), "20 units per metre at the end"
    assert actions[50][-1] == CLOSE


def test_episodes_differ_in_pace_and_end_on_the_way():
    manners = [Manner.draw(np.random.default_rng(seed)) for seed in range(40)]
    far, near = np.array([0.3, 0.0, 0.0]), np.array([0.002, 0.0, 0.0])
    actions = [
        np.stack([steer(scene_at([0, 0, 0]), Aim(aim, downward(Y), True), one) for one in manners])
        for aim in (far, near)
    ]
    assert np.ptp(actions[0][:, 0]) > 0.25
    assert np.abs(actions[0][:, 1]).max() > 0.05
    assert np.abs(actions[1][:, 1:3]).max() < 0.01
    assert np.abs(actions[0]).max() <= 1.0


def test_a_straight_manner_keeps_its_pace_and_strays_nowhere():
    manner = Manner.draw(np.random.default_rng(0))
    assert np.abs(manner.astray(0.2)).max() > 0.001
    assert manner.straight().pace == manner.pace
    assert not np.any(manner.straight().astray(0.2))


def test_setting_off_is_slow():
    aim = Aim(np.array([0.4, 0.0, 0.0]), downward(Y), closed=False)
    assert steer(scene_at([0, 0, 0]), aim, Manner(), ease=0.3)[0] == pytest.approx(0.3, abs=0.01)


def test_rising_can_be_slower_than_moving():
    aim = Aim(np.array([0.5, 0.0, 0.5]), downward(Y), closed=True, rise=0.25)
    action = steer(scene_at([0, 0, 0]), aim, Manner())
    np.testing.assert_allclose(action[:3], [0.5**0.5, 0.0, 0.25], atol=1e-3)


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
