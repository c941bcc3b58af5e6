"""Chunks: asked for in time, executed in the periods they were meant for, and nothing else."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deft_client
from deft_client.actions import ActionQueue, ActionRules
from deft_client.control_loop import LoopSettings
from deft_core.types import ActionChunk, ChunkBlending

pytestmark = pytest.mark.promise

MOTION = ActionRules((True,))
JOINT = ActionRules((False,))
ARM = ActionRules((True, False, False), is_switch=(False, False, True))


def chunk(*values: float) -> ActionChunk:
    return ActionChunk(np.array(values, np.float64).reshape(len(values), -1))


def numbered(start: float, count: int = 8) -> ActionChunk:
    """Actions that say which period they are meant for."""
    return chunk(*(start + np.arange(count)))


def refill(queue: ActionQueue, answer: ActionChunk) -> None:
    """Answer a frame of now."""
    queue.ask()
    queue.refill(answer)


def execute(
    queue: ActionQueue, delays: list[int], periods: int, answer=numbered
) -> list[float | None]:
    """Drive a queue as a loop does; the frame of a period gets `answer(period)`, late."""
    executed: list[float | None] = []
    asked: int | None = None
    for period in range(periods):
        if asked is None and queue.is_due:
            asked = period
            queue.ask()
        if asked is not None and period >= asked + delays[0]:
            queue.refill(answer(asked))
            delays, asked = delays[1:] or delays, None
            if queue.is_due:
                asked = period
                queue.ask()
        action = queue.next()
        executed.append(None if action is None else float(action[0]))
    return executed


def test_actions_come_in_the_order_of_the_chunk_and_then_there_is_none():
    queue = ActionQueue(MOTION)
    assert not queue
    assert queue.next() is None
    refill(queue, chunk(1, 2, 3))
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
    for blending in (ChunkBlending.SWITCH, ChunkBlending.ENSEMBLE):
        executed = execute(ActionQueue(JOINT, blending), [delay], 40)
        assert executed[:delay] == [None] * delay
        assert None not in executed[delay:]
    executed = execute(ActionQueue(JOINT, ChunkBlending.SWITCH), [delay], 40)
    # The robot stood still for the first answer, so all of that is late.
    assert executed[delay : delay + 8] == list(range(8))
    assert executed[delay + 8 :] == list(range(delay + 8, 40))


def test_the_slowest_recent_answer_sets_the_lead():
    frames: list[int] = []
    queue = ActionQueue(JOINT, ChunkBlending.SWITCH)
    answer = lambda period: (frames.append(period), numbered(period))[1]  # noqa: E731
    execute(queue, [1, 3, *[1] * 30], 110, answer)
    gaps = [after - before for before, after in pairwise(frames)]
    assert gaps[2:11] == [5] * 9  # eight actions, asked three periods early
    assert set(gaps[14:]) == {7}


def test_execute_asks_early_and_the_rest_of_a_chunk_bridges_late_answers():
    executed = execute(ActionQueue(JOINT, ChunkBlending.SWITCH, execute=4), [0, 0, 3], 10)
    assert executed == list(np.arange(10.0))
    waiting = execute(ActionQueue(JOINT, ChunkBlending.WAIT, execute=4), [0, 0, 3], 12)
    assert waiting[4:11] == [4.0, 5.0, 6.0, 7.0, None, None, None]


def test_without_overlap_the_robot_waits_for_the_chunk():
    executed = execute(ActionQueue(JOINT, ChunkBlending.WAIT), [2], 14)
    assert executed == [None, None, *range(8), None, None, 10, 11]


def test_an_answer_that_comes_when_it_is_over_still_says_where_to_be():
    queue = ActionQueue(JOINT, ChunkBlending.SWITCH)
    refill(queue, numbered(0))
    queue.ask()
    for _ in range(5):
        queue.next()
    queue.refill(chunk(10, 11))
    assert queue.next().tolist() == [11.0]
    assert queue.next() is None


def test_a_hold_does_not_count():
    """The robot stood still, so the whole of the answer is still to be done."""
    queue = ActionQueue(JOINT, ChunkBlending.SWITCH)
    queue.ask()
    for _ in range(2):
        assert queue.next() is None
    queue.refill(numbered(10))
    assert queue.next().tolist() == [10.0]


def test_an_ensemble_is_the_mean_of_all_chunks_that_speak_of_a_period():
    """The slow twin keeps every chunk and looks through them in each period."""
    rng = np.random.default_rng(0)
    answers = {period: ActionChunk(rng.normal(size=(6, 1))) for period in range(40)}
    used: list[int] = []
    executed = execute(
        ActionQueue(JOINT, ChunkBlending.ENSEMBLE),
        [1],
        40,
        lambda period: (used.append(period), answers[period])[1],
    )
    for period in range(12, 40):
        heard = [start for start in used if start + 1 <= period < start + 6 and start > 6]
        values = [answers[start].actions[period - start, 0] for start in heard]
        assert executed[period] == pytest.approx(np.mean(values)), period


def test_a_switch_is_never_between_its_values():
    queue = ActionQueue(ARM, ChunkBlending.ENSEMBLE)
    refill(queue, ActionChunk(np.array([[0.5, 1.0, -1.0]] * 3)))
    queue.ask()
    queue.next()
    queue.refill(ActionChunk(np.array([[-0.5, 2.0, -1.0]] * 2 + [[-0.5, 2.0, 1.0]] * 2)))
    executed = np.array([queue.next() for _ in range(3)])
    assert executed.tolist() == [[0.0, 1.5, -1.0], [0.0, 1.5, 1.0], [-0.5, 2.0, 1.0]]


def test_weights_are_of_the_newest_chunk_and_of_those_before() -> None:
    """VLA-0's evaluation: the newest 1, each older 0.5, eight at most."""
    weights = (1.0, 0.5, 0.5)
    queue = ActionQueue(JOINT, ChunkBlending.ENSEMBLE, weights=weights)
    answers = [np.random.default_rng(seed).normal(size=(4, 1)) for seed in range(9)]
    for period, actions in enumerate(answers):
        refill(queue, ActionChunk(actions))
        known = [
            (weight, answers[period - age][age, 0])
            for age, weight in enumerate(weights)
            if period >= age
        ]
        total = sum(weight for weight, _ in known)
        action = queue.next()
        assert action is not None
        assert action[0] == pytest.approx(sum(weight * one for weight, one in known) / total)
    with pytest.raises(ValueError, match="above 0"):
        ActionQueue(JOINT, ChunkBlending.ENSEMBLE, weights=(1.0, 0.0))


