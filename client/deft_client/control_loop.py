"""Commands an arm at a fixed rate from a policy that may be slow, silent or gone.

Three threads, so that none waits for another: one asks the policy with the newest frame, one
commands the arm once in every period, and a watchdog stops the arm where that one is held up.
"""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import repeat
from types import TracebackType
from typing import Protocol

import numpy as np

from deft_client.actions import Action, ActionRules
from deft_client.calls import ActingPolicy
from deft_client.chunks import ActionQueue, Moment, Seam, SeamSizes
from deft_client.errors import DeftError
from deft_client.types import ActionChunk, ActOptions, Observation

logger = logging.getLogger(__name__)

# Of a period, for an answer to come in: the command is late by so much, or the arm holds.
WAIT_SHARE = 0.5
LAST_WORDS_S = 1.0  # for a policy that is still asked when the loop ends


class Arm(Protocol):
    """A robot as the loop sees it. `observe` has a thread of its own and may wait for a camera."""

    def observe(self) -> Observation:
        """Return the newest frame."""

    def position(self) -> Action | None:
        """Return the measured position in each dimension of an action, or None where unknown.

        Asked for until the first action was commanded; what it says of motions is not looked at.
        """

    def move(self, action: Action) -> None:
        """Execute an action for one period. Must return within it."""

    def stop(self) -> None:
        """Stay where you are, without an action. May be called by any thread, at any time."""


@dataclass(frozen=True)
class LoopSettings:
    """How a loop runs. `seam` and `execute` say when to ask, and what becomes of the answers."""

    period_s: float = 0.1
    watchdog_s: float = 0.2  # without a command; the arm is stopped then
    options: ActOptions = field(default_factory=lambda: ActOptions(deadline_ms=500))
    execute: int | None = None  # actions of a chunk that are used if the next answer is in time
    seam: Seam = Seam.FREEZE

    def __post_init__(self) -> None:
        if not 0 < self.period_s * (1 + WAIT_SHARE) < self.watchdog_s:
            raise ValueError(
                f"period_s must be above 0 and watchdog_s above {1 + WAIT_SHARE} periods, as a "
                f"command may be {WAIT_SHARE} periods late; got {self}"
            )


@dataclass(frozen=True)
class LoopStatus:
    """What a loop has done so far, in periods; `problem` is why the last question was in vain."""

    moves: int = 0
    holds: int = 0
    stops: int = 0  # holds where nobody knew a position to stay at
    limited: int = 0  # moves that went less far than the policy wanted
    stalls: int = 0  # times the watchdog stopped the arm
    seams: SeamSizes = SeamSizes()  # of what the policy wanted; limits come after
    problem: Exception | None = None


