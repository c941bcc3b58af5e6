"""One batch through a policy: a bad frame, or too little memory, does not spoil it for the others.

Called wherever the policy lives. Knows nothing of threads, processes or queues.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from deft_policies.base import ActAnswer, ActRequest, Policy
from deft_policies.errors import DeviceError, RequestError
from deft_server.errors import PolicyFailedError

logger = logging.getLogger(__name__)

Answer = ActAnswer | Exception


class Failure(Enum):
    """Why a call of the policy did not answer its batch."""

    RAISED = "raised"
    DEVICE = "device"
    REQUEST = "request"
    LOST = "lost"  # the replica did not come back


@dataclass
class Attempts:
    """The answers of one batch, in order, what went wrong on the way, and the seconds it took.

    `replica` is who answered, where there are several.
    """

    answers: list[Answer]
    failures: list[Failure]
    service_s: float
    replica: str = "0"


def answer_batch(policy: Policy, batch: Sequence[ActRequest]) -> Attempts:
    """Answer a batch, or as much of it as the policy can.

    Where the device gives up (out of memory), each half of the batch is tried once more. Where the
    policy raises, every frame of several is tried once more alone, so that only the culprit fails.
    """
    started_s = time.perf_counter()
    failures: list[Failure] = []
    answers = _call(policy, batch, failures)
    if failures == [Failure.DEVICE]:
        middle = (len(batch) + 1) // 2
        answers = _call(policy, batch[:middle], failures)
        if batch[middle:]:
            answers += _call(policy, batch[middle:], failures)
    elif failures and len(batch) > 1:
        answers = [_call(policy, [one], failures)[0] for one in batch]
    return Attempts(answers, failures, time.perf_counter() - started_s)


def _call(policy: Policy, batch: Sequence[ActRequest], failures: list[Failure]) -> list[Answer]:
    """Return the policy's answers, or its failure once for every frame."""
    try:
        answers = policy.act(batch)
        strange = [type(one).__name__ for one in answers if not isinstance(one, ActAnswer)]
        if len(answers) == len(batch) and not strange:
            return list(answers)
        error: Exception = PolicyFailedError(
            f"the policy answered with {strange[0]}; ActAnswer was expected"
            if strange
            else f"{len(answers)} answers to {len(batch)} frames"
        )
        failures.append(Failure.RAISED)
    except DeviceError as device_error:
        logger.warning("the device gave up on a batch of %d: %s", len(batch), device_error)
        failures.append(Failure.DEVICE)
        error = device_error
    except RequestError as request_error:
        failures.append(Failure.REQUEST)
        error = request_error
    except (Exception, SystemExit) as unexpected:
        logger.exception("the policy raised on a batch of %d", len(batch))
        failures.append(Failure.RAISED)
        error = PolicyFailedError(f"the policy raised {type(unexpected).__name__}")
        error.__cause__ = unexpected
    return [error] * len(batch)
