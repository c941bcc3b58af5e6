"""The arm gets a command in every period, whatever the policy does. Time is virtual."""

import logging
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from deft_client import control_loop
from deft_client.actions import ActionRules
from deft_client.client import PolicyClient
from deft_client.control_loop import ControlLoop, LoopSettings, settings_for
from deft_client.errors import (
    AccessDeniedError,
    AnswerTimeoutError,
    ServerFaultError,
    ServerUnreachableError,
    UnknownEndpointError,
    WrongServerError,
)
from deft_core.errors import Problem
from deft_core.types import ActionChunk, ActOptions, ChunkBlending, Observation
from tests.client.hostile_servers import frozen, holding_up
from tests.client.loop_parts import PICTURE, QUICK, RULES, RecordingArm, ScriptedPolicy, run
from tests.standins.policy_server import INFO
from tests.standins.virtual_clock import VirtualClock

pytestmark = pytest.mark.promise

LET_GO_S = 20.0


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def arm(clock):
    return RecordingArm(clock)


def test_a_chunk_is_executed_before_the_next_frame_is_asked(clock, arm):
    policy = ScriptedPolicy(clock, [[0.1, 0.2, 1.0], [0.3, 0.4, 1.0]], [[0.5, 0.6, 0.0]])
    status = run(policy, arm, 3)
    assert arm.commands == [[0.1, 0.2, 1.0], [0.3, 0.4, 1.0], [0.5, 0.6, 0.0], "stop"]
    assert policy.seen == ["frame 1", "frame 2"]
    assert policy.resets == 1
    assert (status.moves, status.holds, status.problem) == (3, 0, None)


def test_a_slow_policy_is_asked_early_enough(clock, arm):
    """Every answer takes three periods; chunks have enough to spare."""
    answers = [np.tile([0.25, 0.5, 1.0], (60, 1))] * 20
    policy = ScriptedPolicy(clock, *answers, answer_s=0.03)
    settings = LoopSettings(
        period_s=0.01, watchdog_s=10.0, execute=10, blending=ChunkBlending.SWITCH
    )
    run(policy, arm, 60, settings=settings)
    first = next(index for index, one in enumerate(arm.commands) if one != "stop")
    assert first == 3
    assert arm.commands[first:60] == [[0.25, 0.5, 1.0]] * (60 - first)
    assert arm.frames > 3


def test_a_policy_that_falls_silent_leaves_the_arm_holding_every_period(clock, arm):
    """Motions are zero then, and the gripper stays as it was: a cup is not dropped."""
    status = run(ScriptedPolicy(clock, [[0.1, 0.2, 1.0]]), arm, 20)
    assert arm.commands == [[0.1, 0.2, 1.0], *[[0.0, 0.0, 1.0]] * 19, "stop"]
    assert (status.moves, status.holds) == (1, 19)


@pytest.mark.parametrize(
    "trouble",
    [
        ServerFaultError(Problem(500, "Unsafe", "the answer was withheld")),
        AnswerTimeoutError("the network is gone"),
        RuntimeError("a mistake"),
        [[np.nan, 0.0, 0.0]],
        [[0.0, 0.0, 0.0, 0.0]],
        np.zeros((0, 3)),
    ],
    ids=str,
)
def test_bad_answers_make_the_arm_hold_and_ask_again(trouble, clock, arm):
    policy = ScriptedPolicy(clock, [[0.1, 0.2, 1.0]], trouble)
    status = run(policy, arm, 10)
    assert arm.commands == [[0.1, 0.2, 1.0], *[[0.0, 0.0, 1.0]] * 9, "stop"]
    assert (status.moves, status.holds) == (1, 9)
    assert len(policy.seen) == 3


def test_the_server_may_be_away_when_the_episode_starts(clock):
    """The reset is repeated until it is heard; until then nothing is asked, and the arm holds."""

    class Late(ScriptedPolicy):
        def reset(self, session_id=None):
            self.resets += 1
            if self.resets < 3:
                raise AnswerTimeoutError("not there yet")

    policy = Late(clock, [[0.1, 0.2, 1.0]])
    arm = RecordingArm(clock, position=np.array([0.0, 0.0, 0.5]))
    status = run(policy, arm, 5)
    assert policy.resets == 3
    assert arm.commands[:3] == [[0.0, 0.0, 0.5], [0.0, 0.0, 0.5], [0.1, 0.2, 1.0]]
    assert status.stops == 0


