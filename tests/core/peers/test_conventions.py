"""What the gripper's number means to whom."""

import numpy as np
import pytest

from deft_core.peers.conventions import CONVENTIONS, OPENPI, from_robosuite, to_robosuite


@pytest.mark.parametrize(
    ("answer", "gripper"), [(0.996, -1.0), (0.51, -1.0), (0.5, 1), (0.49, 1), (0, 1)]
)
def test_training_data_opens_at_one_and_robosuite_at_minus_one(answer, gripper):
    action = np.array([0.1] * 6 + [answer])
    assert to_robosuite(action)[-1] == gripper
    assert action[-1] == answer, "the caller's array is not touched"


@pytest.mark.parametrize("gripper", [-1.0, 1.0])
def test_the_two_gripper_dialects_are_inverse(gripper):
    action = np.array([0.3, -0.2, 0, 0, 0, 1, gripper])
    np.testing.assert_array_equal(to_robosuite(from_robosuite(action)), action)


def test_a_whole_chunk_is_turned_as_each_of_its_actions() -> None:
    chunk = np.linspace(0, 1, 14).reshape(2, 7)
    np.testing.assert_array_equal(to_robosuite(chunk), [to_robosuite(one) for one in chunk])


def test_joints_of_two_arms_have_no_gripper_at_their_end() -> None:
    actions = np.linspace(-1.0, 1.0, 28).reshape(2, 14)
    np.testing.assert_array_equal(OPENPI.from_policy(actions), actions)


def test_conventions_are_found_by_name() -> None:
    assert all(one.name == name for name, one in CONVENTIONS.items())
