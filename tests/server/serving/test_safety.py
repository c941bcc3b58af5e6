"""What a robot may be told to do."""

import numpy as np
import pytest

from deft_policies.constant import ConstantPolicy
from deft_server.errors import UnsafeAnswerError
from deft_server.hosting.host import HostedPolicy
from deft_server.serving.safety import SafetyGuard, limit_steps
from deft_server.serving.sessions import RobotSession
from deft_server.settings import ActionRange, OnSuddenStep, Settings, SettingsError
from tests.server.fakes import LimitedFake

ZERO = np.zeros((1, 7))


def session(last: np.ndarray | None = None, session_id: str = "arm-1") -> RobotSession:
    one = RobotSession("lab", session_id, 0.0)
    if last is not None:
        one.sent(last)
    return one


def plain_guard() -> SafetyGuard:
    return SafetyGuard(HostedPolicy.of(ConstantPolicy()), Settings())


def guard(**settings: object) -> SafetyGuard:
    return SafetyGuard(HostedPolicy.of(LimitedFake()), Settings(**settings))  # type: ignore[arg-type]


def free_guard(settings: Settings) -> SafetyGuard:
    return SafetyGuard(HostedPolicy.of(LimitedFake(may_exceed=True)), settings)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_answer_that_is_not_finite_is_withheld(bad: float):
    actions = ZERO.copy()
    actions[0, 3] = bad
    with pytest.raises(UnsafeAnswerError, match="NaN or infinity"):
        plain_guard().check(actions, session(), None)


@pytest.mark.parametrize("shape", [(0, 7), (1, 6), (2, 8)])
def test_an_answer_of_another_shape_is_withheld(shape: tuple[int, int]):
    with pytest.raises(UnsafeAnswerError, match="shape"):
        guard().check(np.zeros(shape), session(), None)


def test_an_answer_beyond_the_statistics_is_withheld_and_the_culprit_named():
    actions = np.zeros((3, 7))
    actions[2, 5] = 1.01
    with pytest.raises(UnsafeAnswerError, match=r"1\.01 in dimension 5 of step 2"):
        guard().check(actions, session(), None)


def test_the_ends_of_the_range_are_inside_whatever_the_rounding():
    actions = np.array([[1.0 + 1e-9] * 7, [-1.0 - 1e-9] * 7])
    assert guard().check(actions, session(), None).actions is actions


def test_an_answer_of_a_policy_that_may_exceed_the_statistics_is_clamped_and_marked():
    free = free_guard(Settings())
    actions = np.array([[0.5, 1.2, -1.5, 0.0, 0.0, 0.0, 1.001]])
    checked = free.check(actions, session(), None)
    assert checked.is_clamped
    np.testing.assert_array_equal(checked.actions, [[0.5, 1.0, -1.0, 0.0, 0.0, 0.0, 1.0]])
    inside = np.full((2, 7), 0.9)
    checked = free.check(inside, session(), None)
    assert (checked.actions is inside, checked.is_clamped) == (True, False)


def test_what_was_clamped_to_the_statistics_still_obeys_the_limits_per_step():
    settings = Settings(step_limits={"*": (0.3,) * 7})
    free = free_guard(settings)
    checked = free.check(np.full((1, 7), 1.5), session(np.full(7, 0.9)), None)
    assert checked.is_clamped  # by the statistics alone: the step to their end is small enough
    np.testing.assert_array_equal(checked.actions, np.ones((1, 7)))


def test_on_request_it_is_sent_as_it_is_but_faults_are_still_withheld():
    raw = Settings(range=ActionRange.PEER)
    actions = np.full((1, 7), 1.2)
    checked = free_guard(raw).check(actions, session(), None)
    assert (checked.actions is actions, checked.is_clamped) == (True, False)
    with pytest.raises(UnsafeAnswerError, match="1.2 in dimension 0"):
        guard(range=ActionRange.PEER).check(actions, session(), None)
    with pytest.raises(UnsafeAnswerError, match="NaN"):
        free_guard(raw).check(actions * np.nan, session(), None)


def test_a_policy_that_tells_no_limits_is_checked_for_finiteness_only():
    actions = np.full((1, 7), 1e6)
    checked = plain_guard().check(actions, session(), None)
    assert checked.actions is actions


def test_a_step_beyond_the_robots_limit_is_shortened():
    actions = np.full((2, 7), 0.5)
    checked = guard(step_limits={"arm-*": (0.1,) * 7}).check(actions, session(ZERO[0]), None)
    assert checked.is_clamped
    np.testing.assert_allclose(checked.actions, [[0.1] * 7, [0.2] * 7])


def test_the_first_action_of_a_session_has_nothing_to_be_sudden_against():
    actions = np.full((1, 7), 0.5)
    checked = guard(step_limits={"*": (0.1,) * 7}).check(actions, session(), None)
    assert not checked.is_clamped


def test_limits_apply_to_the_robots_they_name():
    actions = np.full((1, 7), 0.5)
    limited = guard(step_limits={"arm-*": (0.1,) * 7, "lab": (0.3,) * 7})
    assert limited.check(actions, session(ZERO[0], "arm-2"), None).actions[0, 0] == 0.1
    assert limited.check(actions, session(ZERO[0], "leg-2"), None).actions[0, 0] == 0.3
    free = guard(step_limits={"nobody": (0.1,) * 7})
    assert free.check(actions, session(ZERO[0]), None).actions is actions


def test_a_sudden_step_may_be_an_error_instead():
    strict = guard(step_limits={"*": (0.1,) * 7}, on_sudden_step=OnSuddenStep.ERROR)
    with pytest.raises(UnsafeAnswerError, match="step_limits"):
        strict.check(np.full((1, 7), 0.5), session(ZERO[0]), None)


def test_a_dimension_may_be_left_free():
    limit = (0.1,) * 6 + (float("inf"),)
    checked = guard(step_limits={"*": limit}).check(np.full((1, 7), 0.5), session(ZERO[0]), None)
    assert checked.actions[0, 6] == 0.5


def test_limits_of_another_length_are_refused_before_serving():
    with pytest.raises(SettingsError, match="3 numbers"):
        guard(step_limits={"*": (0.1,) * 3})


def test_holding_means_no_motion_and_the_gripper_as_it_was():
    last = np.arange(7) / 10
    held = guard().hold(session(last), None)
    assert held is not None
    np.testing.assert_array_equal(held, [[0, 0, 0, 0, 0, 0, 0.6]])


def test_nobody_can_hold_a_gripper_that_was_never_commanded():
    assert guard().hold(session(), None) is None


def test_nobody_can_hold_a_robot_whose_actions_are_not_known():
    assert plain_guard().hold(session(ZERO[0]), None) is None


def test_no_step_is_ever_larger_than_the_limit():
    rng = np.random.default_rng(0)
    actions, limit = rng.normal(size=(50, 7)), rng.uniform(0.01, 1, 7)
    limited = limit_steps(actions, np.zeros(7), limit)
    steps = np.abs(np.diff(np.vstack([np.zeros(7), limited]), axis=0))
    assert (steps <= limit * (1 + 1e-12)).all()
