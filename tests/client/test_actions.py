"""What staying and a limit mean, for each kind of action."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_client.actions import ActionRules, Excess, check_actions
from deft_core.errors import UnusableValueError

pytestmark = pytest.mark.promise

DELTAS = ActionRules((True,) * 6 + (False,), max_step=(0.1,) * 6 + (np.inf,))
JOINTS = ActionRules((False,) * 3, max_step=(0.2,) * 3)
TWO_ARMS = ActionRules((True, True, False) * 2)  # each with a gripper of its own


def test_deltas_stay_by_not_moving_and_the_gripper_as_it_was():
    before = np.array([0.05, 0, 0, 0, 0, 0.02, 1.0])
    np.testing.assert_array_equal(DELTAS.hold(before), [0, 0, 0, 0, 0, 0, 1])


def test_absolute_joints_stay_where_they_were_and_never_go_to_zero():
    before = np.array([0.3, -1.2, 2.0])
    np.testing.assert_array_equal(JOINTS.hold(before), before)


def test_each_of_several_grippers_stays_as_it_was():
    before = np.array([0.1, 0.1, 1.0, -0.1, 0.1, 0.0])
    np.testing.assert_array_equal(TWO_ARMS.hold(before), [0, 0, 1, 0, 0, 0])


def test_nobody_invents_a_position_that_is_not_known():
    assert DELTAS.hold(None) is None
    assert JOINTS.hold(None) is None
    np.testing.assert_array_equal(ActionRules((True, True)).hold(None), [0, 0])


def test_motions_are_limited_in_amount_and_positions_in_change():
    before = np.array([0.1, 0, 0, 0, 0, 0, 1.0])
    action = np.array([5.0, -5.0, 0.05, 0, 0, 0, -1.0])
    np.testing.assert_array_equal(DELTAS.limited(action, before), [0.1, -0.1, 0.05, 0, 0, 0, -1.0])
    far = JOINTS.limited(np.array([0.0, -1.1, 9.0]), np.array([1.0, -1.0, 2.0]))
    np.testing.assert_allclose(far, [0.8, -1.1, 2.2])


def test_a_distance_cannot_be_limited_from_nowhere():
    assert JOINTS.limited(np.zeros(3), None) is None
    # A gripper without a limit may be anywhere; the motions beside it are limited all the same.
    limited = DELTAS.limited(np.array([5.0, 0, 0, 0, 0, 0, 1.0]), None)
    np.testing.assert_array_equal(limited, [0.1, 0, 0, 0, 0, 0, 1.0])


def test_a_change_is_limited_whatever_the_kind():
    """A motion speeds up and slows down little by little; a gripper without a limit snaps."""
    rules = ActionRules((True, False, False), max_change=(0.1, 0.2, np.inf))
    before = np.array([0.5, 1.0, 0.0])
    np.testing.assert_allclose(rules.limited(np.array([-1.0, 0.0, 1.0]), before), [0.4, 0.8, 1.0])
    np.testing.assert_allclose(rules.limited(np.array([0.45, 1.1, 1.0]), before), [0.45, 1.1, 1.0])
    assert rules.limited(np.zeros(3), None) is None
    fast = ActionRules((True,), max_step=(0.3,), max_change=(0.5,))
    np.testing.assert_allclose(fast.limited(np.array([1.0]), np.array([0.1])), [0.3])


def test_a_motion_may_go_one_way_alone_but_must_be_able_to_stop():
    assert ActionRules((True,), low=(-1.0,), high=(0.0,)).motions.all()
    assert ActionRules((True,), low=(0.0,), high=(1.0,)).motions.all()
    for low, high in ((-1.0, -0.1), (0.1, 1.0)):
        with pytest.raises(ValueError, match="0 between them"):
            ActionRules((True,), low=(low,), high=(high,))


def test_commands_stay_in_range_from_a_bad_measurement():
    rules = ActionRules((False,), low=(-1.0,), high=(1.0,), max_step=(0.25,))
    assert rules.limited(np.array([1.125]), np.array([1.125])).tolist() == [1.0]
    assert rules.limited(np.array([2.0]), np.array([2.0])).tolist() == [1.75]  # and back in steps


numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=3, max_size=3), st.lists(numbers, min_size=3, max_size=3))
@settings(max_examples=100, deadline=None)
def test_whatever_is_asked_for_one_step_stays_within_the_limit(action, before):
    limited = JOINTS.limited(np.array(action), np.array(before))
    assert np.abs(limited - before).max() <= 0.2 + 1e-9


@pytest.mark.parametrize(
    "actions",
    [
        *(np.zeros((0, 3)), np.zeros((2, 0)), np.zeros((1, 4))),
        *(np.full((1, 3), value) for value in (np.nan, -np.inf, 1e17, -1e308)),
    ],
)
def test_actions_that_cannot_be_executed_are_refused(actions):
    with pytest.raises(UnusableValueError) as caught:
        JOINTS.check(actions)
    assert caught.value.field == "actions"


def test_a_single_value_out_of_bounds_refuses_the_whole_answer():
    rules = ActionRules((True, True), low=(-1.0, -np.inf), high=None)
    rules.check(np.array([[0.0, -1e9], [-1.0, 1e9]]))
    with pytest.raises(UnusableValueError, match=r"-1.5 in dimension 0"):
        rules.check(np.array([[0.0, 0.0], [-1.5, 0.0]]))


def test_any_size_is_taken_where_none_was_promised():
    check_actions(np.zeros((1, 9)))
    check_actions(np.zeros((9000, 9)))


def test_more_steps_than_were_promised_are_refused():
    check_actions(np.zeros((8, 7)), 7, 8)
    with pytest.raises(UnusableValueError, match=r"1 to 8 steps of 7 numbers, got \[9, 7\]"):
        check_actions(np.zeros((9, 7)), 7, 8)


@pytest.mark.parametrize(
    "values",
    [
        {"is_motion": ()},
        {"is_motion": (True,), "low": (0.0, 0.0)},
        {"is_motion": (True,), "high": (np.nan,)},
        {"is_motion": (True,), "max_step": (-0.1,)},
        {"is_motion": (True,), "max_change": (-0.1,)},
        {"is_motion": (True,), "is_switch": (True, False)},
        {"is_motion": (True,), "low": (0.5,), "high": (1.0,)},
        {"is_motion": (False,), "low": (0.5,), "high": (0.0,)},
    ],
)
def test_rules_that_make_no_sense_are_refused(values):
    with pytest.raises(ValueError, match="needed|must be"):
        ActionRules(**values)


def test_the_limit_that_shortens_an_action_most_is_named_with_its_numbers():
    rules = ActionRules((True, False), max_step=(0.1, 0.5), max_change=(0.2, np.inf))
    before = np.array([0.0, 1.0])
    assert rules.excess(np.array([0.1, 1.5]), before) is None
    assert rules.excess(np.array([0.15, 3.0]), before) == Excess("max_step", 1, 2.0, 0.5)
    assert rules.excess(np.array([-0.1, 1.0]), np.array([0.2, 1.0])) == Excess(
        "max_change", 0, pytest.approx(0.3), 0.2
    )
    assert ActionRules((True,), max_step=(0.0,)).excess(np.array([1e-9]), None).ratio == np.inf
