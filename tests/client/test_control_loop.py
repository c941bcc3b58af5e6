"""The arm gets a command in every period, whatever the policy does."""

import threading

import numpy as np
import pytest

from deft_client import control_loop
from deft_client.actions import ActionRules
from deft_client.control_loop import ControlLoop, LoopSettings
from deft_client.errors import AnswerTimeoutError, Problem, ServerFaultError
from deft_client.types import ActionChunk, Observation
from tests.client.samples import frame

RULES = ActionRules((True, True, False))  # two motions and a gripper
QUICK = LoopSettings(period_s=0.01, watchdog_s=10.0)
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


def test_each_answer_is_executed_action_by_action_and_then_the_newest_frame_is_asked_about():
    policy = ScriptedPolicy([[0.1, 0.2, 1.0], [0.3, 0.4, 1.0]], [[0.5, 0.6, 0.0]])
    arm = RecordingArm()
    status = run(policy, arm, 3, settings=LoopSettings(period_s=1.0, watchdog_s=10.0))
    assert arm.commands == [[0.1, 0.2, 1.0], [0.3, 0.4, 1.0], [0.5, 0.6, 0.0], "stop"]
    assert policy.seen == ["frame 1", "frame 2"]
    assert policy.resets == 1
    assert (status.moves, status.holds, status.problem) == (3, 0, None)


def test_a_policy_that_takes_several_periods_is_asked_so_early_that_the_arm_never_holds():
    """Every answer comes three commands after its question; chunks have enough to spare."""
    arm = RecordingArm()

    class Slow(ScriptedPolicy):
        def act(self, observation, options=None):
            until = len(arm.commands) + 3
            while len(arm.commands) < until and not self.let_go.wait(0.001):
                pass
            return ActionChunk(np.tile([0.25, 0.5, 1.0], (60, 1)))

    policy = Slow()
    settings = LoopSettings(period_s=0.005, watchdog_s=10.0, execute=10)
    status = run(policy, arm, 60, settings=settings)
    first = next(index for index, one in enumerate(arm.commands) if one != "stop")
    assert arm.commands[first:60] == [[0.25, 0.5, 1.0]] * (60 - first)
    assert arm.frames > 3
    assert status.seams.commanded == 0.0


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
def test_whatever_comes_instead_of_an_answer_is_a_reason_to_hold_and_to_ask_again(trouble):
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


def test_an_arm_that_cannot_be_commanded_ends_the_loop_stopped_and_says_why():
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
    with pytest.raises(ValueError, match="period_s must be above 0"):
        LoopSettings(**values)
