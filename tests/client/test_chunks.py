"""Overlapping chunks: asked for in time, and handed over without a jump."""

from itertools import pairwise

import numpy as np
import pytest

from deft_client.actions import ActionRules
from deft_client.chunks import ActionQueue, Moment, Seam
from deft_client.types import ActionChunk

MOTION = ActionRules((True,))
JOINT = ActionRules((False,))
ARM = ActionRules((True, False, False), is_switch=(False, False, True))


def chunk(*values: float) -> ActionChunk:
    return ActionChunk(np.array(values, np.float64).reshape(len(values), -1))


def numbered(start: float, count: int = 8) -> ActionChunk:
    """Actions that say which period they are meant for."""
    return chunk(*(start + np.arange(count)))


def execute(
    queue: ActionQueue, delays: list[int], periods: int, answer=numbered
) -> list[float | None]:
    """Drive a queue as a loop does; the frame of a period gets `answer(period)`, late."""
    executed: list[float | None] = []
    asked: Moment | None = None
    for period in range(periods):
        if asked is not None and period >= asked.periods + delays[0]:
            queue.refill(answer(asked.periods), asked)
            delays, asked = delays[1:] or delays, None
        if asked is None and queue.is_due:
            asked = queue.now
            if delays[0] == 0:
                queue.refill(answer(period), asked)
                delays, asked = delays[1:] or delays, None
        action = queue.next()
        executed.append(None if action is None else float(action[0]))
    return executed


def test_actions_come_in_the_order_of_the_chunk_and_then_there_is_none():
    queue = ActionQueue(MOTION)
    assert queue.is_empty
    assert queue.next() is None
    queue.refill(chunk(1, 2, 3))
    assert len(queue) == 3
    assert [queue.next().tolist() for _ in range(3)] == [[1.0], [2.0], [3.0]]
    assert queue.next() is None


def test_a_policy_that_answers_at_once_is_asked_when_nothing_is_left():
    """A frame is never older than it must be."""
    frames: list[int] = []
    queue = ActionQueue(MOTION)
    execute(queue, [0], 17, lambda period: (frames.append(period), numbered(period))[1])
    assert frames == [0, 8, 16]


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_the_next_answer_is_there_when_the_last_one_is_used_up(delay):
    """And each action is executed in the period it was meant for."""
    for seam in (Seam.SWITCH, Seam.ENSEMBLE, Seam.FREEZE):
        executed = execute(ActionQueue(JOINT, seam), [delay], 40)
        assert executed[:delay] == [None] * delay
        assert None not in executed[delay:]
    executed = execute(ActionQueue(JOINT, Seam.SWITCH), [delay], 40)
    # The robot stood still for the first answer, so all of that is late.
    assert executed[delay : delay + 8] == list(range(8))
    assert executed[delay + 8 :] == list(range(delay + 8, 40))


def test_the_slowest_of_the_latest_answers_is_allowed_for_and_forgotten_in_time():
    frames: list[int] = []
    queue = ActionQueue(JOINT, Seam.SWITCH)
    answer = lambda period: (frames.append(period), numbered(period))[1]  # noqa: E731
    execute(queue, [1, 3, *[1] * 30], 110, answer)
    gaps = [after - before for before, after in pairwise(frames)]
    assert gaps[2:11] == [5] * 9  # eight actions, asked three periods early
    assert set(gaps[14:]) == {7}


def test_with_execute_the_frame_is_fresher_and_what_is_left_serves_while_an_answer_is_late():
    executed = execute(ActionQueue(JOINT, Seam.SWITCH, execute=4), [0, 0, 3], 10)
    assert executed == list(np.arange(10.0))
    waiting = execute(ActionQueue(JOINT, Seam.WAIT, execute=4), [0, 0, 3], 12)
    assert waiting[4:11] == [4.0, 5.0, 6.0, 7.0, None, None, None]


def test_without_overlap_the_robot_waits_and_then_starts_where_the_chunk_does():
    executed = execute(ActionQueue(JOINT, Seam.WAIT), [2], 14)
    assert executed == [None, None, *range(8), None, None, 10, 11]


def test_an_answer_that_comes_when_it_is_over_still_says_where_to_be():
    queue = ActionQueue(JOINT, Seam.SWITCH)
    queue.refill(numbered(0))
    asked = queue.now
    for _ in range(5):
        queue.next()
    queue.refill(chunk(10, 11), asked)
    assert queue.next().tolist() == [11.0]
    assert queue.next() is None


def test_such_an_answer_is_not_led_up_to():
    """How the robot was to get there is over too, and what it did since is no error."""
    queue = ActionQueue(MOTION)
    queue.refill(numbered(1))
    asked = queue.now
    for _ in range(5):
        queue.next()
    queue.refill(chunk(0.5, 0.25), asked)
    assert queue.next().tolist() == [0.25]