def test_where_nobody_knows_a_position_to_stay_at_the_arm_is_stopped():
    for measured in (None, np.full(3, np.nan)):
        arm = RecordingArm(VirtualClock(), measured)
        status = run(ScriptedPolicy(arm.clock), arm, 3)
        assert arm.commands == ["stop"] * 4  # one of them at the end of the loop
        assert status.stops == 3


def test_absolute_joints_hold_the_measured_pose_until_one_was_commanded():
    rules = ActionRules((False, False), max_step=(0.5, 0.5))
    arm = RecordingArm(VirtualClock(), position=np.array([1.0, -1.0]))
    run(ScriptedPolicy(arm.clock), arm, 2, rules)
    assert arm.commands[:2] == [[1.0, -1.0]] * 2
    arm = RecordingArm(VirtualClock(), position=np.array([1.0, -1.0]))
    status = run(ScriptedPolicy(arm.clock, [[9.0, -1.25]]), arm, 5, rules)
    assert arm.commands == [[1.5, -1.25]] * 5 + ["stop"]
    assert status.limited == 1


def test_a_position_may_be_a_list(clock):
    arm = RecordingArm(clock, position=[0.0, 0.0, 0.5])
    run(ScriptedPolicy(clock), arm, 1)
    assert arm.commands[0] == [0.0, 0.0, 0.5]


def test_a_camera_that_hangs_leaves_the_arm_holding(clock):
    class Blind(RecordingArm):
        def observe(self):
            clock.sleep(LET_GO_S)
            return super().observe()

    arm = Blind(clock, position=np.array([0.0, 0.0, 1.0]))
    status = run(ScriptedPolicy(clock), arm, 10)
    assert status.holds == 10
    assert arm.commands[:-1] == [[0.0, 0.0, 1.0]] * 10


def test_an_arm_that_cannot_be_commanded_ends_the_loop(clock):
    class Broken(RecordingArm):
        def move(self, action):
            raise OSError("the bus is gone")

    arm = Broken(clock)
    with pytest.raises(OSError, match="the bus is gone"):
        run(ScriptedPolicy(clock, [[0.1, 0.2, 1.0]]), arm, 9)
    assert arm.commands == ["stop"]


@pytest.mark.parametrize(
    "values", [{"period_s": 0.0}, {"period_s": -1.0}, {"period_s": 0.1, "watchdog_s": 0.15}]
)
def test_settings_without_time_for_a_command_are_refused(values):
    with pytest.raises(ValueError, match="period_s"):
        LoopSettings(**values)


def test_refused_settings_are_named_and_no_others():
    """The sentence once ended with every option of the loop."""
    with pytest.raises(ValueError, match="2.5 periods are advised") as refused:
        LoopSettings(period_s=0.575, watchdog_s=0.2)
    assert str(refused.value).endswith("; got period_s=0.575 and watchdog_s=0.2")


@pytest.mark.parametrize("answer_s", [0.001, 0.05, 0.237, 0.5481, 3.0])
def test_settings_for_an_answer_have_time_for_it(answer_s, clock, arm):
    """Ping printed a period that the watchdog's default refused and the deadline cut off."""
    settings = replace(settings_for(answer_s), blending=ChunkBlending.WAIT)
    policy = ScriptedPolicy(clock, *[[[0.1, 0.2, 1.0]]] * 99, answer_s=answer_s)
    assert run(policy, arm, 20, settings=settings).moves == 20
    assert settings.watchdog_s >= 2.5 * settings.period_s - 1e-9
    assert settings.options.deadline_ms >= 1000 * answer_s


def test_chunks_follow_each_other_by_waiting_unless_told_otherwise(clock, arm):
    """The arm executes an answer to its end, then asks: what the policies were trained for."""

    class Numbered(ScriptedPolicy):
        def act(self, observation, options=None):
            self.seen.append(len(arm.commands))
            return ActionChunk(np.array([[self.seen[-1] + one, 0, 1.0] for one in range(1, 5)]))

    policy = Numbered(clock)
    run(policy, arm, 12)
    assert [one[0] for one in arm.commands[:12]] == list(range(1, 13))
    assert policy.seen == [0, 4, 8]