class ControlLoop:
    """One arm driven by one policy: `with ControlLoop(...)` in the background, or `run` here.

    Every period the arm gets one command: the policy's next action as far as the rules allow, or
    the one that holds it. The policy is asked so early that chunks follow each other without a
    hold, where they are long enough for that. Whatever the policy raises is a reason to hold and to
    ask again; what `move` raises ends the loop, with the arm stopped.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        arm: Arm,
        rules: ActionRules,
        settings: LoopSettings | None = None,
    ) -> None:
        self._policy, self._arm, self._rules = policy, arm, rules
        self._settings = settings or LoopSettings()
        self._queue = ActionQueue(rules, self._settings.seam, self._settings.execute)
        self._changed = threading.Condition()
        self._asked: Moment | None = None  # while the policy is asked
        self._is_announced = False
        self._stopping = threading.Event()
        # Each is written by one thread: that of the commands, of the questions, of the watchdog.
        self._commands = LoopStatus()
        self._problem: Exception | None = None
        self._stalls = 0
        self._last: Action | None = None
        self._commanded_at = 0.0
        self._background: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def status(self) -> LoopStatus:
        """How it is going; may be read from any thread."""
        return replace(
            self._commands, stalls=self._stalls, seams=self._queue.seams, problem=self._problem
        )

    def start(self) -> None:
        """Run in the background until `stop`."""
        if self._background is not None:
            raise RuntimeError("a loop is started once; make another one")
        self._background = threading.Thread(target=self._run_apart, name="deft-control-loop")
        self._background.start()

    def stop(self) -> None:
        """End the loop with the arm stopped; raises what ended it before, if anything did."""
        self._stopping.set()
        if self._background is not None:
            self._background.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> "ControlLoop":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def run(self, num_periods: int | None = None) -> None:
        """Command the arm in this thread, for a number of periods or until `stop`."""
        self._commanded_at = time.monotonic()
        asking = threading.Thread(target=self._ask, name="deft-policy", daemon=True)
        watching = threading.Thread(target=self._watch, name="deft-watchdog", daemon=True)
        asking.start()
        watching.start()
        try:
            self._command_all(repeat(None) if num_periods is None else repeat(None, num_periods))
        finally:
            self._stopping.set()
            with self._changed:
                self._changed.notify_all()
            self._arm.stop()
            watching.join()
            asking.join(LAST_WORDS_S)

    def _run_apart(self) -> None:
        try:
            self.run()
        except Exception as error:
            logger.exception("the control loop ended")
            self._failure = error

    def _command_all(self, periods: Iterable[None]) -> None:
        due_at = time.monotonic()
        for _ in periods:
            if self._stopping.is_set():
                return
            self._command(self._next_action(due_at + WAIT_SHARE * self._settings.period_s))
            # What was missed is not made up for.
            due_at = max(due_at + self._settings.period_s, time.monotonic())
            self._stopping.wait(max(due_at - time.monotonic(), 0.0))

    def _next_action(self, moment: float) -> Action | None:
        """Return the next action, or None where there is none at a moment."""
        with self._changed:
            if self._queue.is_due and self._asked is None:
                self._asked = self._queue.now
                self._changed.notify_all()
            if self._queue.is_empty:
                self._changed.wait_for(
                    lambda: not self._queue.is_empty, max(moment - time.monotonic(), 0.0)
                )
            return self._queue.next()

    def _command(self, wanted: Action | None) -> None:
        before = self._measured() if self._last is None else self._last
        moved = None if wanted is None else self._rules.limited(wanted, before)
        action = self._rules.hold(before) if moved is None else moved
        if action is None:
            self._arm.stop()
        else:
            self._arm.move(action)
            self._last = action
        self._commanded_at = time.monotonic()
        is_limited = wanted is not None and moved is not None and (moved != wanted).any()
        done = self._commands
        self._commands = LoopStatus(
            moves=done.moves + (moved is not None),
            holds=done.holds + (moved is None),
            stops=done.stops + (action is None),
            limited=done.limited + bool(is_limited),
        )

    def _measured(self) -> Action | None:
        position = self._arm.position()
        known = position is not None and np.isfinite(position).all()
        return self._rules.hold(position) if known else None

    def _ask(self) -> None:
        """Ask whenever the queue is due."""
        while self._is_wanted():
            chunk = self._answer()
            with self._changed:
                if chunk is not None:
                    self._queue.refill(chunk, self._asked)
                self._asked = None
                self._changed.notify_all()

    def _answer(self) -> ActionChunk | None:
        """What the policy makes of the newest frame; a new episode is announced first."""
        try:
            if not self._is_announced:
                self._policy.reset()
                self._is_announced = True
            chunk = self._policy.act(self._arm.observe(), self._settings.options)
            self._rules.check(chunk.actions)
        except DeftError as error:
            self._note(error)
        except Exception as error:  # of a camera, or a mistake: the arm holds all the same
            logger.exception("no action")
            self._note(error)
        else:
            self._note(None)
            return chunk
        return None

    def _is_wanted(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._asked is not None or self._stopping.is_set())
        return not self._stopping.is_set()

    def _note(self, problem: Exception | None) -> None:
        if problem is not None and str(problem) != str(self._problem):
            logger.warning("the arm holds: %s", problem)
        self._problem = problem

    def _watch(self) -> None:
        is_stalled = False
        while not self._stopping.wait(self._settings.period_s / 4):
            since_s = time.monotonic() - self._commanded_at
            if since_s < self._settings.watchdog_s:
                is_stalled = False
            elif not is_stalled:
                is_stalled = True
                logger.error("no command for %.2f s: the watchdog stops the arm", since_s)
                self._arm.stop()
                self._stalls += 1