def test_with_weights_a_switch_is_as_most_of_them_say() -> None:
    queue = ActionQueue(ARM, ChunkBlending.ENSEMBLE, weights=(1.0, 0.6, 0.6))
    refill(queue, ActionChunk(np.array([[0.0, 0.0, -1.0]] * 4)))
    refill(queue, ActionChunk(np.array([[0.0, 0.0, -1.0]] * 4)))
    refill(queue, ActionChunk(np.array([[0.0, 0.0, 1.0]] * 4)))
    assert [queue.next()[2] for _ in range(2)] == [-1.0, -1.0]
    refill(queue, ActionChunk(np.array([[0.0, 0.0, 1.0]] * 2)))
    assert queue.next()[2] == 1.0


def test_a_frame_says_how_many_actions_were_executed() -> None:
    queue = ActionQueue(JOINT, ChunkBlending.SWITCH)
    assert queue.ask() is None
    queue.refill(numbered(0))
    for _ in range(3):
        queue.next()
    assert queue.ask() == 3
    queue.next()
    queue.refill(numbered(3))
    queue.next()
    assert queue.ask() == 2
    queue.clear()
    assert queue.ask() is None
    queue.refill(chunk(1))
    assert queue.ask() is None  # of single actions nothing is left


def test_an_older_chunk_counts_where_the_newest_is_over():
    queue = ActionQueue(JOINT, ChunkBlending.ENSEMBLE)
    refill(queue, chunk(1, 1, 1))
    refill(queue, chunk(3))
    assert [queue.next().tolist() for _ in range(3)] == [[2.0], [1.0], [1.0]]


def test_an_episode_starts_with_nothing_left_over():
    queue = ActionQueue(MOTION)
    refill(queue, numbered(0))
    queue.ask()
    queue.clear()
    assert not queue
    assert queue.is_due
    queue.refill(numbered(5))  # of a frame from before
    assert queue.next() is None


