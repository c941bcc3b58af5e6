"""A policy's rounds: frames join and leave between them, so that a long answer blocks nobody.

A bad frame, or too little memory, does not spoil a round for the others: the frames of a call that
failed are tried again one after the other, in rounds like any other. Runs on the policy's thread,
here or in a replica.
"""

import logging
import time
from collections.abc import Sequence

from deft_policies.base import Policy, PolicyAnswer, Running
from deft_policies.errors import DeviceError, RequestError
from deft_server.errors import PolicyFailedError
from deft_server.serving.frame import FailedCall, Failure, Outcome, QueuedFrame

MAX_PRIORITY_ROUNDS = 3  # in a row for actions with a deadline alone

logger = logging.getLogger(__name__)


class Rounds:
    """The frames that a policy answers now.

    The frames of a call that failed are tried again one after the other. Rounds of the one that is
    tried again take turns with rounds of all others; one that fails there, too, is tried alone. A
    frame that was alone on its way is at fault and is refused.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._running: dict[Running, QueuedFrame] = {}
        self._joining: list[QueuedFrame] = []  # start in the next round that is no retry's
        self._retries: list[QueuedFrame] = []  # wait to be tried again
        self._retried: Running | None = None  # the running one that is tried again
        self._is_retry_round = False
        self._num_priority_rounds = 0  # in a row

    @property
    def num_running(self) -> int:
        """How many frames are here."""
        return len(self._running) + len(self._joining) + len(self._retries)

    def play(self, joining: Sequence[QueuedFrame]) -> tuple[list[QueuedFrame], list[FailedCall]]:
        """Let frames join, step the policy, and return the frames that ended: answered, or cut.

        A step is up to two rounds of the engine: one for running answers, one for those that join.
        Also returns the calls of the policy that failed, if any did.
        """
        now_s = time.perf_counter()
        for frame in joining:
            frame.joined_s = now_s
        self._joining += joining
        ended, failures = self._play()
        now_s = time.perf_counter()
        for frame in ended:
            frame.service_s = now_s - frame.joined_s
        return ended, failures

    def _play(self) -> tuple[list[QueuedFrame], list[FailedCall]]:
        ended = self._drop_cancelled()
        self._choose_turn()
        beginning = self._pop_beginning()
        try:
            self._start(beginning)
        except (Exception, SystemExit) as error:  # noqa: BLE001  callers get the error
            is_alone = len(beginning) == 1
            # Nothing else should be lost, but a policy that fails twice is trusted with nothing.
            is_lost = self._is_retry_round and not isinstance(error, RequestError)
            return self._retry_or_refuse(ended, beginning, error, is_alone, is_lost)
        over = [running for running, frame in self._running.items() if frame.is_over()]
        ended += [self._cancel(running) for running in over]
        playing = self._requests_in_turn()
        try:
            if playing:
                self._policy.step(self._requests_to_step(playing))
        except (Exception, SystemExit) as error:  # noqa: BLE001  as above
            blamed = [self._running[running] for running in playing]
            return self._retry_or_refuse(
                ended, blamed, error, len(self._running) == 1, is_lost=True
            )
        failures: list[FailedCall] = []
        for running in [running for running in self._running if running.has_ended]:
            frame = self._release(running)
            failures += _record_outcome(running, frame)
            ended.append(frame)
        return ended, failures

    def _drop_cancelled(self) -> list[QueuedFrame]:
        """Drop frames that were cancelled or are late before they started."""
        over = [one for one in (*self._joining, *self._retries) if one.is_over()]
        self._joining = [one for one in self._joining if one not in over]
        self._retries = [one for one in self._retries if one not in over]
        return over

    def _choose_turn(self) -> None:
        """Decide whether this round is for the retry or for all others."""
        has_retry = self._retried is not None or bool(self._retries)
        has_others = bool(self._joining) or len(self._running) > (self._retried is not None)
        is_others_turn = self._is_retry_round and has_others and not self._retry_must_run_alone()
        self._is_retry_round = has_retry and not is_others_turn

    def _retry_must_run_alone(self) -> bool:
        """Whether a retry has failed once more, perhaps because of others beside it."""
        retried = [] if self._retried is None else [self._running[self._retried]]
        return any(len(one.failures) > 1 for one in (*retried, *self._retries))

    def _pop_beginning(self) -> list[QueuedFrame]:
        """Take out the frames that start in this round."""
        if not self._is_retry_round:
            beginning, self._joining = self._joining, []
        elif self._retried is None:
            first = min(self._retries, key=_retry_order)
            self._retries.remove(first)
            beginning = [first]
        else:
            beginning = []
        return beginning

    def _start(self, beginning: Sequence[QueuedFrame]) -> None:
        if not beginning:
            return
        for frame in beginning:
            frame.num_tries += 1
        started = self._policy.start([one.policy_request for one in beginning])
        self._running.update(zip(started, beginning, strict=True))
        if self._is_retry_round:
            self._retried = started[0]

    def _requests_in_turn(self) -> list[Running]:
        """Return the requests of this round; a policy may step others, too."""
        if self._is_retry_round:
            playing = [running for running in self._running if running is self._retried]
        else:
            playing = [running for running in self._running if running is not self._retried]
        for running in playing:
            frame = self._running[running]
            frame.batch_size = max(frame.batch_size, len(playing))
        return playing

    def _requests_to_step(self, playing: list[Running]) -> list[Running]:
        """Return all of these in every fourth round, else only actions with a deadline, if any."""
        if self._is_retry_round:
            return playing
        first = [running for running in playing if self._running[running].has_priority]
        is_round_for_all = self._num_priority_rounds == MAX_PRIORITY_ROUNDS
        if not first or len(first) == len(playing) or is_round_for_all:
            self._num_priority_rounds = 0
            return playing
        self._num_priority_rounds += 1
        return first

    def _cancel(self, running: Running) -> QueuedFrame:
        try:
            self._policy.cancel(running)
        except (Exception, SystemExit):  # the rounds of others go on all the same
            logger.exception("the policy could not let go of an answer")
        return self._release(running)

    def _release(self, running: Running) -> QueuedFrame:
        if running is self._retried:
            self._retried = None
        return self._running.pop(running)

    def _retry_or_refuse(
        self,
        ended: list[QueuedFrame],
        blamed: Sequence[QueuedFrame],
        error: BaseException,
        is_alone: bool,
        is_lost: bool,
    ) -> tuple[list[QueuedFrame], list[FailedCall]]:
        """Refuse the frame that made a call fail, and queue the others for a retry.

        With `is_lost` every running request is cancelled, too.
        """
        outcome, failure = failure_of(error, len(blamed))
        lost = [running for running, frame in self._running.items() if is_lost or frame in blamed]
        for frame in dict.fromkeys((*blamed, *map(self._cancel, lost))):
            if frame in blamed:
                frame.failures.append(failure)
                if is_alone and (failure != "device" or len(frame.failures) > 1):
                    frame.outcome = outcome
                    ended.append(frame)
                    continue
            self._retries.append(frame)
        return ended, [FailedCall(failure, len(blamed), self._is_retry_round)]


def _retry_order(frame: QueuedFrame) -> tuple[bool, bool, float]:
    """Order retries: the least comes first."""
    return len(frame.failures) < 2, frame.is_text, frame.deadline_s


def _record_outcome(running: Running, frame: QueuedFrame) -> list[FailedCall]:
    """Store a request's answer or error in its frame; return the failure, if any."""
    error: Exception | None = running.error
    if error is None and not isinstance(running.answer, PolicyAnswer):
        kind = type(running.answer).__name__
        error = PolicyFailedError(f"the policy answered with {kind}; PolicyAnswer was expected")
    if error is None:
        frame.outcome = running.answer
        return []
    frame.outcome, failure = failure_of(error, 1)
    frame.failures.append(failure)
    return [FailedCall(failure, 1)]


def failure_of(error: BaseException, size: int) -> tuple[Outcome, Failure]:
    """Return the error for callers, and its kind, where the policy raised on so many frames."""
    if isinstance(error, RequestError):
        return error, "request"
    if isinstance(error, DeviceError):
        logger.warning("the device gave up on a batch of %d: %s", size, error)
        return error, "device"
    logger.error("the policy raised on a batch of %d", size, exc_info=error)
    if isinstance(error, PolicyFailedError):
        return error, "raised"
    refusal = PolicyFailedError(f"the policy raised {type(error).__name__}")
    refusal.__cause__ = error
    return refusal, "raised"