MOTION = ActionRules((True,), max_step=(1.0,))
BLENDINGS = pytest.mark.parametrize(
    "blending", [None, *ChunkBlending]
)  # None: as the chunks have it


class AnsweringPolicy(ScriptedPolicy):
    """Has an answer for its first, second, third ... frame, two periods after it."""

    def __init__(self, clock, answer, period_s):
        super().__init__(clock)
        self.answer, self.answer_s = answer, 2 * period_s

    def act(self, observation, options=None):
        self.clock.sleep(self.answer_s)
        self.seen.append(observation.instruction)
        return ActionChunk(np.array(self.answer(len(self.seen)), np.float64))


@BLENDINGS
@pytest.mark.parametrize("rules", [MOTION, ActionRules((True,)), ActionRules((False,))])
def test_every_command_is_finite_and_within_the_rules(blending, rules, clock):
    arm = RecordingArm(clock, position=np.zeros(1))
    policy = AnsweringPolicy(clock, lambda count: [[(-1) ** count * 1e308]] * 8, 0.005)
    settings = LoopSettings(period_s=0.005, watchdog_s=10.0, execute=4, blending=blending)
    status = run(policy, arm, 60, rules, settings)
    commands = np.array(arm.commands[:60])
    assert np.isfinite(commands).all()
    assert rules is not MOTION or (np.abs(commands) <= 1.0).all()
    assert "finite" in str(status.problem)


@BLENDINGS
def test_an_arm_that_was_limited_is_not_driven_back(blending, clock, arm):
    """What limits kept from being done was not done: nothing needs to be undone."""
    policy = AnsweringPolicy(clock, lambda count: [[10.0 if count == 1 else 0.0]] * 20, 0.01)
    settings = LoopSettings(period_s=0.01, watchdog_s=10.0, execute=8, blending=blending)
    run(policy, arm, 80, MOTION, settings)
    moved = [one[0] for one in arm.commands[:80]]
    assert 1.0 in moved
    assert min(moved) == 0.0
    assert sum(moved) <= 20.0


@BLENDINGS
def test_one_answer_out_of_all_bounds_leaves_the_next_answers_as_they_are(blending, clock, arm):
    policy = AnsweringPolicy(clock, lambda count: [[1e17 if count == 2 else 0.01]] * 8, 0.005)
    run(policy, arm, 80, MOTION, LoopSettings(period_s=0.005, watchdog_s=10.0, blending=blending))
    assert {one[0] for one in arm.commands[:80]} == {0.0, 0.01}


def test_a_hold_slows_down_as_the_rules_ask(clock):
    rules = ActionRules((True, False), max_change=(0.25, np.inf), high=(1.0, 1.0))
    arm = RecordingArm(clock, position=np.array([9.0, 1.5]))
    run(ScriptedPolicy(clock, [[0.25, 1.0], [0.5, 1.0]]), arm, 5, rules)
    expected = [[0.25, 1.0], [0.5, 1.0], [0.25, 1.0], [0.0, 1.0], [0.0, 1.0]]
    assert arm.commands[:5] == expected


class StallingArm(RecordingArm):
    """Its n-th motion by 7 takes long."""

    def __init__(self, clock, count, stall_s):
        super().__init__(clock)
        self.count, self.stall_s = count, stall_s

    def move(self, action):
        super().move(action)
        if action == [7.0] and self.commands.count([7.0]) == self.count:
            self.clock.sleep(self.stall_s)


@BLENDINGS
def test_nothing_older_than_the_watchdogs_stop_is_executed(blending, clock):
    arm = StallingArm(clock, 2, 1.0)
    policy = ScriptedPolicy(clock, [[7.0]] * 8)
    settings = LoopSettings(period_s=0.05, watchdog_s=0.5, blending=blending)
    status = run(policy, arm, 20, ActionRules((True,)), settings)
    assert status.stalls == 1
    assert arm.commands[:5] == [[7.0], [7.0], "stop", [0.0], [0.0]]
    assert arm.commands.count([7.0]) == 2
    assert len(policy.seen) >= 2


