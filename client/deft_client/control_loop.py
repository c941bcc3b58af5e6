"""Commands an arm at a fixed rate from a policy that may be slow, silent or gone.

Three threads, so that none waits for another: one asks the policy with the newest frame, one
commands the arm once in every period, and a watchdog stops the arm where that one is held up.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Protocol

import numpy as np

from deft_client.actions import Action, ActionQueue, ActionRules, Seam
from deft_client.errors import (
    AccessDeniedError,
    AnswerTimeoutError,
    DeftError,
    UnknownEndpointError,
    UnusableValueError,
    WrongServerError,
)
from deft_client.types import ActingPolicy, ActionChunk, ActOptions, Observation

logger = logging.getLogger(__name__)

# Of a period, for an answer to come in: the command is late by so much, or the arm holds.
WAIT_SHARE = 0.5
LOGGED_AFTER = 2  # periods of holding without an error: shorter waits between chunks are usual
# Of the settings, not of the moment: a loop that starts with them would hold for ever.
_WRONG_SETTINGS = (AccessDeniedError, UnknownEndpointError, WrongServerError)
NO_FRAME, NO_ANSWER, NO_ACTION = "no frame yet", "no answer yet", "no action yet"
_CLOCK_SLACK_S = 0.05  # a frame may seem to be taken so much later than now
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
    seam: Seam = Seam.WAIT
    weights: tuple[float, ...] = ()  # of an ensemble: see `ActionQueue`
    # The policy is not asked with a frame older than this; frames say when they were taken.
    max_frame_age_s: float | None = None
    give_up_after_s: float | None = None  # without an action; None: hold for as long as it takes

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
    causes: Mapping[str, int] = field(default_factory=dict)  # of the holds: an error's class, ...
    stops: int = 0  # holds where nobody knew a position to stay at
    limited: int = 0  # moves that went less far than the policy wanted
    stalls: int = 0  # times the watchdog stopped the arm
    problem: BaseException | None = None


class ControlLoop:
    """One arm driven by one policy: `with ControlLoop(...)` in the background, or `run` here.

    Every period the arm gets one command: the policy's next action as far as the rules allow, or
    the one that holds it. Whatever the policy or the camera raises is a reason to hold and to ask
    again; what `move` raises ends the loop, with the arm stopped. So does `give_up_after_s`
    without an action, with `AnswerTimeoutError`. A wrong key, certificate or address ends it at
    its start; hours later it is a reason to hold.
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
        self._changed = threading.Condition()  # holds the next three
        ours = self._settings
        self._queue = ActionQueue(rules, ours.seam, ours.execute, ours.weights)
        self._is_asking = False
        self._is_new_episode = True
        self._stopping = threading.Event()
        # Each is written by one thread: that of the commands, of the questions, of the watchdog.
        self._status = LoopStatus()
        self._problem: BaseException | None = None
        self._waits_for = NO_ACTION
        self._stalls = 0
        self._causes = Counter[str]()
        self._last: Action | None = None  # what was commanded, after limits
        self._commanded_at = self._moved_at = 0.0
        self._is_hold_logged = False
        self._background: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def status(self) -> LoopStatus:
        """How it is going; may be read from any thread."""
        causes = dict(self._causes)
        return replace(self._status, causes=causes, stalls=self._stalls, problem=self._problem)

    @property
    def is_running(self) -> bool:
        """Does the loop in the background still command the arm? `stop` says what ended it."""
        return self._background is not None and self._background.is_alive()

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

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def reset(self) -> None:
        """Start another episode: nothing of the one before is executed. For any thread."""
        with self._changed:
            self._queue.clear()
            self._is_new_episode = True

    def run(self, num_periods: int | None = None) -> None:
        """Command the arm in this thread, for a number of periods or until `stop`."""
        self._measured()  # refuses rules of another size
        self._check_policy()
        self._commanded_at = self._moved_at = time.monotonic()
        asking = threading.Thread(target=self._ask_on, name="deft-policy", daemon=True)
        watching = threading.Thread(target=self._watch, name="deft-watchdog", daemon=True)
        asking.start()
        watching.start()
        try:
            self._command_all(repeat(None) if num_periods is None else repeat(None, num_periods))
        finally:
            self._stopping.set()
            with self._changed:
                self._changed.notify_all()
            try:
                self._arm.stop()
            finally:
                watching.join()
                asking.join(LAST_WORDS_S)
                logger.info("%s", self._summary())

    def _run_apart(self) -> None:
        try:
            self.run()
        except Exception as error:
            logger.exception("the control loop ended")
            self._failure = error

    def _command_all(self, periods: Iterable[None]) -> None:
        period_s, patience_s = self._settings.period_s, self._settings.give_up_after_s
        due_at = time.monotonic()
        for _ in periods:
            if self._stopping.is_set():
                return
            self._command(self._next_action(due_at + WAIT_SHARE * period_s))
            if patience_s is not None and time.monotonic() - self._moved_at > patience_s:
                raise AnswerTimeoutError(
                    f"no action for {patience_s:g} s: {self._problem or 'no answer'}"
                )
            # What was missed is not made up for.
            due_at = max(due_at + period_s, time.monotonic())
            self._stopping.wait(max(due_at - time.monotonic(), 0.0))

    def _next_action(self, latest: float) -> Action | None:
        """Return the next action, or None where there is none at the latest moment."""
        with self._changed:
            if self._queue.is_due and not self._is_asking:
                self._is_asking = True
                self._changed.notify_all()
            if not self._queue:
                self._changed.wait_for(
                    lambda: self._queue or not self._is_asking, max(latest - time.monotonic(), 0.0)
                )
            self._forget_after_pause()
            return self._queue.next()

    def _command(self, action: Action | None) -> None:
        before = self._measured() if self._last is None else self._last
        wanted = self._rules.hold(before) if action is None else action
        command = None if wanted is None else self._rules.limited(wanted, before)
        if command is None:
            self._arm.stop()
        else:
            self._arm.move(command)
            self._last = command
        is_moved = command is not None and action is not None
        with self._changed:
            self._forget_after_pause()
            if command is None and action is not None:
                self._queue.clear()  # it was not executed, so the next ones start elsewhere
        self._commanded_at = time.monotonic()
        self._note(is_moved)
        done = self._status
        self._status = LoopStatus(
            moves=done.moves + is_moved,
            holds=done.holds + (not is_moved),
            stops=done.stops + (command is None),
            limited=done.limited + (is_moved and bool(np.any(command != action))),
        )

    def _forget_after_pause(self) -> None:
        """Void what was left, where the watchdog stops the arm or the time for it is over."""
        since_s = time.monotonic() - self._commanded_at
        left_s = len(self._queue) * self._settings.period_s
        if since_s > self._settings.watchdog_s:
            self._queue.clear()
            self._last = self._rules.hold(self._last)  # it stands now, whatever it did before
        elif 0 < left_s < since_s - self._settings.period_s:
            self._queue.clear()

    def _note(self, is_moved: bool) -> None:
        """Count why the arm holds; log once that it does, and once that it goes on."""
        since_s, problem = time.monotonic() - self._moved_at, self._problem
        if is_moved:
            if self._is_hold_logged:
                logger.warning("the arm goes on after %.1f s", since_s)
            self._moved_at, self._is_hold_logged = time.monotonic(), False
            return
        cause = self._waits_for if problem is None else type(problem).__name__
        self._causes[cause] += 1
        is_long = since_s > LOGGED_AFTER * self._settings.period_s
        if not self._is_hold_logged and (problem is not None or is_long):
            self._is_hold_logged = True
            mistake = None if isinstance(problem, DeftError) else problem
            logger.warning("the arm holds: %s", problem or cause, exc_info=mistake)

    def _summary(self) -> str:
        """Say in how many periods the arm was held, and why."""
        done = self.status
        text = f"the arm moved in {done.moves} of {done.moves + done.holds} periods"
        if done.holds:
            causes = ", ".join(f"{count} {cause}" for cause, count in self._causes.most_common())
            text += f" and was held in {done.holds}: {causes}"
        return text

    def _measured(self) -> Action | None:
        position = self._arm.position()
        if position is None:
            return None
        if position.shape != self._rules.motions.shape:
            raise ValueError(
                f"the rules are for {len(self._rules.motions)} dimensions, and the arm's position "
                f"is {list(position.shape)}"
            )
        return self._rules.hold(position) if np.isfinite(position).all() else None

    def _check_policy(self) -> None:
        """Refuse a server that will never answer, and rules of another size than its actions.

        Nothing is commanded meanwhile. A server that is not there yet is no reason to refuse: the
        arm holds until it is. Each answer is checked as well.
        """
        info = getattr(self._policy, "info", None)
        if info is None:
            return
        try:
            size, wanted = info().action_dim, len(self._rules.motions)
        except _WRONG_SETTINGS:
            raise
        except DeftError:
            return
        if size != wanted:
            raise ValueError(
                f"the rules are for {wanted} dimensions, and the policy answers {size}"
            )

    def _ask_on(self) -> None:
        """Ask whenever the queue is due."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_asking or self._stopping.is_set())
            if self._stopping.is_set():
                return
            chunk, problem = None, None
            try:
                chunk = self._answer()
            except BaseException as error:  # noqa: BLE001  even SystemExit: the arm holds, and why
                problem = error
            with self._changed:
                if chunk is not None:
                    self._queue.refill(chunk)
                self._problem, self._is_asking = problem, False
                self._waits_for = NO_ACTION
                self._changed.notify_all()

    def _answer(self) -> ActionChunk | None:
        """Return what the policy makes of the newest frame; a new episode is announced first."""
        if self._is_new_episode:
            self._is_new_episode = False
            try:
                self._policy.reset()
            except Exception:
                self._is_new_episode = True
                raise
        self._waits_for = NO_FRAME
        observation = self._arm.observe()
        self._waits_for = NO_ANSWER
        self._check_age(observation)
        with self._changed:
            if self._is_new_episode:  # since a moment ago
                return None
            executed = self._queue.ask()
        options = replace(self._settings.options, executed_steps=executed)
        chunk = self._policy.act(observation, options)
        self._rules.check(chunk.actions)
        return chunk

    def _check_age(self, observation: Observation) -> None:
        longest_s, taken_s = self._settings.max_frame_age_s, observation.taken_s
        if longest_s is None:
            return
        if taken_s is None:
            raise UnusableValueError("taken_s", "missing; max_frame_age_s goes by it")
        age_s = time.monotonic() - taken_s
        if not age_s >= -_CLOCK_SLACK_S:  # NaN, too
            raise UnusableValueError(
                "taken_s", f"{taken_s:g} is ahead of time.monotonic(), which it must be read from"
            )
        if age_s > longest_s:
            raise UnusableValueError(
                "taken_s", f"the newest frame is {age_s:.2f} s old, the limit is {longest_s:g} s"
            )

    def _watch(self) -> None:
        """Stop the arm where no command comes, and try again where that fails."""
        is_stalled = is_stopped = False
        logged = ""
        while not self._stopping.wait(self._settings.period_s / 4):
            since_s = time.monotonic() - self._commanded_at
            if since_s < self._settings.watchdog_s:
                is_stalled = is_stopped = False
                continue
            if not is_stalled:
                is_stalled = True
                self._stalls += 1
                logger.error("no command for %.2f s: the watchdog stops the arm", since_s)
            if not is_stopped:
                try:
                    self._arm.stop()
                    is_stopped = True
                except BaseException as error:  # noqa: BLE001  whatever it is, the arm must stop
                    if repr(error) != logged:
                        logged = repr(error)
                        logger.error("the arm could not be stopped, trying again: %s", logged)