def test_executing_less_than_one_action_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ActionQueue(MOTION, execute=0)


chunks_of_three = st.lists(
    st.lists(st.floats(-2, 2), min_size=3, max_size=3), min_size=1, max_size=8
).map(lambda rows: np.array(rows))
limits = st.lists(st.one_of(st.floats(0.01, 2), st.just(np.inf)), min_size=3, max_size=3)


@given(
    blending=st.sampled_from(ChunkBlending),
    answers=st.lists(chunks_of_three, min_size=1, max_size=8),
    delays=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    clears=st.sets(st.integers(0, 39), max_size=3),
    execute=st.one_of(st.none(), st.integers(1, 8)),
    max_step=limits,
    max_change=limits,
)
@settings(max_examples=200, deadline=None)
def test_commands_add_up_to_the_answers_within_the_limits(
    blending, answers, delays, clears, execute, max_step, max_change
):
    """The slow twin keeps every answer with its frame's moment, and looks through them all."""
    rules = ActionRules((True, True, False), max_step=tuple(max_step), max_change=tuple(max_change))
    queue = ActionQueue(rules, blending, execute)
    said: list[tuple[int, np.ndarray]] = []  # how many had been commanded, and what to do then on
    asked: tuple[int, int] | None = None  # period and commands of the frame on its way
    before = np.zeros(3)
    moved, wanted, cut_off = np.zeros(3), np.zeros(3), np.zeros(3)
    num_commanded = num_answers = 0
    for period in range(40):
        if period in clears:
            queue.clear()
            said = []
        if asked is not None and period >= asked[0] + delays[num_answers % len(delays)]:
            actions = answers[num_answers % len(answers)]
            is_void = bool(clears & set(range(asked[0] + 1, period + 1)))
            queue.refill(ActionChunk(actions))
            if not is_void:
                used = actions[: execute if blending is ChunkBlending.WAIT else None]
                # An answer that is over says what to do now.
                start = max(asked[1], num_commanded - len(actions) + 1)
                said = [*(said if blending is ChunkBlending.ENSEMBLE else []), (start, used)]
            num_answers, asked = num_answers + 1, None
        if asked is None and queue.is_due:
            asked = period, num_commanded
            queue.ask()
        told = [
            actions[num_commanded - start]
            for start, actions in said
            if num_commanded - start < len(actions)
        ]
        action = queue.next()
        assert (action is None) == (not told)
        own = rules.hold(before) if action is None else np.mean(told, axis=0)
        command = rules.limited(own if action is None else action, before)
        assert (np.abs(command - before) <= np.array(max_change) + 1e-9).all()
        origin = np.where(rules.motions, 0.0, before)
        assert (np.abs(command - origin) <= np.array(max_step) + 1e-9).all()
        moved, wanted = moved + command, wanted + own
        cut_off = cut_off + np.abs(own - rules.limited(own, before))
        num_commanded += action is not None
        before = command
    assert (np.abs(moved - wanted) <= cut_off + 1e-9).all()


@pytest.mark.parametrize(
    ("count", "blending"),
    [(1, ChunkBlending.SWITCH), (2, ChunkBlending.WAIT), (8, ChunkBlending.WAIT)],
)
def test_without_a_blending_it_goes_by_the_length_of_the_chunk(count, blending):
    queue = ActionQueue(MOTION, blending=None)
    assert queue.is_due
    refill(queue, numbered(0, count))
    assert queue.blending is blending
    assert len(queue) == count


def test_the_earlier_name_of_the_blending_is_understood():
    """`Seam` and `seam=` were public: they work for one version, with a warning."""
    with pytest.warns(DeprecationWarning, match=r"deft_client.Seam is now ChunkBlending"):
        assert deft_client.Seam is ChunkBlending
    with pytest.warns(DeprecationWarning, match=r"ActionQueue\(seam=...\) is now blending"):
        assert ActionQueue(JOINT, seam=ChunkBlending.SWITCH).blending is ChunkBlending.SWITCH
    with pytest.warns(DeprecationWarning, match=r"LoopSettings\(seam=...\) is now blending"):
        settings = LoopSettings(seam=ChunkBlending.ENSEMBLE)
    assert settings == LoopSettings(blending=ChunkBlending.ENSEMBLE)
