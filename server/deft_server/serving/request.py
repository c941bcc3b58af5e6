"""A frame from its admission to its answer, in one value.

The queue notes its progress in it, the policy's rounds what became of it. Nobody else holds the
answer: the scheduler passes it on to whoever waits.
"""

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from deft_core.types import ActOptions, Observation
from deft_policies.base import ActAnswer, ActRequest, OnActions
from deft_server.serving.sessions import RobotSession

if TYPE_CHECKING:
    from deft_server.serving.hosting import HostedPolicy

# Why a call of the policy did not answer; "lost" means that the replica did not come back.
Failure = Literal["raised", "device", "request", "lost"]
Outcome = ActAnswer | Exception


@dataclass(frozen=True)
class FailedCall:
    """A call of the policy that failed."""

    kind: Failure
    size: int  # how many frames it was for
    is_retry: bool = False  # of a frame whose first call had failed


@dataclass(eq=False, slots=True)
class Request:
    """One observation on its way; complete when it is made.

    Times are seconds on the monotonic clock.
    """

    observation: Observation
    options: ActOptions  # as the policy is asked: with a trace where somebody watches
    session: RobotSession
    arrived_s: float
    deadline_s: float = math.inf
    flow: str = ""  # a session, or all frames of a caller that name none
    owner: str = ""  # whose share it takes
    stays_until_s: float | None = None  # may overfill the queue, and is refused then
    is_text: bool = False  # the answer is a text and an action, which takes many rounds
    on_actions: OnActions | None = None  # who wants them as they are committed
    is_given_up: bool = False  # nobody waits for the answer any more
    # The queue notes:
    due_s: float = 0.0  # the deadline, or when a frame without one has waited long enough
    started_s: float = 0.0
    num_at_start: int = 0  # how many frames of its kind, itself among them, then shared the rounds
    queue_s: float = 0.0  # how long it waited, once it is answered
    # The policy's rounds note:
    outcome: Outcome | None = None  # None where it was cut
    joined_s: float = 0.0  # by time.perf_counter, where the policy is
    service_s: float = 0.0
    size: int = 0  # the most frames that were answered together, this one among them
    num_tries: int = 0  # how often it began
    failures: list[Failure] = field(default_factory=list)  # of calls, perhaps because of it
    replica: str = "0"  # who answered, where there are several
    answered_by: "HostedPolicy | None" = None  # where replicas may have another than the server

    @property
    def ask(self) -> ActRequest:
        """What the policy is asked, with the session's memory as it is now.

        Read it when the frame goes to the policy: the frame before it may change the memory.
        """
        return ActRequest(self.observation, self.session.memory, self.options, self.on_actions)

    @property
    def is_session(self) -> bool:
        """Whether it belongs to a named session, which has one frame at a time with the policy."""
        return self.session.session_id is not None

    @property
    def has_deadline(self) -> bool:
        """Whether the caller said when the answer is of no more use."""
        return self.deadline_s < math.inf

    @property
    def is_hurried(self) -> bool:
        """Whether it goes on while texts, and frames without a deadline, sit a round out."""
        return self.has_deadline and not self.is_text

    @property
    def timing_key(self) -> str:
        """The name of the frames that take as long as this one: those of its flow and kind."""
        return f"{self.flow} text" if self.is_text else self.flow

    def is_over(self) -> bool:
        """Whether an answer would be of no use any more. May be asked on any thread."""
        return self.is_given_up or self.deadline_s <= time.monotonic()