def test_the_watchdog_stops_an_arm_whose_command_does_not_return(clock):
    arm = StallingArm(clock, 1, 5.0)
    settings = LoopSettings(period_s=0.01, watchdog_s=0.02)
    status = run(ScriptedPolicy(clock, [[7.0]]), arm, 3, ActionRules((True,)), settings)
    assert arm.commands[:2] == [[7.0], "stop"]
    assert arm.at_s[1] - arm.at_s[0] < 0.03
    assert status.stalls == 1


def test_an_answer_to_a_frame_from_before_a_stall_is_not_executed(clock):
    """It comes in within its deadline, while the arm is stopped."""
    arm = RecordingArm(clock)
    policy = ScriptedPolicy(clock, [[7.0]] * 8, answer_s=0.45)
    move = arm.move

    def stalling(action):
        move(action)
        if len(arm.commands) == 3:
            clock.sleep(0.6)

    arm.move = stalling
    settings = LoopSettings(period_s=0.05, watchdog_s=0.3)
    run(policy, arm, 20, ActionRules((True,)), settings)
    assert "stop" in arm.commands[:5]
    assert [7.0] not in arm.commands


@BLENDINGS
def test_a_pause_longer_than_what_is_left_empties_the_queue(blending, clock):
    arm = StallingArm(clock, 2, 0.6)
    settings = LoopSettings(period_s=0.05, watchdog_s=10.0, blending=blending)
    run(ScriptedPolicy(clock, [[7.0]] * 8), arm, 10, ActionRules((True,)), settings)
    assert arm.commands.count([7.0]) == 2


def test_an_answer_that_the_loop_waited_for_is_executed(clock, arm):
    """It came a little before the period's end, which is almost two periods after the last one."""
    policy = ScriptedPolicy(clock, [[7.0]] * 3, [[8.0]], answer_s=0.094)
    settings = LoopSettings(period_s=0.1, watchdog_s=9.0)
    run(policy, arm, 5, ActionRules((True,)), settings)
    assert arm.commands == [[7.0]] * 3 + [[8.0], [0.0], "stop"]


def test_an_answer_after_its_deadline_is_not_executed(clock, arm):
    """As where this process was stopped while the answer waited for it."""
    policy = ScriptedPolicy(clock, [[7.0]] * 3, answer_s=0.7)
    settings = LoopSettings(period_s=0.1, watchdog_s=9.0, options=ActOptions(deadline_ms=500))
    status = run(policy, arm, 9, ActionRules((True,)), settings)
    assert [7.0] not in arm.commands
    assert status.causes["AnswerTimeoutError"]


def test_an_arm_whose_stop_raises_is_stopped_again(clock):
    class Stubborn(RecordingArm):
        tries = 0

        def move(self, action):
            super().move(action)
            clock.sleep(0.1)

        def stop(self):
            self.tries += 1
            if self.tries < 3:
                raise [OSError("busy"), SystemExit(1)][self.tries - 1]
            super().stop()

    arm = Stubborn(clock, position=np.zeros(3))
    settings = LoopSettings(period_s=0.01, watchdog_s=0.02)
    status = run(ScriptedPolicy(clock, [[0.1, 0.2, 1.0]] * 2), arm, 3, settings=settings)
    assert arm.tries >= 3
    assert status.stalls >= 2


def test_a_frame_counts_from_its_arrival(clock):
    """Every frame takes five periods to come; its answer says which period each action is for."""

    class Waiting(RecordingArm):
        def observe(self):
            clock.sleep(0.1)
            return super().observe()

    class Numbered(ScriptedPolicy):
        def act(self, observation, options=None):
            return ActionChunk(len(arm.commands) + np.arange(40.0).reshape(40, 1))

    arm = Waiting(clock)
    settings = LoopSettings(
        period_s=0.02, watchdog_s=10.0, execute=20, blending=ChunkBlending.SWITCH
    )
    run(Numbered(clock), arm, 120, ActionRules((False,)), settings)
    commands = [one if one == "stop" else one[0] for one in arm.commands[:120]]
    first = next(index for index, one in enumerate(commands) if one != "stop")
    assert first == 5
    assert commands[first:] == list(range(first, 120))


