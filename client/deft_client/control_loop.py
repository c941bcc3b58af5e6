"""Commands an arm at a fixed rate from a policy that may be slow, silent or gone.

Three threads, so that none waits for another: one asks the policy with the newest frame, one
commands the arm once in every period, and a watchdog stops the arm where that one is held up.
"""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field, replace
from itertools import repeat
from statistics import median
from typing import Protocol

import numpy as np

from deft_client.actions import Action, ActionQueue, ActionRules, Excess
from deft_client.deadlines import ending_at
from deft_client.errors import (
    AccessDeniedError,
    AnswerTimeoutError,
    UnknownEndpointError,
    WrongServerError,
)
from deft_core.errors import DeftError, UnusableValueError, warn_renamed
from deft_core.types import ActingPolicy, ActionChunk, ActOptions, ChunkBlending, Observation

logger = logging.getLogger(__name__)

# Commands are at least half a period apart, and the loop waits for an answer until half a period
# before the watchdog.
HALF = 0.5
WATCHDOG_PERIODS = 2.5  # at least: then the watchdog ends no wait before the period does
SEND_SHARE = 0.05  # of a period, for a command to be sent in, where `move` does not take longer
LOGGED_AFTER = 2  # periods of holding without an error: shorter waits between chunks are usual
DEADLINE_MS = 500  # of an answer, unless the settings say otherwise
REPORTED_AFTER = 60  # periods since the first answer, until the log says how long answers take
ADVISED_AFTER = 20  # periods since the first answer, for a shorter run to be advised at its end
LIMITED_AFTER = 20  # moves in a row that were limited, until the log asks for the unit
HELD_SHARE = 0.05  # of the periods: more are worth a warning
# Of the settings, not of the moment: a loop that starts with them would hold for ever.
_WRONG_SETTINGS = (AccessDeniedError, UnknownEndpointError, WrongServerError)
NO_FRAME, NO_ANSWER, NO_ACTION = "no frame yet", "no answer yet", "no action yet"
_CLOCK_SLACK_S = 0.05  # a frame may seem to be taken so much later than now
# An answer that took longer than its deadline by more is not used. Clients wait 0.05 s for it.
_DEADLINE_SLACK_S = 0.1
LAST_WORDS_S = 1.0  # for a policy that is still asked when the loop ends
_ANSWERS_KEPT, _ANSWERS_RECENT, _COMMANDS_KEPT = 100, 10, 20  # whose times are remembered


