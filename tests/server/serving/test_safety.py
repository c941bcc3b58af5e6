"""What a robot may be told to do."""

import numpy as np
import pytest

from deft_policies.constant import ConstantPolicy
from deft_server.errors import UnsafeAnswerError
from deft_server.serving.hosting import HostedPolicy
from deft_server.serving.service import ActionCheck
from deft_server.settings import ActionRange
from tests.standins.policies import LimitedFake

ZERO = np.zeros((1, 7))


def plain_check() -> ActionCheck:
    return ActionCheck(HostedPolicy.of(ConstantPolicy()), ActionRange.CLAMP)


def limited_check(
    may_exceed: bool = False, action_range: ActionRange = ActionRange.CLAMP
) -> ActionCheck:
    return ActionCheck(HostedPolicy.of(LimitedFake(may_exceed=may_exceed)), action_range)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_answer_that_is_not_finite_is_withheld(bad: float):
    actions = ZERO.copy()
    actions[0, 3] = bad
    with pytest.raises(UnsafeAnswerError, match="NaN or infinity"):
        plain_check().check(actions, None)


@pytest.mark.parametrize("shape", [(0, 7), (1, 6), (2, 8)])
def test_an_answer_of_another_shape_is_withheld(shape: tuple[int, int]):
    with pytest.raises(UnsafeAnswerError, match="shape"):
        limited_check().check(np.zeros(shape), None)


def test_an_answer_beyond_the_statistics_is_withheld_and_the_culprit_named():
    actions = np.zeros((3, 7))
    actions[2, 5] = 1.01
    with pytest.raises(UnsafeAnswerError, match=r"1\.01 in dimension 5"):
        limited_check().check(actions, None)


def test_the_ends_of_the_range_are_inside_whatever_the_rounding():
    actions = np.array([[1.0 + 1e-9] * 7, [-1.0 - 1e-9] * 7])
    assert limited_check().check(actions, None) is actions


def test_an_answer_of_a_policy_that_may_exceed_the_statistics_is_clamped():
    check = limited_check(may_exceed=True)
    actions = np.array([[0.5, 1.2, -1.5, 0.0, 0.0, 0.0, 1.001]])
    clamped = check.check(actions, None)
    np.testing.assert_array_equal(clamped, [[0.5, 1.0, -1.0, 0.0, 0.0, 0.0, 1.0]])
    inside = np.full((2, 7), 0.9)
    assert check.check(inside, None) is inside


def test_on_request_it_is_sent_as_it_is_but_faults_are_still_withheld():
    free = limited_check(may_exceed=True, action_range=ActionRange.PEER)
    actions = np.full((1, 7), 1.2)
    assert free.check(actions, None) is actions
    with pytest.raises(UnsafeAnswerError, match="1.2 in dimension 0"):
        limited_check(action_range=ActionRange.PEER).check(actions, None)
    with pytest.raises(UnsafeAnswerError, match="NaN"):
        free.check(actions * np.nan, None)


def test_a_policy_that_tells_no_limits_is_checked_for_finiteness_only():
    actions = np.full((1, 7), 1e6)
    assert plain_check().check(actions, None) is actions