def test_a_robot_that_waits_executes_something_of_every_answer():
    """It was moved on for longer than it was to execute of a chunk."""
    queue = ActionQueue(JOINT, Seam.WAIT, execute=2)
    asked = queue.now
    for _ in range(3):
        queue.next()
        queue.note(np.zeros(1))
    queue.refill(numbered(0), asked)
    assert [one and one.tolist() for one in (queue.next(), queue.next())] == [[3.0], None]


def test_a_hold_does_not_count_unless_the_robot_was_moved_on():
    for is_moved, expected in ((False, 10.0), (True, 12.0)):
        queue = ActionQueue(JOINT, Seam.SWITCH)
        asked = queue.now
        for _ in range(2):
            assert queue.next() is None
            if is_moved:
                queue.note(np.zeros(1))
        queue.refill(numbered(10), asked)
        assert queue.next().tolist() == [expected]


def test_an_ensemble_is_the_mean_of_all_chunks_that_speak_of_a_period():
    """The slow twin keeps every chunk and looks through them in each period."""
    rng = np.random.default_rng(0)
    answers = {period: ActionChunk(rng.normal(size=(6, 1))) for period in range(40)}
    used: list[int] = []
    executed = execute(
        ActionQueue(JOINT, Seam.ENSEMBLE),
        [1],
        40,
        lambda period: (used.append(period), answers[period])[1],
    )
    for period in range(12, 40):
        heard = [start for start in used if start + 1 <= period < start + 6 and start > 6]
        values = [answers[start].actions[period - start, 0] for start in heard]
        assert executed[period] == pytest.approx(np.mean(values)), period


def hand_over(rules: ActionRules, old: ActionChunk, new: ActionChunk, delay: int) -> np.ndarray:
    """Execute `delay` actions of one chunk, then the other, whose frame was taken before them."""
    queue = ActionQueue(rules)
    queue.refill(old)
    asked = queue.now
    taken = [queue.next() for _ in range(delay)]
    queue.refill(new, asked)
    return np.array([*taken, *(queue.next() for _ in range(len(new.actions) - delay))])


def test_chunks_that_agree_are_executed_as_they_are():
    same = numbered(3)
    np.testing.assert_array_equal(hand_over(MOTION, same, same, 4), same.actions)


def test_a_motion_is_led_back_to_the_way_of_the_chunk_without_a_jump():
    """It went right while the chunk wanted it left: both its speed and its place are made up."""
    old, new = chunk(*[1.0] * 40), chunk(*[-1.0] * 40)
    executed = hand_over(MOTION, old, new, 4)[:, 0]
    assert np.abs(np.diff(executed[3:5])) < 2.0  # the hard switch
    place, wanted = np.cumsum(executed), np.cumsum(new.actions[:, 0])
    assert place[3] - wanted[3] == 8.0
    assert abs(place[-1] - wanted[-1]) < 0.01
    assert executed[-1] == pytest.approx(-1.0, abs=0.01)


def test_a_position_is_led_to_where_the_chunk_has_it():
    old, new = chunk(*[1.0] * 30), chunk(*[3.0] * 30)
    executed = hand_over(JOINT, old, new, 4)[:, 0]
    assert np.diff(executed).max() < 0.5
    assert (np.diff(executed[3:]) > 0).all()
    assert executed[-1] == pytest.approx(3.0, abs=0.01)


def test_a_switch_is_never_between_its_values():
    old = ActionChunk(np.array([[0.5, 1.0, -1.0]] * 8))
    new = ActionChunk(np.array([[-0.5, 2.0, -1.0]] * 5 + [[-0.5, 2.0, 1.0]] * 3))
    executed = hand_over(ARM, old, new, 3)
    assert executed[:, 2].tolist() == [-1.0] * 5 + [1.0] * 3
    assert (executed[3, :2] != new.actions[3, :2]).all()


def test_the_largest_steps_are_told_apart_by_where_they_are():
    queue = ActionQueue(ARM, Seam.SWITCH)
    queue.refill(ActionChunk(np.array([[0.0, 0.0, 0.0], [0.25, 0.0, 1.0]])))
    for _ in range(2):
        queue.next()
    assert (queue.seams.commanded, queue.seams.inside) == (0.25, 0.25)
    queue.refill(ActionChunk(np.array([[1.0, 0.5, 0.0]])))
    queue.next()
    assert (queue.seams.commanded, queue.seams.inside) == (0.75, 0.25)
    queue.next()
    queue.refill(ActionChunk(np.array([[9.0, 9.0, 0.0]])))
    queue.next()
    assert queue.seams.commanded == 0.75  # a start is no seam


def test_an_episode_starts_with_nothing_left_over():
    queue = ActionQueue(MOTION)
    queue.refill(numbered(0))
    queue.clear()
    assert queue.is_empty
    assert queue.is_due


def test_executing_less_than_one_action_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ActionQueue(MOTION, execute=0)
