"""The arm gets a command in every period, whatever the policy does."""

import logging
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from deft_client import control_loop
from deft_client.actions import ActionRules, Seam
from deft_client.control_loop import ControlLoop, LoopSettings
from deft_client.errors import (
    AccessDeniedError,
    AnswerTimeoutError,
    Problem,
    ServerFaultError,
    ServerUnreachableError,
    UnknownEndpointError,
    WrongServerError,
)
from deft_client.types import ActionChunk, Observation
from tests.client.samples import frame
from tests.standins.policy_server import INFO

RULES = ActionRules((True, True, False))  # two motions and a gripper
# A chunk of one action is dropped after a pause of two periods: no machine is that busy.
QUICK = LoopSettings(period_s=0.05, watchdog_s=10.0)
LET_GO_S = 20.0


@pytest.fixture(autouse=True)
def no_last_words(monkeypatch):
    """A scripted policy that is silent stays so for as long as the loop waits for it at its end."""
    monkeypatch.setattr(control_loop, "LAST_WORDS_S", 0.01)


class RecordingArm:
    """Writes down what it is told."""

    def __init__(self, position=None):
        self.commands: list[list[float] | str] = []
        self.frames = 0
        self.measured = position

    def observe(self):
        self.frames += 1
        return Observation(frame(8, 8), f"frame {self.frames}")

    def position(self):
        return self.measured

    def move(self, action):
        self.commands.append(action.tolist())

    def stop(self):
        self.commands.append("stop")


class ScriptedPolicy:
    """Answers with the entries of a script, and then never again until it is let go."""

    session_id = "arm"

    def __init__(self, *script):
        self.script = list(script)
        self.let_go = threading.Event()
        self.resets = 0
        self.seen: list[str] = []

    def reset(self, session_id=None):
        self.resets += 1

    def act(self, observation, options=None):
        self.seen.append(observation.instruction)
        if not self.script:
            self.let_go.wait(LET_GO_S)
            raise AnswerTimeoutError("never answered")
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return ActionChunk(np.array(answer, np.float64))


def run(policy, arm, periods, rules=RULES, settings=QUICK):
    loop = ControlLoop(policy, arm, rules, settings)
    try:
        loop.run(periods)
        assert not policy.let_go.is_set()
    finally:
        policy.let_go.set()
    return loop.status


def test_a_chunk_is_executed_before_the_next_frame_is_asked():
    policy = ScriptedPolicy([[0.1, 0.2, 1.0], [0.3, 0.4, 1.0]], [[0.5, 0.6, 0.0]])
    arm = RecordingArm()
    status = run(policy, arm, 3, settings=LoopSettings(period_s=1.0, watchdog_s=10.0))
    assert arm.commands == [[0.1, 0.2, 1.0], [0.3, 0.4, 1.0], [0.5, 0.6, 0.0], "stop"]
    assert policy.seen == ["frame 1", "frame 2"]
    assert policy.resets == 1
    assert (status.moves, status.holds, status.problem) == (3, 0, None)


def test_a_slow_policy_is_asked_early_enough():
    """Every answer comes three commands after its question; chunks have enough to spare."""
    arm = RecordingArm()

    class Slow(ScriptedPolicy):
        def act(self, observation, options=None):
            until = len(arm.commands) + 3
            while len(arm.commands) < until and not self.let_go.wait(0.001):
                pass
            return ActionChunk(np.tile([0.25, 0.5, 1.0], (60, 1)))

    policy = Slow()
    settings = LoopSettings(period_s=0.01, watchdog_s=10.0, execute=10, seam=Seam.SWITCH)
    run(policy, arm, 60, settings=settings)
    first = next(index for index, one in enumerate(arm.commands) if one != "stop")
    assert arm.commands[first:60] == [[0.25, 0.5, 1.0]] * (60 - first)
    assert arm.frames > 3


def test_a_policy_that_falls_silent_leaves_the_arm_holding_every_period():
    """Motions are zero then, and the gripper stays as it was: a cup is not dropped."""
    policy = ScriptedPolicy([[0.1, 0.2, 1.0]])
    arm = RecordingArm()
    status = run(policy, arm, 20)
    assert [one for one in arm.commands if one != "stop"].count([0.0, 0.0, 1.0]) >= 18
    assert status.moves + status.holds == 20
    assert status.moves == 1


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
def test_bad_answers_make_the_arm_hold_and_ask_again(trouble):
    policy = ScriptedPolicy([[0.1, 0.2, 1.0]], trouble)
    arm = RecordingArm()
    status = run(policy, arm, 10)
    assert arm.commands[-2] == [0.0, 0.0, 1.0]
    assert status.moves + status.holds == 10
    assert len(policy.seen) >= 3


