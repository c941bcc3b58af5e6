"""A loop acts as often as its answers allow, beside a program that just asks and moves."""

import random

import numpy as np
import pytest

from deft_client.actions import ActionRules
from deft_client.control_loop import ControlLoop, LoopSettings, shortest_period_s
from deft_core.types import ActionChunk, ChunkBlending
from tests.client.loop_parts import RecordingArm, run
from tests.standins.virtual_clock import VirtualClock

SECONDS = 120
MOVE_S = 0.002
LABELLED = ActionRules((True,))  # an action is the number of its frame


def drawn_answers(seed):
    """Seconds of answers: 95 of 100 within 55 ms, the others up to 90 ms."""
    draw = random.Random(seed)
    while True:
        is_late = draw.random() >= 0.95
        yield draw.uniform(0.055, 0.09) if is_late else draw.uniform(0.035, 0.055)


class NumberingPolicy:
    """Answers with the number of the frame, and with as many actions as it is to."""

    session_id = "arm"

    def __init__(self, clock, seconds, num_actions=1):
        self.clock, self.seconds, self.num_actions = clock, seconds, num_actions
        self.asked_at: dict[int, float] = {}

    def reset(self, session_id=None):
        """Nothing to do."""

    def act(self, observation, options=None):
        number = int(observation.instruction.removeprefix("frame "))
        self.asked_at[number] = self.clock.now
        self.clock.sleep(next(self.seconds))
        return ActionChunk(np.full((self.num_actions, 1), float(number)))


class QuickArm(RecordingArm):
    """Takes a moment for a command."""

    def move(self, action):
        super().move(action)
        self.clock.sleep(MOVE_S)


def blocking_rate(clock, seed):
    """Actions a second of the naive loop: ask, move, ask, move."""
    arm = QuickArm(clock)
    policy = NumberingPolicy(clock, drawn_answers(seed))
    ends_at = clock.now + SECONDS

    def ask_and_move():
        while clock.now < ends_at:
            arm.move(policy.act(arm.observe()).actions[0])

    clock.run(ask_and_move)
    return len(arm.commands) / SECONDS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rate_hz", "least_hz"), [(12.5, 12.0), (15.0, 14.0)])
def test_answers_of_55_ms_at_p95_are_executed_in_every_period(rate_hz, least_hz, seed):
    clock, period_s = VirtualClock(), 1 / rate_hz
    policy = NumberingPolicy(clock, drawn_answers(seed))
    arm = QuickArm(clock)
    num_periods = round(SECONDS * rate_hz)
    begins_s = clock.now
    settings = LoopSettings(period_s=period_s, watchdog_s=0.25)
    status = run(policy, arm, num_periods, LABELLED, settings)

    assert blocking_rate(VirtualClock(), seed) > rate_hz
    assert status.moves / SECONDS >= least_hz
    assert status.stalls == 0
    # One command in each period, none of them close behind another one.
    at_s = np.array(arm.at_s[:-1]) - begins_s
    assert np.floor(at_s / period_s + 1e-6).tolist() == list(range(num_periods))
    assert np.diff(at_s).min() >= period_s / 2 - 1e-9
    # Each answer is executed once, in its order, in the period of its frame or the next one.
    labels = [one[0] for one in arm.commands[:-1]]
    executed = [label for label in labels if label]
    assert executed == sorted(set(executed))
    moved_at = at_s[np.array(labels) > 0]
    asked_at = np.array([policy.asked_at[label] for label in executed]) - begins_s
    assert (moved_at - asked_at).max() < 0.09 + period_s / 2
    # None from a frame that was taken before the last action was commanded.
    assert (asked_at[1:] >= moved_at[:-1]).all()


@pytest.mark.parametrize("answer_s", [0.1, 0.13, 0.31])
def test_answers_slower_than_a_period_are_executed_as_soon_as_by_a_program_that_waits(answer_s):
    clock = VirtualClock()

    def same():
        while True:
            yield answer_s

    arm = QuickArm(clock)
    settings = LoopSettings(period_s=0.08, watchdog_s=0.25)
    status = run(NumberingPolicy(clock, same()), arm, 1000, LABELLED, settings)
    rate_hz = status.moves / (arm.at_s[-1] - arm.at_s[0])
    assert rate_hz > 0.92 / (answer_s + MOVE_S)