def test_frames_that_are_too_old_are_not_asked_about(clock):
    class Aging(RecordingArm):
        def observe(self):
            taken_s = clock.now - (9.0 if self.frames else 0.0)
            self.frames += 1
            return Observation(PICTURE, f"frame {self.frames}", taken_s=taken_s)

    policy = ScriptedPolicy(clock, [[0.1, 0.2, 1.0]], [[0.3, 0.2, 1.0]])
    settings = LoopSettings(period_s=0.05, watchdog_s=10.0, max_frame_age_s=5.0)
    status = run(policy, Aging(clock), 10, settings=settings)
    assert policy.seen == ["frame 1"]
    assert status.moves == 1
    assert "9.00 s old, the limit is 5 s" in str(status.problem)


def test_frames_without_an_age_are_not_used_where_age_counts(clock, arm):
    policy = ScriptedPolicy(clock, [[0.1, 0.2, 1.0]])
    settings = LoopSettings(period_s=0.05, watchdog_s=10.0, max_frame_age_s=5.0)
    status = run(policy, arm, 3, settings=settings)
    assert not policy.seen
    assert "taken_s: missing" in str(status.problem)


@pytest.mark.parametrize("ahead_s", [1e9, 60.0, math.nan])
def test_frames_of_another_clock_hold_the_arm_and_say_so(ahead_s, clock):
    """A frozen camera must not look fresh for ever because its times are never reached."""

    class Elsewhere(RecordingArm):
        def observe(self):
            return Observation(PICTURE, "lift the cup", taken_s=clock.now + ahead_s)

    policy = ScriptedPolicy(clock, [[0.1, 0.2, 1.0]])
    settings = LoopSettings(period_s=0.05, watchdog_s=10.0, max_frame_age_s=5.0)
    status = run(policy, Elsewhere(clock), 5, settings=settings)
    assert not policy.seen
    assert status.moves == 0
    assert "ahead of time.monotonic()" in str(status.problem)


def test_a_policy_that_exits_holds_the_arm(clock, arm):
    class Leaving(ScriptedPolicy):
        def act(self, observation, options=None):
            raise SystemExit(3)

    status = run(Leaving(clock), arm, 5)
    assert status.moves == 0
    assert isinstance(status.problem, SystemExit)


def test_an_array_that_a_policy_writes_again_changes_no_command(clock, arm):
    class Reusing(ScriptedPolicy):
        actions = np.tile([0.1, 0.2, 1.0], (5, 1))

        def act(self, observation, options=None):
            chunk = ActionChunk(self.actions)
            clock.start(lambda: (clock.sleep(0.02), self.actions.fill(np.nan)), "writing again")
            return chunk

    run(Reusing(clock), arm, 5)
    assert all(np.isfinite(one).all() for one in arm.commands if one != "stop")


def test_a_loop_that_is_to_give_up_does_so_with_the_arm_stopped(clock, arm):
    policy = ScriptedPolicy(
        clock, [[0.1, 0.2, 1.0]], *[AnswerTimeoutError("the network is gone")] * 9999
    )
    settings = LoopSettings(period_s=0.01, watchdog_s=10.0, give_up_after_s=0.5)
    with pytest.raises(AnswerTimeoutError, match=r"no action for 0.5 s: the network is gone"):
        run(policy, arm, 9999, settings=settings)
    assert arm.commands.count([0.1, 0.2, 1.0]) == 1
    assert arm.commands[-1] == "stop"
    assert len(arm.commands) == 53


@pytest.mark.parametrize("size", [2, 4])
def test_rules_of_another_size_than_the_arm_are_refused(size, clock):
    policy, arm = ScriptedPolicy(clock, [[0.1, 0.2, 1.0]]), RecordingArm(clock, np.zeros(size))
    with pytest.raises(ValueError, match=rf"rules are for 3 .* position is \[{size}\]"):
        run(policy, arm, 3)
    assert not arm.commands
    assert not policy.seen