def test_the_server_may_be_away_when_the_episode_starts():
    """The reset is repeated until it is heard; until then nothing is asked, and the arm holds."""

    class Late(ScriptedPolicy):
        def reset(self, session_id=None):
            self.resets += 1
            if self.resets < 3:
                raise AnswerTimeoutError("not there yet")

    policy = Late([[0.1, 0.2, 1.0]])
    arm = RecordingArm(position=np.array([0.0, 0.0, 0.5]))
    status = run(policy, arm, 50)
    assert policy.resets == 3
    assert arm.commands[0] == [0.0, 0.0, 0.5]
    assert [0.1, 0.2, 1.0] in arm.commands
    assert status.stops == 0


def test_where_nobody_knows_a_position_to_stay_at_the_arm_is_stopped():
    for measured in (None, np.full(3, np.nan)):
        arm = RecordingArm(measured)
        status = run(ScriptedPolicy(), arm, 3)
        assert arm.commands == ["stop"] * 4  # one of them at the end of the loop
        assert status.stops == 3


def test_absolute_joints_hold_the_measured_pose_until_one_was_commanded():
    rules = ActionRules((False, False), max_step=(0.5, 0.5))
    arm = RecordingArm(position=np.array([1.0, -1.0]))
    run(ScriptedPolicy(), arm, 2, rules)
    assert arm.commands[:2] == [[1.0, -1.0]] * 2
    arm = RecordingArm(position=np.array([1.0, -1.0]))
    status = run(ScriptedPolicy([[9.0, -1.25]]), arm, 5, rules)
    moved = [one for one in arm.commands if one != [1.0, -1.0]]
    assert moved[0] == [1.5, -1.25]
    assert set(map(str, moved[:-1])) == {"[1.5, -1.25]"}
    assert status.limited == 1


def test_a_camera_that_hangs_leaves_the_arm_holding():
    let_go = threading.Event()

    class Blind(RecordingArm):
        def observe(self):
            let_go.wait(LET_GO_S)
            return super().observe()

    arm = Blind(position=np.array([0.0, 0.0, 1.0]))
    status = run(ScriptedPolicy(), arm, 10)
    assert not let_go.is_set()
    let_go.set()
    assert status.holds == 10
    assert arm.commands[:-1] == [[0.0, 0.0, 1.0]] * 10


def test_the_watchdog_stops_an_arm_whose_command_does_not_return():
    stopped, let_go = threading.Event(), threading.Event()

    class Stuck(RecordingArm):
        def move(self, action):
            let_go.wait(LET_GO_S)

        def stop(self):
            stopped.set()

    policy = ScriptedPolicy([[0.1, 0.2, 1.0]])
    settings = LoopSettings(period_s=0.01, watchdog_s=0.02)
    with ControlLoop(policy, Stuck(), RULES, settings) as loop:
        assert stopped.wait(LET_GO_S)
        assert not let_go.is_set()
        let_go.set()
        policy.let_go.set()
    assert loop.status.stalls >= 1


def test_an_arm_that_cannot_be_commanded_ends_the_loop():
    class Broken(RecordingArm):
        def move(self, action):
            raise OSError("the bus is gone")

    policy = ScriptedPolicy([[0.1, 0.2, 1.0]])
    arm = Broken()
    with pytest.raises(OSError, match="the bus is gone"), ControlLoop(policy, arm, RULES, QUICK):
        policy.let_go.wait(0.2)
    assert arm.commands[-1] == "stop"
    policy.let_go.set()


def test_a_loop_in_the_background_runs_until_it_is_stopped():
    policy = ScriptedPolicy(*[[[0.1, 0.2, 1.0]]] * 3)
    arm = RecordingArm()
    moved = threading.Event()
    move = arm.move
    arm.move = lambda action: (move(action), moved.set())
    loop = ControlLoop(policy, arm, RULES, QUICK)
    loop.start()
    with pytest.raises(RuntimeError, match="started once"):
        loop.start()
    assert moved.wait(LET_GO_S)
    policy.let_go.set()
    loop.stop()
    assert arm.commands[-1] == "stop"
    assert not loop.status.stalls


