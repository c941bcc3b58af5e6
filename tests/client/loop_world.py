"""Plays of a control loop in a drawn world, and a judge that knows nothing of how the loop works.

A world has a policy that is slow, silent, gone or mad, a camera that freezes, an arm that stalls,
an operator who begins new episodes, and a process that is stopped for a while. Every number is
drawn from the seed. Each question has a number, which its answer carries to the arm: so the judge
knows of each command what it goes back to.
"""

import random
from dataclasses import dataclass, replace

import numpy as np

from deft_client.actions import ActionRules
from deft_client.control_loop import ControlLoop, LoopSettings
from deft_client.errors import AnswerTimeoutError, ServerUnreachableError
from deft_core.types import ActionChunk, ActOptions, ChunkBlending, Observation
from tests.core.samples import frame
from tests.standins.policy_server import INFO
from tests.standins.virtual_clock import VirtualClock

NUM_PERIODS = 40
STEP, CHANGE, TURN, HIGH = 1.0, 0.5, 0.25, 3.0
# A motion with limits; what the command goes back to (0 where the arm holds); a position.
RULES = ActionRules(
    is_motion=(True, True, False),
    is_switch=(False, True, False),
    low=(-HIGH, 0.0, -1.0),
    high=(HIGH, np.inf, 1.0),
    max_step=(STEP, np.inf, TURN),
    max_change=(CHANGE, np.inf, np.inf),
)
LABELS = 1000  # of one question: more than a chunk has actions
PATIENCE_S = 0.05  # of a client beyond the deadline
TOLERANCE_S = 0.1  # of the loop beyond the deadline
ROUNDING = 1e-6
PICTURE = frame(4, 4)
MAD = (
    [[np.nan, 1.0, 0.0]],
    [[0.0, 1.0, np.inf]],
    [[HIGH + 0.1, 1.0, 0.0]],
    [[0.0, 1.0]],
    np.zeros((0, 3)),
)


@dataclass
class Question:
    """What the judge knows of one question."""

    seen: int  # the event at which its frame was there
    seen_at: float
    num_moves: tuple[int, int]  # before its frame was there, and before the policy had it
    asked_at: float
    num_actions: int = 0
    answered_at: float = 0.0