def test_a_hold_is_logged_once_when_it_begins_and_once_when_it_ends(caplog, clock, arm):
    """Though each question fails for another reason, and some by a mistake."""
    caplog.set_level(logging.INFO)
    troubles = [AnswerTimeoutError(f"request {count} is lost") for count in range(10)]
    troubles += [RuntimeError(f"mistake {count}") for count in range(10)]
    run(ScriptedPolicy(clock, *troubles, [[0.1, 0.2, 1.0]]), arm, 22)
    lines = [one.getMessage() for one in caplog.records]
    assert lines[0] == "the arm holds: request 0 is lost"
    assert lines[1] == "the arm goes on after 1.0 s"
    assert lines[-1].startswith("the arm moved in 1 of 22 periods")
    assert len(lines) == 3


def test_another_episode_begins_with_a_reset_and_nothing_of_the_last_one(clock, arm):
    policy = ScriptedPolicy(clock, [[7.0]] * 500, [[3.0]] * 500)
    move = arm.move

    def resetting(action):
        move(action)
        if action == [7.0] and arm.commands.count([7.0]) == 3:
            loop.reset()

    arm.move = resetting
    loop = ControlLoop(policy, arm, ActionRules((True,)), QUICK, clock)
    clock.run(lambda: loop.run(6))
    assert arm.commands == [[7.0]] * 3 + [[3.0]] * 3 + ["stop"]
    assert policy.resets == 2


class TellingPolicy(ScriptedPolicy):
    """Says what it answers, as a client of a server does, or that there is no server."""

    def __init__(self, clock, told, *script, **values):
        super().__init__(clock, *script, **values)
        self.told = told

    def info(self):
        if isinstance(self.told, Exception):
            raise self.told
        return replace(INFO, action_dim=self.told)


def test_rules_must_fit_the_policys_actions(clock, arm):
    policy = TellingPolicy(clock, 7)
    with pytest.raises(ValueError, match="3 dimensions, and the policy answers 7"):
        run(policy, arm, 3)
    assert not arm.commands
    assert not policy.seen


def test_a_server_that_is_not_there_yet_is_no_reason_to_refuse_the_rules():
    for told in (ServerUnreachableError("nobody"), 3):
        arm = RecordingArm(VirtualClock())
        run(TellingPolicy(arm.clock, told, [[0.1, 0.2, 1.0]]), arm, 1)
        assert arm.commands == [[0.1, 0.2, 1.0], "stop"]


WRONG_SETTINGS = [
    AccessDeniedError(Problem(401, "Unauthorized", "no such key")),
    UnknownEndpointError(Problem(404, "Not Found", "nothing lives here")),
    WrongServerError("cannot reach https://deft.lab: certificate verify failed"),
]


@pytest.mark.parametrize("error", WRONG_SETTINGS, ids=["key", "address", "certificate"])
def test_wrong_settings_end_the_loop_at_its_start(error, clock, arm):
    """It once held for ever, with one line in the log."""
    with pytest.raises(type(error), match=str(error)[:20]):
        run(TellingPolicy(clock, error), arm, 3)
    assert not arm.commands


def test_wrong_settings_hold_the_arm_once_it_runs(clock, arm):
    """A key that is revoked after hours: the loop goes on, and asks again."""
    error = AccessDeniedError(Problem(401, "Unauthorized", "no such key"))
    run(TellingPolicy(clock, 3, [[0.1, 0.2, 1.0]], error, [[0.3, 0.2, 1.0]]), arm, 3)
    assert arm.commands[2] == [0.3, 0.2, 1.0]


class SlowToTell(TellingPolicy):
    """Takes its time to say what it answers."""

    info_s = 30.0

    def info(self):
        self.clock.sleep(self.info_s)
        return super().info()


def test_a_server_that_is_frozen_at_the_start_leaves_the_arm_holding(clock, arm):
    """It once stood for 30 s without a command."""
    policy = SlowToTell(clock, 3)
    settings = LoopSettings(period_s=0.1, watchdog_s=0.2, give_up_after_s=3.0)
    begins_s = clock.now
    with pytest.raises(AnswerTimeoutError, match="no action for 3 s"):
        run(policy, arm, 9999, settings=settings)
    assert arm.at_s[0] - begins_s < 0.5
    assert max(np.diff(arm.at_s)) < 0.2
    assert 3.0 < arm.at_s[-1] - begins_s < 3.6