@pytest.mark.parametrize(
    "values", [{"period_s": 0.0}, {"period_s": -1.0}, {"period_s": 0.1, "watchdog_s": 0.15}]
)
def test_settings_without_time_for_a_command_are_refused(values):
    with pytest.raises(ValueError, match="period_s"):
        LoopSettings(**values)


def test_chunks_follow_each_other_by_waiting_unless_told_otherwise():
    """The arm executes an answer to its end, then asks: what the policies were trained for."""
    arm = RecordingArm()

    class Numbered(ScriptedPolicy):
        def act(self, observation, options=None):
            self.seen.append(sum(one[0] > 0 for one in arm.commands))
            return ActionChunk(np.array([[self.seen[-1] + one, 0, 1.0] for one in range(1, 5)]))

    policy = Numbered()
    run(policy, arm, 12, settings=LoopSettings(period_s=1.0 / 8, watchdog_s=10.0))
    moved = [one[0] for one in arm.commands[:12] if one[0] > 0]
    assert moved == list(range(1, len(moved) + 1))
    assert policy.seen[:3] == [0, 4, 8]


MOTION = ActionRules((True,), max_step=(1.0,))
SEAMS = pytest.mark.parametrize("seam", [None, *Seam])  # None: as the settings have it


def seamed(seam, **values):
    return LoopSettings(**values) if seam is None else LoopSettings(seam=seam, **values)


class AnsweringPolicy(ScriptedPolicy):
    """Has an answer for its first, second, third ... frame, two periods after it."""

    def __init__(self, arm, answer):
        super().__init__()
        self.arm, self.answer = arm, answer

    def act(self, observation, options=None):
        until = len(self.arm.commands) + 2
        while len(self.arm.commands) < until and not self.let_go.wait(0.001):
            pass
        self.seen.append(observation.instruction)
        return ActionChunk(np.array(self.answer(len(self.seen)), np.float64))


@SEAMS
@pytest.mark.parametrize("rules", [MOTION, ActionRules((True,)), ActionRules((False,))])
def test_every_command_is_finite_and_within_the_rules(seam, rules):
    arm = RecordingArm(position=np.zeros(1))
    policy = AnsweringPolicy(arm, lambda count: [[(-1) ** count * 1e308]] * 8)
    settings = seamed(seam, period_s=0.005, watchdog_s=10.0, execute=4)
    status = run(policy, arm, 60, rules, settings)
    commands = np.array(arm.commands[:60])
    assert np.isfinite(commands).all()
    assert rules is not MOTION or (np.abs(commands) <= 1.0).all()
    assert "finite" in str(status.problem)


@SEAMS
def test_an_arm_that_was_limited_is_not_driven_back(seam):
    """What limits kept from being done was not done: nothing needs to be undone."""
    arm = RecordingArm()
    policy = AnsweringPolicy(arm, lambda count: [[10.0 if count == 1 else 0.0]] * 20)
    run(policy, arm, 80, MOTION, seamed(seam, period_s=0.01, watchdog_s=10.0, execute=8))
    moved = [one[0] for one in arm.commands[:80]]
    assert 1.0 in moved
    assert min(moved) == 0.0
    assert sum(moved) <= 20.0


@SEAMS
def test_one_mad_answer_leaves_the_next_ones_as_they_are(seam):
    arm = RecordingArm()
    policy = AnsweringPolicy(arm, lambda count: [[1e17 if count == 2 else 0.01]] * 8)
    run(policy, arm, 80, MOTION, seamed(seam, period_s=0.005, watchdog_s=10.0))
    assert {one[0] for one in arm.commands[:80]} <= {0.0, 0.01}


def test_a_hold_slows_down_as_the_rules_ask():
    rules = ActionRules((True, False), max_change=(0.25, np.inf), high=(1.0, 1.0))
    arm = RecordingArm(position=np.array([9.0, 1.5]))
    run(ScriptedPolicy([[0.25, 1.0], [0.5, 1.0]]), arm, 12, rules)
    first = arm.commands.index([0.25, 1.0])
    expected = [[0.25, 1.0], [0.5, 1.0], [0.25, 1.0], [0.0, 1.0], [0.0, 1.0]]
    assert arm.commands[first : first + 5] == expected


