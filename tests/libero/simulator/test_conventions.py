"""The conventions against numbers worked out by hand."""

import math

import numpy as np
import pytest

from deft_core.peers.conventions import upright
from deft_libero.simulator.conventions import axis_angle, robot_state, wait_action

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("quaternion", "expected"),
    [
        ([0, 0, 0, 1], [0, 0, 0]),
        ([0, 0, HALF, HALF], [0, 0, math.pi / 2]),
        ([HALF, 0, 0, HALF], [math.pi / 2, 0, 0]),
        ([1, 0, 0, 0], [math.pi, 0, 0]),
        ([0, 0, -HALF, -HALF], [0, 0, -3 * math.pi / 2]),  # the sign is kept as it comes
        ([0, 0, 0, 1.0000001], [0, 0, 0]),  # rounding beyond 1 is cut off
    ],
)
def test_axis_angle_of_a_quaternion(quaternion, expected):
    np.testing.assert_allclose(axis_angle(np.array(quaternion, float)), expected, atol=1e-12)


def test_a_frame_is_turned_about_both_axes():
    frame = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    turned = upright(frame)
    assert turned[0, 0].tolist() == [9, 10, 11]
    assert turned[1, 0].tolist() == [3, 4, 5]
    assert turned.flags["C_CONTIGUOUS"]


def test_the_robot_state_has_eight_numbers_in_their_order():
    state = robot_state(
        np.array([1.0, 2.0, 3.0]), np.array([0, 0, HALF, HALF]), np.array([0.04, -0.04])
    )
    np.testing.assert_allclose(state, [1, 2, 3, 0, 0, math.pi / 2, 0.04, -0.04], rtol=1e-6)
    assert state.dtype == np.float32


def test_waiting_holds_still_with_open_fingers():
    assert wait_action().tolist() == [0, 0, 0, 0, 0, 0, -1]