class Clock:
    """The time of a loop, and its threads. Tests give it another one, whose hours pass at once."""

    def monotonic(self) -> float:
        """Return the seconds by which observations say when they were taken."""
        return time.monotonic()

    def condition(self) -> threading.Condition:
        """Return what threads wait on."""
        return threading.Condition()

    def start(self, work: Callable[[], None], name: str) -> None:
        """Have a thread work."""
        threading.Thread(target=work, name=name, daemon=True).start()


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
    """How a loop runs. `blending` and `execute` say when to ask, and how chunks are used."""

    period_s: float = 0.1
    watchdog_s: float = 0.25  # without a command; the arm is stopped then
    options: ActOptions = field(default_factory=lambda: ActOptions(deadline_ms=DEADLINE_MS))
    execute: int | None = None  # actions of a chunk that are used if the next answer is in time
    # None: SWITCH where chunks have one action, WAIT where they have more.
    blending: ChunkBlending | None = None
    weights: tuple[float, ...] = ()  # of an ensemble: see `ActionQueue`
    # The policy is not asked with a frame older than this; frames say when they were taken.
    max_frame_age_s: float | None = None
    give_up_after_s: float | None = None  # without an action; None: hold for as long as it takes
    seam: InitVar[ChunkBlending | None] = None  # the earlier name of `blending`

    def __post_init__(self, seam: ChunkBlending | None) -> None:
        if seam is not None:
            warn_renamed("LoopSettings(seam=...)", "blending")
            object.__setattr__(self, "blending", seam)
        if not 0 < self.period_s * (1 + HALF) < self.watchdog_s:
            raise ValueError(
                f"period_s must be above 0 and watchdog_s above {1 + HALF} periods, as a command "
                f"may be {HALF} periods late; {WATCHDOG_PERIODS} periods are advised; "
                f"got period_s={self.period_s:g} and watchdog_s={self.watchdog_s:g}"
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
    answer_s: float | None = None  # 95 of 100 answers took at most this, the frame included


def shortest_period_s(answer_s: float) -> float:
    """Return the shortest period, in steps of 5 ms, within which such an answer is executed."""
    return math.ceil(answer_s / (1 - SEND_SHARE) / 0.005 - 1e-9) * 0.005


def settings_for(answer_s: float) -> LoopSettings:
    """Return settings with the shortest period within which such an answer is executed.

    The deadline is two periods, or the default where that is longer.
    """
    period_s = round(shortest_period_s(answer_s), 3)
    deadline_ms = max(DEADLINE_MS, math.ceil(2000 * period_s))
    watchdog_s = round(WATCHDOG_PERIODS * period_s, 4)
    return LoopSettings(period_s, watchdog_s, ActOptions(deadline_ms=deadline_ms))


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
        clock: Clock | None = None,
    ) -> None:
        self._policy, self._arm, self._rules = policy, arm, rules
        self._settings = ours = settings or LoopSettings()
        self._clock = clock or Clock()
        self._changed = self._clock.condition()  # holds the next eight
        self._queue = ActionQueue(rules, ours.blending, ours.execute, ours.weights)
        self._is_asking = False
        self._is_new_episode = True
        self._is_checked = False  # that rules and policy are of one size
        self._refusal: BaseException | None = None  # what that found
        self._is_stopping = False
        self._working: set[str] = set()  # the threads
        self._filled_at = 0.0  # when the last answer came
        # Each is written by one thread: that of the commands, of the questions, of the watchdog.
        self._status = LoopStatus()
        self._problem: BaseException | None = None
        self._waits_for = NO_ACTION
        self._answers_s: deque[float] = deque(maxlen=_ANSWERS_KEPT)
        self._stalls = 0
        self._causes = Counter[str]()
        self._last: Action | None = None  # what was commanded, after limits
        # When the last command was sent, and when that had been done.
        self._sent_at: float | None = None
        self._commanded_at = self._moved_at = 0.0
        self._is_going_on = False  # the next action is there, or asked for
        self._sending_s: deque[float] = deque([0.0], maxlen=_COMMANDS_KEPT)
        self._is_hold_logged = False
        self._answered = Counter[bool]()  # periods since the first answer, by whether they waited
        self._in_a_row: list[Excess] = []  # the limits of the last moves, if all were limited
        self._is_limit_logged = False
        self._background: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def status(self) -> LoopStatus:
        """How it is going; may be read from any thread."""
        return replace(
            self._status,
            causes=dict(self._causes),
            stalls=self._stalls,
            problem=self._problem,
            answer_s=self._answer_s,
        )

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
        self._stop_soon()
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
        self._start(self._ask_on, "deft-policy")
        is_driven = False
        # No command goes out meanwhile, so the arm waits no longer than it ever does.
        patience_s = min([self._settings.watchdog_s, *self._bounds_s])
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_checked or self._is_stopping, patience_s)
            self._raise_refusal()
            is_driven = True
            self._commanded_at = self._moved_at = self._clock.monotonic()
            self._start(self._watch, "deft-watchdog")
            self._command_all(repeat(None) if num_periods is None else repeat(None, num_periods))
        finally:
            self._stop_soon()
            try:
                if is_driven:
                    self._arm.stop()
            finally:
                with self._changed:
                    self._changed.wait_for(lambda: "deft-watchdog" not in self._working)
                    self._changed.wait_for(lambda: not self._working, LAST_WORDS_S)
                if is_driven:
                    counted = self._answered.total()
                    if ADVISED_AFTER <= counted < REPORTED_AFTER and self._is_often_held:
                        self._report_answers()
                    logger.info("%s", self._summary())

    def _run_apart(self) -> None:
        try:
            self.run()
        except Exception as error:
            logger.exception("the control loop ended")
            self._failure = error

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._changed:
                    self._working.discard(name)
                    self._changed.notify_all()

        with self._changed:
            self._working.add(name)
        self._clock.start(run, name)

    def _stop_soon(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def _is_stopped_within(self, seconds: float) -> bool:
        """Wait, and tell whether the loop is to end."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_stopping, max(seconds, 0.0))

    def _command_all(self, periods: Iterable[None]) -> None:
        period_s, patience_s = self._settings.period_s, self._settings.give_up_after_s
        due_at = self._clock.monotonic()
        for _ in periods:
            if not self._wait_for_action(due_at):
                return
            self._command()
            self._raise_refusal()
            if patience_s is not None and self._clock.monotonic() - self._moved_at > patience_s:
                raise AnswerTimeoutError(
                    f"no action for {patience_s:g} s: {self._problem or 'no answer'}"
                )
            waited_s = (self._sent_at or due_at) - due_at
            if self._is_going_on and waited_s > SEND_SHARE * period_s:
                due_at += waited_s  # this action has a whole period before the next one
            # What was missed is not made up for.
            due_at = max(due_at + period_s, self._clock.monotonic())
            if self._is_stopped_within(due_at - self._clock.monotonic()):
                return

    def _wait_for_action(self, due_at: float) -> bool:
        """Wait for an action until the period ends; False where the loop is to stop."""
        period_s = self._settings.period_s
        with self._changed:
            if self._is_due:
                self._ask()
            if self._sent_at is not None:
                soonest = self._sent_at + HALF * period_s
                if self._is_stopped_within(soonest - self._clock.monotonic()):
                    return False
            latest = min(
                due_at + self._longest_wait_s,
                self._commanded_at + self._settings.watchdog_s - HALF * period_s,
            )
            self._changed.wait_for(
                lambda: self._is_stopping or self._queue or not self._is_asking,
                max(latest - self._clock.monotonic(), 0.0),
            )
            return not self._is_stopping

    @property
    def _longest_wait_s(self) -> float:
        """From a period's beginning until its command must be sent."""
        period_s = self._settings.period_s
        sending_s = max(*self._sending_s, SEND_SHARE * period_s)
        return period_s - min(sending_s, HALF * period_s)

    @property
    def _is_due(self) -> bool:
        """Is it time to ask for actions?

        One that comes alone is commanded first: the answer to an earlier frame would be about a
        period that is over.
        """
        has_single = self._queue.blending is ChunkBlending.SWITCH and self._queue.chunk_length == 1
        return self._queue.is_due and not (has_single and self._queue)

    def _ask(self) -> None:
        """Have the policy asked, unless it is."""
        if not self._is_asking:
            self._is_asking = True
            self._changed.notify_all()

    def _command(self) -> None:
        """Send the next action, as far as the rules allow, or hold."""
        measured = self._measured() if self._last is None else None
        with self._changed:
            self._forget_after_pause()
            action = self._queue.next()
            has_more = bool(self._queue)
            before = measured if self._last is None else self._last
            wanted = self._rules.hold(before) if action is None else action
            command = None if wanted is None else self._rules.limited(wanted, before)
            sent_at = self._clock.monotonic()
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
            self._sent_at, self._commanded_at = sent_at, self._clock.monotonic()
            self._sending_s.append(self._commanded_at - sent_at)
            if self._may_ask_at_once:
                self._ask()
            self._is_going_on = is_moved and (has_more or self._is_asking)
        is_limited = is_moved and bool(np.any(command != action))
        self._note(is_moved)
        if action is not None and is_moved:
            self._note_limits(self._rules.excess(action, before))
        done = self._status
        self._status = LoopStatus(
            moves=done.moves + is_moved,
            holds=done.holds + (not is_moved),
            stops=done.stops + (command is None),
            limited=done.limited + is_limited,
        )

    @property
    def _may_ask_at_once(self) -> bool:
        """Is the next answer asked for now, since it would not fit into the next period?

        A frame from the next period's beginning shows more of what this action did.
        """
        if (
            self._queue
            or self._problem is not None
            or self._queue.blending in (None, ChunkBlending.WAIT)
        ):
            return False
        recent_s = list(self._answers_s)[-_ANSWERS_RECENT:]
        # The first answers are slow for reasons of their own.
        return len(recent_s) * 2 >= _ANSWERS_RECENT and median(recent_s) > self._longest_wait_s

    def _forget_after_pause(self) -> None:
        """Void what was left, where the watchdog stops the arm or the time for it is over."""
        now, period_s = self._clock.monotonic(), self._settings.period_s
        if now - self._commanded_at > self._settings.watchdog_s:
            self._queue.clear()
            self._last = self._rules.hold(self._last)  # it stands now, whatever it did before
        elif self._queue:
            since_s = now - max(self._commanded_at, self._filled_at)
            if since_s > (len(self._queue) + 1) * period_s:
                self._queue.clear()

    def _note(self, is_moved: bool) -> None:
        """Count why the arm holds; log once that it does, and once that it goes on."""
        since_s, problem = self._clock.monotonic() - self._moved_at, self._problem
        cause = self._waits_for if problem is None else type(problem).__name__
        self._note_answers(not is_moved and cause in (NO_FRAME, NO_ANSWER))
        if is_moved:
            if self._is_hold_logged:
                logger.warning("the arm goes on after %.1f s", since_s)
            self._moved_at, self._is_hold_logged = self._clock.monotonic(), False
            return
        self._causes[cause] += 1
        is_long = since_s > LOGGED_AFTER * self._settings.period_s
        if not self._is_hold_logged and (problem is not None or is_long):
            self._is_hold_logged = True
            mistake = None if isinstance(problem, DeftError) else problem
            logger.warning("the arm holds: %s", problem or cause, exc_info=mistake)

    def _note_answers(self, is_waiting: bool) -> None:
        """Count periods since the first answer; report once when there are enough."""
        if not self._answers_s or self._answered.total() >= REPORTED_AFTER:
            return
        self._answered[is_waiting] += 1
        if self._answered.total() == REPORTED_AFTER:
            self._report_answers()

    @property
    def _is_often_held(self) -> bool:
        return self._answered[True] > HELD_SHARE * self._answered.total()

    def _report_answers(self) -> None:
        """Say how long answers take, and which settings would do if the arm is often held."""
        level, advice = logging.INFO, ""
        if self._is_often_held:
            level, advice = logging.WARNING, f"; {self._advice()}"
        logger.log(
            level, "answers take %.0f ms (p95); of %d periods %d were held for want of one%s",
            1000 * (self._answer_s or 0.0), self._answered.total(), self._answered[True], advice,
        )  # fmt: skip

    def _advice(self) -> str:
        """Which settings would be quick enough for the answers."""
        ours, answer_s = self._settings, self._answer_s or 0.0
        period_s = max(shortest_period_s(answer_s), ours.period_s)
        watchdog_s = WATCHDOG_PERIODS * period_s
        changes = [] if period_s == ours.period_s else [f"period_s={period_s:g}"]
        is_cut_short = answer_s > ours.watchdog_s - (1 + HALF) * period_s
        if is_cut_short and (changes or self._queue.blending is ChunkBlending.WAIT):
            changes.append(f"watchdog_s={watchdog_s:g}")
        if not changes:
            return "the period is long enough for 95% of the answers"
        return f"{' with '.join(changes)} would do"

    @property
    def _answer_s(self) -> float | None:
        with self._changed:
            answers_s = list(self._answers_s)
        return float(np.percentile(answers_s, 95)) if answers_s else None

    def _note_limits(self, excess: Excess | None) -> None:
        """Ask once whether the unit is right, where the limits act on every move."""
        self._in_a_row = [] if excess is None else [*self._in_a_row, excess][-LIMITED_AFTER:]
        if self._is_limit_logged or len(self._in_a_row) < LIMITED_AFTER:
            return
        self._is_limit_logged = True
        worst = max(self._in_a_row, key=lambda one: one.ratio)
        logger.warning(
            "%d of %d moves were limited, most by %s: %.3g was wanted in dimension %d, and %.3g is "
            "allowed. Is the unit of the limits that of the policy's actions?",
            LIMITED_AFTER, LIMITED_AFTER, worst.limit, worst.wanted, worst.dimension, worst.allowed,
        )  # fmt: skip

    def _summary(self) -> str:
        """Say in how many periods the arm was held, and why, and how long answers took."""
        done = self.status
        text = f"the arm moved in {done.moves} of {done.moves + done.holds} periods"
        if done.holds:
            causes = ", ".join(f"{count} {cause}" for cause, count in self._causes.most_common())
            text += f" and was held in {done.holds}: {causes}"
        if done.answer_s is not None:
            text += f"; answers took {1000 * done.answer_s:.0f} ms (p95)"
        return text

    def _measured(self) -> Action | None:
        measured = self._arm.position()
        if measured is None:
            return None
        position = np.asarray(measured, np.float64)
        if position.shape != self._rules.motions.shape:
            raise ValueError(
                f"the rules are for {len(self._rules.motions)} dimensions, and the arm's position "
                f"is {list(position.shape)}"
            )
        return self._rules.hold(position) if np.isfinite(position).all() else None

    def _check_policy(self) -> None:
        """Refuse a server that will never answer, and rules of another size than its actions.

        A server that is not there yet is no reason to refuse: the arm holds until it is. Each
        answer is checked as well.
        """
        info = getattr(self._policy, "info", None)
        if info is None:
            return
        try:
            with self._bounded():
                size, wanted = info().action_dim, len(self._rules.motions)
        except _WRONG_SETTINGS:
            raise
        except DeftError:
            return
        if size != wanted:
            raise ValueError(
                f"the rules are for {wanted} dimensions, and the policy answers {size}"
            )

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _bounded(self) -> AbstractContextManager[None]:
        """End a call that has no deadline of its own, so that the policy is asked again in time."""
        if not self._bounds_s:
            return nullcontext()
        return ending_at(self._clock.monotonic() + min(self._bounds_s))

    @property
    def _bounds_s(self) -> list[float]:
        deadline_ms, patience_s = self._settings.options.deadline_ms, self._settings.give_up_after_s
        bounds_s = [] if deadline_ms is None else [deadline_ms / 1000]
        return bounds_s if patience_s is None else [*bounds_s, patience_s]

    def _ask_on(self) -> None:
        """Ask whenever the queue is due."""
        self._waits_for = NO_ANSWER
        try:
            self._check_policy()
        except BaseException as error:  # noqa: BLE001  `run` raises it
            self._refusal = error
        with self._changed:
            self._is_checked = True
            self._changed.notify_all()
        while self._refusal is None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_asking or self._is_stopping)
                if self._is_stopping:
                    return
            asked_at = self._clock.monotonic()
            chunk, problem = None, None
            try:
                chunk = self._answer()
            except BaseException as error:  # noqa: BLE001  even SystemExit: the arm holds, and why
                problem = error
            with self._changed:
                if chunk is not None:
                    self._queue.refill(chunk)
                    self._filled_at = self._clock.monotonic()
                    self._answers_s.append(self._filled_at - asked_at)
                self._problem, self._is_asking = problem, False
                self._waits_for = NO_ACTION
                self._changed.notify_all()

    def _answer(self) -> ActionChunk | None:
        """Return what the policy makes of the newest frame; a new episode is announced first."""
        if self._is_new_episode:
            self._is_new_episode = False
            self._waits_for = NO_ANSWER
            try:
                with self._bounded():
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
        asked_at = self._clock.monotonic()
        chunk = self._policy.act(observation, options)
        self._rules.check(chunk.actions)
        self._check_in_time(self._clock.monotonic() - asked_at)
        return chunk

    def _check_in_time(self, took_s: float) -> None:
        """Refuse what a policy answers after its deadline, as where this process was stopped."""
        deadline_ms = self._settings.options.deadline_ms
        if deadline_ms is not None and took_s > deadline_ms / 1000 + _DEADLINE_SLACK_S:
            raise AnswerTimeoutError(
                f"an answer came after {1000 * took_s:.0f} ms and was not used: the deadline is "
                f"{deadline_ms:g} ms"
            )

    def _check_age(self, observation: Observation) -> None:
        longest_s, taken_s = self._settings.max_frame_age_s, observation.taken_s
        if longest_s is None:
            return
        if taken_s is None:
            raise UnusableValueError("taken_s", "missing; max_frame_age_s goes by it")
        age_s = self._clock.monotonic() - taken_s
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
        while not self._is_stopped_within(self._settings.period_s / 4):
            since_s = self._clock.monotonic() - self._commanded_at
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