@SEAMS
def test_nothing_older_than_the_watchdogs_stop_is_executed(seam):
    """The second command returns only once the arm was stopped."""

    class Stalling(RecordingArm):
        stopped = threading.Event()

        def move(self, action):
            super().move(action)
            if self.commands.count([7.0]) == 2 and not self.stopped.is_set():
                assert self.stopped.wait(LET_GO_S)

        def stop(self):
            super().stop()
            self.stopped.set()

    arm = Stalling()
    policy = ScriptedPolicy([[7.0]] * 8)
    settings = seamed(seam, period_s=0.05, watchdog_s=0.5)
    status = run(policy, arm, 20, ActionRules((True,)), settings)
    assert status.stalls >= 1
    assert arm.commands.count([7.0]) == 2
    assert len(policy.seen) >= 2


def test_an_answer_to_a_frame_from_before_a_stall_is_not_executed():
    arm, answering = RecordingArm(), threading.Event()

    class Late(ScriptedPolicy):
        def act(self, observation, options=None):
            self.seen.append(observation.instruction)
            if len(self.seen) == 1:
                answering.set()
                while "stop" not in arm.commands and not self.let_go.wait(0.001):
                    pass
                return ActionChunk(np.array([[7.0]] * 8))
            self.let_go.wait(LET_GO_S)
            raise AnswerTimeoutError("never answered")

    move = arm.move

    def stalling(action):
        move(action)
        if answering.is_set() and "stop" not in arm.commands:
            while "stop" not in arm.commands:
                time.sleep(0.001)
            time.sleep(0.03)  # for the answer to come in

    arm.move = stalling
    run(Late(), arm, 20, ActionRules((True,)), LoopSettings(period_s=0.05, watchdog_s=0.5))
    assert [7.0] not in arm.commands


@SEAMS
def test_a_pause_longer_than_what_is_left_empties_the_queue(seam):
    arm = RecordingArm()
    move = arm.move

    def pausing(action):
        move(action)
        if action == [7.0] and arm.commands.count([7.0]) == 2:
            time.sleep(0.6)

    arm.move = pausing
    settings = seamed(seam, period_s=0.05, watchdog_s=10.0)
    run(ScriptedPolicy([[7.0]] * 8), arm, 10, ActionRules((True,)), settings)
    assert arm.commands.count([7.0]) == 2


def test_an_arm_whose_stop_raises_is_stopped_again():
    class Stubborn(RecordingArm):
        def __init__(self):
            super().__init__(position=np.zeros(3))
            self.tries, self.stopped = 0, threading.Semaphore(0)

        def move(self, action):
            assert self.stopped.acquire(timeout=LET_GO_S)

        def stop(self):
            self.tries += 1
            if self.tries < 3:
                raise [OSError("busy"), SystemExit(1)][self.tries - 1]
            self.stopped.release()

    arm, policy = Stubborn(), ScriptedPolicy([[0.1, 0.2, 1.0]] * 2)
    status = run(policy, arm, 3, settings=LoopSettings(period_s=0.01, watchdog_s=0.02))
    assert arm.tries >= 3
    assert status.stalls >= 2


def test_a_frame_counts_from_its_arrival():
    """Every frame takes five commands to come; its answer says which period each action is for."""
    arm = RecordingArm()
    observe = arm.observe

    def waiting():
        until = len(arm.commands) + 5
        while len(arm.commands) < until and not policy.let_go.wait(0.0005):
            pass
        return observe()

    class Numbered(ScriptedPolicy):
        def act(self, observation, options=None):
            return ActionChunk(len(arm.commands) + np.arange(40.0).reshape(40, 1))

    arm.observe, policy = waiting, Numbered()
    settings = LoopSettings(period_s=0.02, watchdog_s=10.0, execute=20, seam=Seam.SWITCH)
    run(policy, arm, 120, ActionRules((False,)), settings)
    commands = [one if one == "stop" else one[0] for one in arm.commands[:120]]
    first = next(index for index, one in enumerate(commands) if one != "stop")
    assert first < 60
    # One command may fall between a frame and the moment in which the policy sees it.
    assert all(abs(commands[index] - index) <= 2 for index in range(first, 120))


