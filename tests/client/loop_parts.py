"""Arms and policies for a control loop in virtual time."""

import numpy as np

from deft_client.actions import ActionRules
from deft_client.control_loop import ControlLoop, LoopSettings
from deft_client.errors import AnswerTimeoutError
from deft_core.types import ActionChunk, Observation
from tests.core.samples import frame
from tests.standins.virtual_clock import VirtualClock

RULES = ActionRules((True, True, False))  # two motions and a gripper
QUICK = LoopSettings(period_s=0.05, watchdog_s=10.0)
PICTURE = frame(8, 8)


class RecordingArm:
    """Writes down what it is told, and when."""

    def __init__(self, clock: VirtualClock, position=None):
        self.clock = clock
        self.commands: list[list[float] | str] = []
        self.at_s: list[float] = []
        self.frames = 0
        self.measured = position

    def observe(self):
        self.frames += 1
        return Observation(PICTURE, f"frame {self.frames}")

    def position(self):
        return self.measured

    def move(self, action):
        self.at_s.append(self.clock.now)
        self.commands.append(action.tolist())

    def stop(self):
        self.at_s.append(self.clock.now)
        self.commands.append("stop")


class ScriptedPolicy:
    """Answers with the entries of a script, each after some seconds, and then is silent."""

    session_id = "arm"
    SILENCE_S = 20.0

    def __init__(self, clock: VirtualClock, *script, answer_s: float = 0.0):
        self.clock = clock
        self.script = list(script)
        self.answer_s = answer_s
        self.resets = 0
        self.seen: list[str] = []

    def reset(self, session_id=None):
        self.resets += 1

    def act(self, observation, options=None):
        self.seen.append(observation.instruction)
        if not self.script:
            self.clock.sleep(self.SILENCE_S)
            raise AnswerTimeoutError("never answered")
        self.clock.sleep(self.answer_s)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return ActionChunk(np.array(answer, np.float64))


def run(policy, arm, periods, rules=RULES, settings=QUICK):
    loop = ControlLoop(policy, arm, rules, settings, arm.clock)
    arm.clock.run(lambda: loop.run(periods))
    return loop.status
