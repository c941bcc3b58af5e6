"""What a robot may be told to do."""

import numpy as np
import pytest
from numpy.typing import NDArray

from deft_server.errors import UnsafeAnswerError
from deft_server.serving.service import checked_actions
from deft_server.settings import OutOfRange
from tests.standins.policies import LimitedFake

pytestmark = pytest.mark.promise

ZERO = np.zeros((1, 7))
Actions = NDArray[np.float64]


def checked(
    actions: Actions, may_exceed: bool | None = False, out_of_range: OutOfRange = "clamp"
) -> Actions:
    """Check actions against a range of -1 to 1, or against none where nothing says of one."""
    limits = None
    if may_exceed is not None:
        limits = LimitedFake(may_exceed=may_exceed).action_limits(None)
    return checked_actions(actions, 7, limits, out_of_range)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_answer_that_is_not_finite_is_withheld(bad: float):
    actions = ZERO.copy()
    actions[0, 3] = bad
    with pytest.raises(UnsafeAnswerError, match="NaN or infinity"):
        checked(actions, None)


@pytest.mark.parametrize("shape", [(0, 7), (1, 6), (2, 8)])
def test_an_answer_of_another_shape_is_withheld(shape: tuple[int, int]):
    with pytest.raises(UnsafeAnswerError, match="shape"):
        checked(np.zeros(shape))


def test_an_answer_beyond_the_statistics_is_withheld_by_name():
    actions = np.zeros((3, 7))
    actions[2, 5] = 1.01
    with pytest.raises(UnsafeAnswerError, match=r"1\.01 in dimension 5"):
        checked(actions)


def test_the_ends_of_the_range_are_inside_whatever_the_rounding():
    actions = np.array([[1.0 + 1e-9] * 7, [-1.0 - 1e-9] * 7])
    assert checked(actions) is actions


def test_an_answer_of_a_policy_that_may_exceed_the_statistics_is_clamped():
    actions = np.array([[0.5, 1.2, -1.5, 0.0, 0.0, 0.0, 1.001]])
    clamped = checked(actions, may_exceed=True)
    np.testing.assert_array_equal(clamped, [[0.5, 1.0, -1.0, 0.0, 0.0, 0.0, 1.0]])
    inside = np.full((2, 7), 0.9)
    assert checked(inside, may_exceed=True) is inside


def test_on_request_it_is_sent_as_it_is_but_faults_are_still_withheld():
    actions = np.full((1, 7), 1.2)
    assert checked(actions, True, "passthrough") is actions
    with pytest.raises(UnsafeAnswerError, match="1.2 in dimension 0"):
        checked(actions, False, "passthrough")
    with pytest.raises(UnsafeAnswerError, match="NaN"):
        checked(actions * np.nan, True, "passthrough")


def test_a_policy_that_tells_no_limits_is_checked_for_finiteness_only():
    actions = np.full((1, 7), 1e6)
    assert checked(actions, None) is actions