def test_frames_that_are_too_old_are_not_asked_about():
    class Aging(RecordingArm):
        def observe(self):
            taken_s = time.monotonic() - (9.0 if self.frames else 0.0)
            self.frames += 1
            return Observation(frame(8, 8), f"frame {self.frames}", taken_s=taken_s)

    policy = ScriptedPolicy([[0.1, 0.2, 1.0]], [[0.3, 0.2, 1.0]])
    arm = Aging()
    settings = LoopSettings(period_s=0.05, watchdog_s=10.0, max_frame_age_s=5.0)
    status = run(policy, arm, 10, settings=settings)
    assert policy.seen == ["frame 1"]
    assert status.moves == 1
    assert "9.00 s old, the limit is 5 s" in str(status.problem)


def test_frames_without_an_age_are_not_used_where_age_counts():
    policy = ScriptedPolicy([[0.1, 0.2, 1.0]])
    settings = LoopSettings(period_s=0.05, watchdog_s=10.0, max_frame_age_s=5.0)
    status = run(policy, RecordingArm(), 3, settings=settings)
    assert not policy.seen
    assert "taken_s: missing" in str(status.problem)


@pytest.mark.parametrize("clock", [time.time, lambda: time.monotonic() + 60, lambda: math.nan])
def test_frames_of_another_clock_hold_the_arm_and_say_so(clock):
    """A frozen camera must not look fresh for ever because its times are never reached."""

    class Elsewhere(RecordingArm):
        def observe(self):
            return Observation(frame(8, 8), "lift the cup", taken_s=clock())

    policy = ScriptedPolicy([[0.1, 0.2, 1.0]])
    settings = LoopSettings(period_s=0.05, watchdog_s=10.0, max_frame_age_s=5.0)
    status = run(policy, Elsewhere(), 5, settings=settings)
    assert not policy.seen
    assert status.moves == 0
    assert "ahead of time.monotonic()" in str(status.problem)


def test_a_policy_that_exits_holds_the_arm():
    class Leaving(ScriptedPolicy):
        def act(self, observation, options=None):
            raise SystemExit(3)

    status = run(Leaving(), RecordingArm(), 5)
    assert status.moves == 0
    assert isinstance(status.problem, SystemExit)


def test_an_array_that_a_policy_writes_again_changes_no_command():
    class Reusing(ScriptedPolicy):
        actions = np.tile([0.1, 0.2, 1.0], (5, 1))

        def act(self, observation, options=None):
            chunk = ActionChunk(self.actions)
            threading.Timer(0.02, self.actions.fill, (np.nan,)).start()
            return chunk

    arm = RecordingArm()
    run(Reusing(), arm, 5, settings=LoopSettings(period_s=0.05, watchdog_s=10.0))
    assert all(np.isfinite(one).all() for one in arm.commands if one != "stop")


def test_a_loop_that_is_to_give_up_does_so_with_the_arm_stopped():
    policy = ScriptedPolicy([[0.1, 0.2, 1.0]], *[AnswerTimeoutError("the network is gone")] * 9999)
    arm = RecordingArm()
    settings = LoopSettings(period_s=0.01, watchdog_s=10.0, give_up_after_s=0.5)
    with pytest.raises(AnswerTimeoutError, match=r"no action for 0.5 s: the network is gone"):
        run(policy, arm, 9999, settings=settings)
    assert arm.commands.count([0.1, 0.2, 1.0]) == 1
    assert arm.commands[-1] == "stop"


@pytest.mark.parametrize("size", [2, 4])
def test_rules_of_another_size_than_the_arm_are_refused(size):
    policy, arm = ScriptedPolicy([[0.1, 0.2, 1.0]]), RecordingArm(position=np.zeros(size))
    loop = ControlLoop(policy, arm, RULES, QUICK)
    with pytest.raises(ValueError, match=rf"rules are for 3 .* position is \[{size}\]"):
        loop.run(3)
    assert not arm.commands
    assert not policy.seen


def test_a_hold_is_logged_once_when_it_begins_and_once_when_it_ends(caplog):
    """Though each question fails for another reason, and some by a mistake."""
    caplog.set_level(logging.INFO)
    troubles = [AnswerTimeoutError(f"request {count} is lost") for count in range(10)]
    troubles += [RuntimeError(f"mistake {count}") for count in range(10)]
    policy = ScriptedPolicy(*troubles, [[0.1, 0.2, 1.0]])
    arm = RecordingArm()
    run(policy, arm, 40)
    lines = [one.getMessage() for one in caplog.records]
    assert lines[0] == "the arm holds: request 0 is lost"
    assert lines[1].startswith("the arm goes on after ")
    assert lines[-1].startswith("the arm moved in 1 of 40 periods")
    assert len(lines) <= 4  # it may hold once more, at the end


