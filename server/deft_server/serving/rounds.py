"""A policy's rounds: frames join and leave between them, so that a long answer blocks nobody.

A bad frame, or too little memory, does not spoil a round for the others: each is answered once
more alone. Runs on the policy's thread, here or in a replica.
"""

import logging
import time
from collections.abc import Sequence

from deft_policies.base import ActAnswer, Policy, Running, stepped
from deft_policies.errors import DeviceError, RequestError
from deft_server.errors import PolicyFailedError
from deft_server.serving.request import Failure, Outcome, Request

HURRIED_ROUNDS = 3  # in a row at most: answers without a deadline go on, too

logger = logging.getLogger(__name__)


class Rounds:
    """What is on its way through a policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = stepped(policy)
        self._running: dict[Running, Request] = {}
        self._num_hurried = 0  # rounds in a row in which only the hurried ones went on

    @property
    def num_running(self) -> int:
        """How many answers are on their way."""
        return len(self._running)

    def play(self, joining: Sequence[Request]) -> tuple[list[Request], list[Failure]]:
        """Let frames join, play a round, and return what has ended: answered, or cut.

        Also returns why calls of the policy failed, if any did.
        """
        now_s = time.perf_counter()
        for request in joining:
            request.joined_s = now_s
        ended, failures = self._step(joining)
        now_s = time.perf_counter()
        for request in ended:
            request.service_s = now_s - request.joined_s
        return ended, failures

    def _step(self, joining: Sequence[Request]) -> tuple[list[Request], list[Failure]]:
        touched, running = list(joining), self._running
        try:
            if joining:
                started = self._policy.start([one.ask for one in joining])
                running.update(zip(started, joining, strict=True))
            touched = list(running.values())
            ended = self._cut()
            for request in running.values():
                request.size = max(request.size, len(running))
            if running:
                self._policy.step(self._first())
        except (Exception, SystemExit) as error:  # noqa: BLE001  callers get the error
            return self._try_again(touched, error)
        failures: list[Failure] = []
        for row in [row for row in running if row.has_ended]:
            request = running.pop(row)
            failures += _take(row, request)
            ended.append(request)
        return ended, failures

    def _first(self) -> list[Running]:
        """Actions with a deadline go on alone, but for every fourth round."""
        hurried = [row for row, request in self._running.items()
                   if request.has_deadline and not request.is_text]  # fmt: skip
        if len(hurried) == len(self._running) or self._num_hurried == HURRIED_ROUNDS:
            hurried = []
        self._num_hurried = self._num_hurried + 1 if hurried else 0
        return hurried

    def _cut(self) -> list[Request]:
        """Let go of what nobody waits for any more; it has no outcome."""
        over = [row for row, request in self._running.items() if request.is_over()]
        for row in over:
            self._policy.cancel(row)
        return [self._running.pop(row) for row in over]

    def _try_again(
        self, touched: list[Request], error: BaseException
    ) -> tuple[list[Request], list[Failure]]:
        """Answer each frame of a call that failed once more alone, so that only the culprit fails.

        One that was alone fails at once, unless it was for lack of memory.
        """
        for row in [row for row, request in self._running.items() if request in touched]:
            del self._running[row]
        refusal, failure = failure_of(error, len(touched))
        failures = [failure]
        if len(touched) > 1 or failure == "device":
            failures += self._answer_alone(touched)
        lost: list[Request] = []
        if set(failures[1:]) - {"request"}:  # then nothing is on its way any more
            lost = list(self._running.values())
            for row in self._running:
                self._policy.cancel(row)
            self._running.clear()
            failures += self._answer_alone(lost)
        for request in (*touched, *lost):
            request.outcome = request.outcome or refusal
        return [*touched, *lost], failures

    def _answer_alone(self, requests: Sequence[Request]) -> list[Failure]:
        """Answer each without the others, if somebody waits for it; return what failed."""
        failures: list[Failure] = []
        for request in requests:
            if request.is_over():
                continue
            try:
                (row,) = self._policy.start([request.ask])
                while not row.has_ended:
                    self._policy.step([row])
                failures += _take(row, request)
            except (Exception, SystemExit) as error:  # noqa: BLE001  as above
                request.outcome, failure = failure_of(error, 1)
                failures.append(failure)
        return failures


def _take(row: Running, request: Request) -> list[Failure]:
    """Note what became of a frame; return why there is no answer, if there is none."""
    error: Exception | None = row.error
    if error is None and not isinstance(row.answer, ActAnswer):
        kind = type(row.answer).__name__
        error = PolicyFailedError(f"the policy answered with {kind}; ActAnswer was expected")
    if error is None:
        request.outcome = row.answer
        return []
    request.outcome, failure = failure_of(error, 1)
    return [failure]


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