def test_rules_that_turn_out_not_to_fit_end_a_loop_that_holds_already(clock, arm):
    policy = SlowToTell(clock, 7)
    policy.info_s = 1.0
    with pytest.raises(ValueError, match="3 dimensions, and the policy answers 7"):
        run(policy, arm, 9999)
    assert set(map(str, arm.commands)) == {"stop"}
    assert not policy.seen


def test_a_hold_of_more_than_two_periods_is_logged_with_its_cause(caplog, clock, arm):
    caplog.set_level(logging.INFO)
    run(ScriptedPolicy(clock, [[0.1, 0.2, 1.0]]), arm, 8)
    lines = [one.getMessage() for one in caplog.records]
    assert lines[0] == "the arm holds: no answer yet"
    assert lines[-1].startswith("the arm moved in 1 of 8 periods and was held in 7: 7 no answer")


def test_the_loop_counts_why_the_arm_was_held(clock):
    class Hanging(RecordingArm):
        def observe(self):
            if self.frames == 2:
                clock.sleep(LET_GO_S)
            return super().observe()

    arm = Hanging(clock)
    policy = ScriptedPolicy(clock, AnswerTimeoutError("lost"), [[0.1, 0.2, 1.0]])
    status = run(policy, arm, 12)
    assert status.moves == 1
    assert status.causes == {"AnswerTimeoutError": 1, "no frame yet": 10}


def test_a_loop_says_once_how_long_answers_take_and_which_period_would_do(caplog, clock, arm):
    caplog.set_level(logging.INFO)
    policy = ScriptedPolicy(clock, *[[[0.1, 0.2, 1.0]]] * 999, answer_s=0.11)
    settings = LoopSettings(period_s=0.1, watchdog_s=0.2, blending=ChunkBlending.WAIT)
    status = run(policy, arm, 200, settings=settings)
    lines = [one for one in caplog.records if "answers take" in one.getMessage()]
    assert [one.levelname for one in lines] == ["WARNING"]
    assert lines[0].getMessage() == (
        "answers take 110 ms (p95); of 60 periods 30 were held for want of one; "
        "period_s=0.12 with watchdog_s=0.3 would do"
    )
    assert status.answer_s == pytest.approx(0.11)
    assert caplog.records[-1].getMessage().endswith("answers took 110 ms (p95)")
    said = LoopSettings(period_s=0.12, watchdog_s=0.3, blending=ChunkBlending.WAIT)
    arm = RecordingArm(VirtualClock())
    policy = ScriptedPolicy(arm.clock, *[[[0.1, 0.2, 1.0]]] * 999, answer_s=0.11)
    assert run(policy, arm, 200, settings=said).moves == 200


def test_a_short_run_that_was_held_often_advises_at_its_end(caplog, clock, arm):
    """The page's command runs 50 steps, and the advice came after 60."""
    policy = ScriptedPolicy(clock, *[[[0.1, 0.2, 1.0]]] * 99, answer_s=0.11)
    settings = LoopSettings(period_s=0.1, blending=ChunkBlending.WAIT)
    run(policy, arm, 50, settings=settings)
    (line,) = [one for one in caplog.records if "answers take" in one.getMessage()]
    assert line.levelname == "WARNING"
    assert line.getMessage().endswith("period_s=0.12 with watchdog_s=0.3 would do")


def test_a_short_run_that_was_not_held_advises_nothing(caplog, clock, arm):
    run(ScriptedPolicy(clock, *[[[0.1, 0.2, 1.0]]] * 99, answer_s=0.01), arm, 50)
    assert not caplog.records


def test_a_loop_that_was_held_by_few_slow_answers_is_not_told_to_change(caplog, clock, arm):
    """As where the server was stopped for a moment."""

    class Stopped(ScriptedPolicy):
        def act(self, observation, options=None):
            self.answer_s = 0.45 if len(self.seen) == 9 else 0.053
            return super().act(observation, options)

    run(Stopped(clock, *[[[0.1, 0.2, 1.0]]] * 99), arm, 70, settings=LoopSettings(0.1, 0.2))
    (line,) = [one for one in caplog.records if "answers take" in one.getMessage()]
    assert line.getMessage().endswith("; the period is long enough for 95% of the answers")