def test_another_episode_begins_with_a_reset_and_nothing_of_the_last_one():
    arm, policy = RecordingArm(), ScriptedPolicy([[7.0]] * 500, [[3.0]] * 500)
    move = arm.move

    def resetting(action):
        move(action)
        if action == [7.0] and arm.commands.count([7.0]) == 3:
            loop.reset()

    arm.move = resetting
    loop = ControlLoop(policy, arm, ActionRules((True,)), QUICK)
    loop.run(20)
    policy.let_go.set()
    assert arm.commands.count([7.0]) == 3
    assert [3.0] in arm.commands
    assert policy.resets == 2


class TellingPolicy(ScriptedPolicy):
    """Says what it answers, as a client of a server does, or that there is no server."""

    def __init__(self, told, *script):
        super().__init__(*script)
        self.told = told

    def info(self):
        if isinstance(self.told, Exception):
            raise self.told
        return replace(INFO, action_dim=self.told)


def test_rules_must_fit_the_policys_actions():
    policy, arm = TellingPolicy(7), RecordingArm()
    loop = ControlLoop(policy, arm, RULES, QUICK)
    with pytest.raises(ValueError, match="3 dimensions, and the policy answers 7"):
        loop.run(3)
    assert not arm.commands
    assert not policy.seen


def test_a_server_that_is_not_there_yet_is_no_reason_to_refuse_the_rules():
    gone = ServerUnreachableError("nobody")
    for policy in (TellingPolicy(gone, [[0.1, 0.2, 1.0]]), TellingPolicy(3, [[0.1, 0.2, 1.0]])):
        arm = RecordingArm()
        run(policy, arm, 1, settings=LoopSettings(period_s=1.0, watchdog_s=10.0))
        assert arm.commands == [[0.1, 0.2, 1.0], "stop"]


WRONG_SETTINGS = [
    AccessDeniedError(Problem(401, "Unauthorized", "no such key")),
    UnknownEndpointError(Problem(404, "Not Found", "nothing lives here")),
    WrongServerError("cannot reach https://deft.lab: certificate verify failed"),
]


@pytest.mark.parametrize("error", WRONG_SETTINGS, ids=["key", "address", "certificate"])
def test_wrong_settings_end_the_loop_at_its_start(error):
    """It once held for ever, with one line in the log."""
    policy, arm = TellingPolicy(error), RecordingArm()
    with pytest.raises(type(error), match=str(error)[:20]):
        ControlLoop(policy, arm, RULES, QUICK).run(3)
    assert not arm.commands


def test_wrong_settings_hold_the_arm_once_it_runs():
    """A key that is revoked after hours: the loop goes on, and asks again."""
    error = AccessDeniedError(Problem(401, "Unauthorized", "no such key"))
    policy, arm = TellingPolicy(3, [[0.1, 0.2, 1.0]], error, [[0.3, 0.2, 1.0]]), RecordingArm()
    run(policy, arm, 6)
    assert [0.3, 0.2, 1.0] in arm.commands


def test_a_hold_of_more_than_two_periods_is_logged_with_its_cause(caplog):
    caplog.set_level(logging.INFO)
    run(ScriptedPolicy([[0.1, 0.2, 1.0]]), RecordingArm(), 8)
    lines = [one.getMessage() for one in caplog.records]
    assert lines[0] == "the arm holds: no answer yet"
    assert lines[-1].startswith("the arm moved in 1 of 8 periods and was held in 7: 7 no answer")


def test_the_loop_counts_why_the_arm_was_held(caplog):
    caplog.set_level(logging.INFO)
    arm = RecordingArm()
    see, let_go = arm.observe, threading.Event()

    def hanging():
        if arm.frames == 2:
            let_go.wait(LET_GO_S)
        return see()

    arm.observe = hanging
    policy = ScriptedPolicy(AnswerTimeoutError("lost"), [[0.1, 0.2, 1.0]])
    status = run(policy, arm, 12)
    let_go.set()
    assert status.moves == 1
    assert status.causes["no frame yet"] >= 5
    assert set(status.causes) <= {"AnswerTimeoutError", "no frame yet", "no answer yet"}
    assert sum(status.causes.values()) == status.holds
