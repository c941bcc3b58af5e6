"""A policy's rounds: frames join and leave between them, so that a long answer blocks nobody.

A bad frame, or too little memory, does not spoil a round for the others: the frames of a call that
failed are tried again one after the other, in rounds like any other. Runs on the policy's thread,
here or in a replica.
"""

import logging
import time
from collections.abc import Sequence

from deft_policies.base import ActAnswer, Policy, Running, stepped
from deft_policies.errors import DeviceError, RequestError
from deft_server.errors import PolicyFailedError
from deft_server.serving.request import FailedCall, Failure, Outcome, Request

HURRIED_ROUNDS = 3  # in a row at most: answers without a deadline go on, too

logger = logging.getLogger(__name__)


class Rounds:
    """What is on its way through a policy.

    The frames of a call that failed are tried again one after the other. Rounds of the one that is
    tried again take turns with rounds of all others; one that fails there, too, is tried alone. A
    frame that was alone on its way is at fault and is refused.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = stepped(policy)
        self._running: dict[Running, Request] = {}
        self._joining: list[Request] = []  # begin in the next round that is no retry's
        self._retries: list[Request] = []  # wait to be tried again
        self._retried: Running | None = None  # is tried again now, one of those running
        self._is_retrys_round = False
        self._num_hurried = 0  # rounds in a row in which only the hurried ones went on

    @property
    def num_running(self) -> int:
        """How many frames are here."""
        return len(self._running) + len(self._joining) + len(self._retries)

    def play(self, joining: Sequence[Request]) -> tuple[list[Request], list[FailedCall]]:
        """Let frames join, play a round, and return what has ended: answered, or cut.

        Also returns the calls of the policy that failed, if any did.
        """
        now_s = time.perf_counter()
        for request in joining:
            request.joined_s = now_s
        self._joining += joining
        ended, failures = self._play()
        now_s = time.perf_counter()
        for request in ended:
            request.service_s = now_s - request.joined_s
        return ended, failures

    def _play(self) -> tuple[list[Request], list[FailedCall]]:
        ended = self._drop_waiting()
        self._take_turns()
        beginning = self._beginning()
        try:
            self._start(beginning)
        except (Exception, SystemExit) as error:  # noqa: BLE001  callers get the error
            is_alone = len(beginning) == 1
            # Nothing else should be lost, but a policy that fails twice is trusted with nothing.
            is_lost = self._is_retrys_round and not isinstance(error, RequestError)
            return self._failed(ended, beginning, error, is_alone, is_lost)
        over = [row for row, request in self._running.items() if request.is_over()]
        ended += [self._cancel(row) for row in over]
        playing = self._playing()
        try:
            if playing:
                self._policy.step(self._hurried(playing))
        except (Exception, SystemExit) as error:  # noqa: BLE001  as above
            blamed = [self._running[row] for row in playing]
            return self._failed(ended, blamed, error, len(self._running) == 1, is_lost=True)
        failures: list[FailedCall] = []
        for row in [row for row in self._running if row.has_ended]:
            request = self._leave(row)
            failures += _take(row, request)
            ended.append(request)
        return ended, failures

    def _drop_waiting(self) -> list[Request]:
        """Let go of frames that were to begin, where nobody waits for them any more."""
        over = [one for one in (*self._joining, *self._retries) if one.is_over()]
        self._joining = [one for one in self._joining if one not in over]
        self._retries = [one for one in self._retries if one not in over]
        return over

    def _take_turns(self) -> None:
        """Decide whose round it is."""
        has_retry = self._retried is not None or bool(self._retries)
        has_others = bool(self._joining) or len(self._running) > (self._retried is not None)
        is_others_turn = self._is_retrys_round and has_others and not self._must_be_alone()
        self._is_retrys_round = has_retry and not is_others_turn

    def _must_be_alone(self) -> bool:
        """Whether the one to be tried again has failed twice, perhaps for what others did."""
        retried = [] if self._retried is None else [self._running[self._retried]]
        return any(len(one.failures) > 1 for one in (*retried, *self._retries))

    def _beginning(self) -> list[Request]:
        """Take out the frames that begin in this round."""
        if not self._is_retrys_round:
            beginning, self._joining = self._joining, []
        elif self._retried is None:
            first = min(self._retries, key=_urgency)
            self._retries.remove(first)
            beginning = [first]
        else:
            beginning = []
        return beginning

    def _start(self, beginning: Sequence[Request]) -> None:
        if not beginning:
            return
        for request in beginning:
            request.num_tries += 1
        started = self._policy.start([one.ask for one in beginning])
        self._running.update(zip(started, beginning, strict=True))
        if self._is_retrys_round:
            self._retried = started[0]

    def _playing(self) -> list[Running]:
        """Return the answers that this round is for; policies may have others go on, too."""
        if self._is_retrys_round:
            playing = [row for row in self._running if row is self._retried]
        else:
            playing = [row for row in self._running if row is not self._retried]
        for row in playing:
            request = self._running[row]
            request.size = max(request.size, len(playing))
        return playing

    def _hurried(self, playing: list[Running]) -> list[Running]:
        """Actions with a deadline go on alone, but for every fourth round."""
        if self._is_retrys_round:
            return playing
        hurried = [row for row in playing if self._running[row].is_hurried]
        if not hurried or len(hurried) == len(playing) or self._num_hurried == HURRIED_ROUNDS:
            self._num_hurried = 0
            return playing
        self._num_hurried += 1
        return hurried

    def _cancel(self, row: Running) -> Request:
        try:
            self._policy.cancel(row)
        except (Exception, SystemExit):  # the rounds of others go on all the same
            logger.exception("the policy could not let go of an answer")
        return self._leave(row)

    def _leave(self, row: Running) -> Request:
        if row is self._retried:
            self._retried = None
        return self._running.pop(row)

    def _failed(
        self,
        ended: list[Request],
        blamed: Sequence[Request],
        error: BaseException,
        is_alone: bool,
        is_lost: bool,
    ) -> tuple[list[Request], list[FailedCall]]:
        """Refuse whose fault it was that a call failed, and have the others tried again.

        With `is_lost` nothing is on its way any more.
        """
        outcome, failure = failure_of(error, len(blamed))
        lost = [row for row, request in self._running.items() if is_lost or request in blamed]
        for request in dict.fromkeys((*blamed, *map(self._cancel, lost))):
            if request in blamed:
                request.failures.append(failure)
                if is_alone and (failure != "device" or len(request.failures) > 1):
                    request.outcome = outcome
                    ended.append(request)
                    continue
            self._retries.append(request)
        return ended, [FailedCall(failure, len(blamed), self._is_retrys_round)]


def _urgency(request: Request) -> tuple[bool, bool, float]:
    """The order in which frames are tried again; the least comes first."""
    return len(request.failures) < 2, request.is_text, request.deadline_s


def _take(row: Running, request: Request) -> list[FailedCall]:
    """Note what became of a frame; return why there is no answer, if there is none."""
    error: Exception | None = row.error
    if error is None and not isinstance(row.answer, ActAnswer):
        kind = type(row.answer).__name__
        error = PolicyFailedError(f"the policy answered with {kind}; ActAnswer was expected")
    if error is None:
        request.outcome = row.answer
        return []
    request.outcome, failure = failure_of(error, 1)
    request.failures.append(failure)
    return [FailedCall(failure, 1)]


def failure_of(error: BaseException, size: int) -> tuple[Outcome, Failure]:
    """Return what callers hear where the policy raised on so many frames, and of what kind."""
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