class World:
    """One play. `faults` are what a loop must not do, in words."""

    session_id = "arm"

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.period_s = period_s = draw.choice([0.02, 0.05, 0.1])
        self.num_actions = draw.choice([1, 1, 2, 4, 8])
        deadline_s = draw.choice([None, period_s, 3 * period_s, 8 * period_s])
        self.settings = LoopSettings(
            period_s=period_s,
            watchdog_s=period_s * draw.choice([1.6, 2.0, 3.0, 10.0]),
            options=ActOptions(deadline_ms=None if deadline_s is None else 1000 * deadline_s),
            execute=draw.choice([None, None, 1, 3]),
            blending=draw.choice([None, *ChunkBlending]),
            max_frame_age_s=draw.choice([None, 3 * period_s]),
        )
        self.deadline_s = deadline_s
        often = draw.choice([0.0, 0.05, 0.3])  # that something goes wrong
        self.trouble = {
            name: draw.choice([0.0, often])
            for name in ("drop", "mad", "slow", "rogue", "freeze", "stall", "deaf")
        }
        self.answer_s = period_s * draw.choice([0.05, 0.5, 0.9, 1.3, 3.0])
        self.measured = draw.choice([None, *[np.array([0.0, 0.0, 0.5])] * 9])
        self.clock = VirtualClock(seed, draw.choice([0.0, 0.0, 0.02]), 40 * period_s)
        self.faults: list[str] = []
        self.num_moves = self.num_commands = 0
        self._event = 0
        self._reset = 0  # the event of the last one: what was seen before is void
        self._stalled_at = 0.0  # as well
        self._questions: dict[int, Question] = {}
        self._seen = self._num_moves_seen = 0
        self._seen_at = 0.0
        self._frame = Observation(PICTURE, "lift it", taken_s=self.clock.now)
        self._executed: set[int] = set()
        self._before: np.ndarray | None = None  # the last command
        self._stands = False  # for all the loop knows
        self._sent_at = self._done_at = self.clock.now
        self._is_over = False

    def play(self) -> list[str]:
        """Run the loop, and return what it did wrong."""
        loop = ControlLoop(self, self, RULES, self.settings, self.clock)
        self.clock.run(lambda: self._run(loop))
        commands = loop.status.moves + loop.status.holds
        self._expect(commands == NUM_PERIODS, f"{commands} commands in {NUM_PERIODS} periods")
        self._expect(loop.status.moves == self.num_moves, "moves were counted wrongly")
        return self.faults

    def _run(self, loop: ControlLoop) -> None:
        if self.draw.random() < 0.5:
            self.clock.start(lambda: self._operate(loop), "operator")
        self._done_at = self.clock.now
        loop.run(NUM_PERIODS)
        self._is_over = True

    def _operate(self, loop: ControlLoop) -> None:
        while not self._is_over:
            self.clock.sleep(self.draw.uniform(1, 20) * self.period_s)
            loop.reset()
            self._reset = self._next_event()

    # The policy.

    def reset(self, session_id: str | None = None) -> None:
        self.clock.sleep(self.draw.uniform(0, 0.1) * self.period_s)
        if self._happens("deaf"):
            raise ServerUnreachableError("not there")

    def info(self) -> object:
        self.clock.sleep(self.draw.choice([0.0, 0.1, 5.0]) * self.period_s)
        return replace(INFO, action_dim=3)

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        number = len(self._questions) + 1
        num_moves = self._num_moves_seen, self.num_moves
        asked = Question(self._seen, self._seen_at, num_moves, self.clock.now)
        self._questions[number] = asked
        self._judge_frame(observation)
        took_s = self.answer_s * self.draw.uniform(0.8, 1.2)
        if self._happens("slow"):
            took_s *= self.draw.uniform(1, 20)
        limit_s = None if self.deadline_s is None else self.deadline_s + PATIENCE_S
        if limit_s is not None and took_s > limit_s and not self._happens("rogue"):
            self.clock.sleep(limit_s)
            raise AnswerTimeoutError("too slow")
        self.clock.sleep(took_s)
        if self._happens("drop"):
            raise ServerUnreachableError("the connection broke")
        if self._happens("mad"):
            return ActionChunk(np.array(self.draw.choice(MAD), np.float64))
        actions = np.zeros((self.num_actions, 3))
        actions[:, 0] = [self.draw.uniform(-2, 2) for _ in actions]
        actions[:, 1] = LABELS * number + np.arange(self.num_actions) + 1
        actions[:, 2] = [self.draw.uniform(-1, 1) for _ in actions]
        asked.num_actions, asked.answered_at = self.num_actions, self.clock.now
        return ActionChunk(actions)

    # The arm.

    def observe(self) -> Observation:
        if not self._happens("freeze"):
            self._frame = Observation(PICTURE, "lift it", taken_s=self.clock.now)
        self.clock.sleep(self.draw.choice([0.0, 0.1]) * self.period_s)
        self._seen, self._num_moves_seen = self._next_event(), self.num_moves
        self._seen_at = self.clock.now
        return self._frame

    def position(self) -> np.ndarray | None:
        return self.measured

    def move(self, command: np.ndarray) -> None:
        self._judge_time()
        if command.shape != (3,) or not np.isfinite(command).all():
            self._expect(False, f"commanded {command}")
            return
        self._judge_numbers(command)
        if command[1]:
            self._judge_source(int(command[1]))
            self.num_moves += 1
        self._before, self._stands = command, False
        self._sent_at = self.clock.now
        self.clock.sleep(self._moving_s())
        self._end_command()

    def stop(self) -> None:
        """By the watchdog, at the end, or in place of a command."""

    def _moving_s(self) -> float:
        if self._happens("stall"):
            return self.draw.uniform(0, 12) * self.period_s
        return self.draw.choice([0.0, 0.02]) * self.period_s

    def _end_command(self) -> None:
        if self.clock.now - self._done_at > self.settings.watchdog_s + ROUNDING:
            self._stalled_at, self._stands = self.clock.now, True
        self._done_at = self.clock.now

    # The judge.

    def _judge_frame(self, observation: Observation) -> None:
        longest_s = self.settings.max_frame_age_s
        if longest_s is not None:
            age_s = self.clock.now - (observation.taken_s or 0.0)
            self._expect(age_s <= longest_s + ROUNDING, f"asked with a frame of {age_s:.3f} s")

    def _judge_time(self) -> None:
        now = self.clock.now
        if not self.num_commands:
            self._done_at = now
        else:
            since_s = now - self._sent_at
            least_s = 0.5 * self.period_s
            self._expect(since_s >= least_s - ROUNDING, f"commands {since_s:.4f} s apart")
        self.num_commands += 1
        pause_s = now - self._done_at
        has_jumped = any(at >= self._done_at - ROUNDING for at in self.clock.jumps)
        if self.measured is not None and not has_jumped:
            self._expect(pause_s <= 2 * self.period_s + ROUNDING, f"{pause_s:.3f} s of no command")
        if pause_s > self.settings.watchdog_s + ROUNDING:
            self._stalled_at, self._stands = self.clock.now, True

    def _judge_numbers(self, command: np.ndarray) -> None:
        before = np.zeros(3) if self._before is None else self._before
        if self._before is None and self.measured is not None:
            before = np.array([0.0, 0.0, self.measured[2]])
        motion, label, position = command.tolist()
        origins = {0.0, before[0]} if self._stands else {before[0]}
        changes = [abs(motion - one) for one in origins]
        self._expect(abs(motion) <= STEP + ROUNDING, f"a motion of {motion}")
        self._expect(min(changes) <= CHANGE + ROUNDING, f"a change of {min(changes)}")
        self._expect(abs(position) <= 1 + ROUNDING, f"a position of {position}")
        turn = abs(position - before[2])
        self._expect(turn <= (TURN if label else 0.0) + ROUNDING, f"a turn of {turn}")
        if not label:
            slowest = min(max(0.0, abs(one) - CHANGE) for one in origins)
            self._expect(abs(motion) <= slowest + ROUNDING, f"holds with a motion of {motion}")

    def _judge_source(self, label: int) -> None:
        number, index = divmod(label - 1, LABELS)
        question, now = self._questions.get(number), self.clock.now
        if question is None or not question.num_actions:
            self._expect(False, f"action {label}, which nobody answered")
            return
        self._expect(label not in self._executed, f"action {label} a second time")
        self._executed.add(label)
        self._expect(question.seen > self._reset, f"action {label} from before a reset")
        self._expect(question.seen_at >= self._stalled_at, f"action {label} from before a stall")
        last = question.num_actions - 1
        due = {min(self.num_moves - before, last) for before in question.num_moves}
        self._expect(min(due) <= index <= max(due), f"action {index}, and {due} is due")
        self._expect(np.ptp(question.num_moves) <= 1, "a policy waits for its frame")
        late_s = now - max(question.answered_at, self._done_at)
        longest_s = (question.num_actions + 1) * self.period_s
        self._expect(late_s <= longest_s + ROUNDING, f"action {label} is {late_s:.3f} s late")
        if self.deadline_s is not None:
            took_s = question.answered_at - question.asked_at
            longest_s = self.deadline_s + TOLERANCE_S
            self._expect(took_s <= longest_s + ROUNDING, f"an answer after {took_s:.3f} s")

    def _expect(self, is_so: bool, otherwise: str) -> None:
        if not is_so:
            self.faults.append(f"{self.clock.now:.3f} s: {otherwise}")

    def _happens(self, trouble: str) -> bool:
        return self.draw.random() < self.trouble[trouble]

    def _next_event(self) -> int:
        self._event += 1
        return self._event
