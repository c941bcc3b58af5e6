"""A frame from its arrival to its answer, in one value.

The service makes it, the queue and the policy's rounds fill it in, and the scheduler delivers its
outcome to the caller that waits.
"""

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from deft_core.types import ActOptions, Observation
from deft_policies.base import OnActions, PolicyAnswer, PolicyRequest
from deft_server.serving.sessions import RobotSession

if TYPE_CHECKING:
    from deft_server.serving.hosting import HostedPolicy

# Why a call of the policy did not answer; "lost" means that the replica did not come back.
Failure = Literal["raised", "device", "request", "lost"]
Outcome = PolicyAnswer | Exception


@dataclass(frozen=True)
class FailedCall:
    """A call of the policy that failed."""

    kind: Failure
    batch_size: int  # how many frames it was for
    is_retry: bool = False  # of a frame whose first call had failed


@dataclass(eq=False, slots=True)
class QueuedFrame:
    """One observation that is to be answered.

    Times are seconds on the monotonic clock.
    """

    observation: Observation
    options: ActOptions  # for the policy: with a trace if somebody listens to the `EventBus` for it
    session: RobotSession
    arrived_s: float
    deadline_s: float = math.inf
    flow: str = ""  # a session, or all frames of a caller that name none
    owner: str = ""  # an API key, or an address: owners take turns
    overfills_until_s: float | None = None  # may overfill the queue until then
    is_text: bool = False  # the answer is a text and an action, which takes many rounds
    on_actions: OnActions | None = None  # called with actions as they are committed
    is_cancelled: bool = False  # the caller no longer waits: it was answered, or has left
    # Set by the queue:
    queued_s: float = 0.0  # when it began to wait: after it was read and decoded
    due_s: float = 0.0  # the deadline, or when a frame without one has waited long enough
    started_s: float = 0.0
    done_s: float = 0.0  # how much of it is done, in seconds that it would have taken alone
    concurrency_s: float = 0.0  # the number of frames in its rounds, integrated over time
    queue_s: float = 0.0  # waiting time, set when it is answered
    # Set by the policy's rounds:
    outcome: Outcome | None = None  # None where it was cut
    joined_s: float = 0.0  # by time.perf_counter, where the policy is
    service_s: float = 0.0
    batch_size: int = 0  # the most frames that were answered together, this one among them
    num_tries: int = 0  # how often it was started
    failures: list[Failure] = field(default_factory=list)  # of calls, perhaps because of it
    replica: str = "0"  # which one answered
    answered_by: "HostedPolicy | None" = None  # a replica may serve another than the front

    @property
    def policy_request(self) -> PolicyRequest:
        """The request to the policy, with the session's memory as it is now.

        Read it when the frame goes to the policy: the frame before it may change the memory.
        """
        return PolicyRequest(self.observation, self.session.memory, self.options, self.on_actions)

    @property
    def is_session(self) -> bool:
        """Whether it belongs to a named session, which has one frame at a time with the policy."""
        return self.session.session_id is not None

    @property
    def has_deadline(self) -> bool:
        """Whether the caller set a deadline."""
        return self.deadline_s < math.inf

    @property
    def has_priority(self) -> bool:
        """Whether most rounds are for such frames alone: actions with a deadline."""
        return self.has_deadline and not self.is_text

    @property
    def timing_key(self) -> str:
        """Frames with the same key take about the same time: those of a flow and kind."""
        return f"{self.flow} text" if self.is_text else self.flow

    def is_over(self) -> bool:
        """Whether it was cancelled or its deadline has passed. For any thread."""
        return self.is_cancelled or self.deadline_s <= time.monotonic()