def test_chunks_whose_first_answer_is_cut_short_by_the_watchdog_are_told_to(caplog, clock, arm):
    answers = [[[0.1, 0.2, 1.0]] * 4] * 99
    run(ScriptedPolicy(clock, *answers, answer_s=0.08), arm, 70, settings=LoopSettings(0.1, 0.2))
    (line,) = [one for one in caplog.records if "answers take" in one.getMessage()]
    assert line.getMessage().endswith("held for want of one; watchdog_s=0.25 would do")


def test_a_loop_that_is_quick_enough_says_so_without_a_warning(caplog, clock, arm):
    caplog.set_level(logging.INFO)
    run(ScriptedPolicy(clock, *[[[0.1, 0.2, 1.0]]] * 99, answer_s=0.01), arm, 70)
    (line,) = [one for one in caplog.records if "answers take" in one.getMessage()]
    assert line.levelname == "INFO"
    assert "of 60 periods 0 were held" in line.getMessage()


def test_limits_that_act_on_every_move_are_said_once_with_numbers(caplog, clock, arm):
    """As where the policy answers in millimetres, or by another robot's statistics."""
    rules = ActionRules((True, True, False), max_step=(0.5, 0.5, np.inf))
    policy = ScriptedPolicy(clock, *[[[0.1, 0.93, 1.0]]] * 60)
    status = run(policy, arm, 60, rules)
    assert status.limited == 60
    (line,) = [one.getMessage() for one in caplog.records if "limited" in one.getMessage()]
    assert line.startswith(
        "20 of 20 moves were limited, most by max_step: 0.93 was wanted in dimension 1, and 0.5 is "
        "allowed. Is the unit"
    )


def test_limits_that_act_now_and_then_are_not_worth_a_word(caplog, clock, arm):
    rules = ActionRules((True, True, False), max_step=(0.5, 0.5, np.inf))
    answers = [[[0.1, 0.1 if count % 5 == 4 else 0.93, 1.0]] for count in range(60)]
    assert run(ScriptedPolicy(clock, *answers), arm, 60, rules).limited == 48
    assert "limited" not in caplog.text


# Against the clock of this machine: no test below looks at how long anything took.


class RealArm(RecordingArm):
    """Of a loop with threads of its own."""

    def __init__(self):
        super().__init__(VirtualClock())
        self.moved = threading.Event()

    def move(self, action):
        super().move(action)
        if action[0]:
            self.moved.set()


class RealPolicy:
    """Answers at once."""

    session_id = "arm"

    def reset(self, session_id=None):
        """Nothing to do."""

    def act(self, observation, options=None):
        return ActionChunk(np.array([[0.1, 0.2, 1.0]]))


def test_a_loop_in_the_background_runs_until_it_is_stopped():
    arm = RealArm()
    loop = ControlLoop(RealPolicy(), arm, RULES, QUICK)
    assert not loop.is_running
    loop.start()
    with pytest.raises(RuntimeError, match="started once"):
        loop.start()
    assert arm.moved.wait(LET_GO_S)
    assert loop.is_running
    loop.stop()
    assert arm.commands[-1] == "stop"
    assert not loop.is_running


def test_what_ends_a_loop_in_the_background_is_raised_by_its_stop():
    class Broken(RealArm):
        def move(self, action):
            self.moved.set()
            raise OSError("the bus is gone")

    arm = Broken()
    with pytest.raises(OSError, match="the bus is gone"), ControlLoop(RealPolicy(), arm, RULES):
        assert arm.moved.wait(LET_GO_S)


def test_a_call_to_a_frozen_server_ends_with_the_deadline(monkeypatch):
    """Also those that have no deadline of their own: `info` and `reset`."""
    monkeypatch.setattr(control_loop, "LAST_WORDS_S", 0.01)
    arm = RealArm()
    options = ActOptions(deadline_ms=50)
    with holding_up(frozen) as server, PolicyClient(server.url) as policy:
        loop = ControlLoop(policy, arm, RULES, LoopSettings(options=options))
        with loop:
            while not loop.status.causes.get("AnswerTimeoutError"):
                assert not server.let_go.is_set()
                time.sleep(0.005)
        assert not server.let_go.is_set()
    assert set(map(str, arm.commands)) == {"stop"}