def test_one_slow_answer_does_not_make_the_frames_of_the_next_ones_older():
    clock = VirtualClock()

    def once_slow():
        yield 0.2
        while True:
            yield 0.05

    policy, arm = NumberingPolicy(clock, once_slow()), QuickArm(clock)
    run(policy, arm, 50, LABELLED, LoopSettings(period_s=0.08, watchdog_s=0.25))
    ages = [
        at - policy.asked_at[one[0]]
        for at, one in zip(arm.at_s, arm.commands, strict=True)
        if one != "stop" and one[0]
    ]
    assert ages[3:] == pytest.approx([0.05] * len(ages[3:]))


@pytest.mark.parametrize("answer_s", [0.03, 0.05, 0.07])
def test_the_actions_of_a_chunk_are_a_period_apart(answer_s):
    """The first one is waited for, and must not be cut short by the second one."""
    clock, period_s = VirtualClock(), 0.08

    def same():
        while True:
            yield answer_s

    arm = RecordingArm(clock)
    policy = NumberingPolicy(clock, same(), num_actions=4)
    status = run(policy, arm, 40, LABELLED, LoopSettings(period_s=period_s, watchdog_s=0.25))
    assert status.holds == 0
    apart = np.diff(arm.at_s[:-1])
    assert apart.min() >= period_s - 1e-9
    assert np.sort(apart)[-9:] == pytest.approx([period_s + answer_s] * 9)


def test_a_move_that_takes_long_is_sent_earlier():
    """The command that holds the arm is over when its period is."""
    clock = VirtualClock()

    class SlowArm(RecordingArm):
        def move(self, action):
            super().move(action)
            clock.sleep(0.03)

    def late():
        yield 0.01
        while True:
            yield 9.0

    arm = SlowArm(clock)
    run(NumberingPolicy(clock, late()), arm, 6, LABELLED, LoopSettings(0.1, watchdog_s=0.3))
    begins_s = arm.at_s[0] - 0.01
    assert [at - begins_s for at in arm.at_s[2:6]] == pytest.approx([0.27, 0.37, 0.47, 0.57])


@pytest.mark.parametrize("blending", [None, *ChunkBlending])
@pytest.mark.parametrize("num_actions", [1, 8])
def test_the_wait_for_an_answer_ends_before_the_watchdog(blending, num_actions):
    clock = VirtualClock()
    draw = random.Random(7)

    def any_time():
        while True:
            yield draw.choice([0.02, 0.09, 0.14, 0.19, 0.24, 0.4])

    policy = NumberingPolicy(clock, any_time(), num_actions)
    arm = QuickArm(clock)
    status = run(policy, arm, 500, LABELLED, LoopSettings(0.1, watchdog_s=0.2, blending=blending))
    assert status.stalls == 0
    apart = np.diff(arm.at_s[:-1])
    assert apart.max() <= 0.15 + MOVE_S + 1e-9
    assert apart.min() >= 0.05 - 1e-9


@pytest.mark.parametrize(("answer_s", "period_s"), [(0.055, 0.06), (0.076, 0.08), (0.095, 0.1)])
def test_the_shortest_period_holds_an_answer(answer_s, period_s):
    assert shortest_period_s(answer_s) == pytest.approx(period_s)


def test_a_loop_of_the_shortest_period_holds_no_period():
    for answer_s in (0.0123, 0.055, 0.0764, 0.11, 0.3):
        period_s = shortest_period_s(answer_s)
        clock = VirtualClock()

        def same(answer_s=answer_s):
            while True:
                yield answer_s

        arm = RecordingArm(clock)
        settings = LoopSettings(period_s, watchdog_s=2.5 * period_s)
        loop = ControlLoop(NumberingPolicy(clock, same()), arm, LABELLED, settings, clock)
        clock.run(lambda loop=loop: loop.run(100))
        assert loop.status.holds == 0
