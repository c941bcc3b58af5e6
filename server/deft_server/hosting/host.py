"""The seam behind the scheduler: where a policy lives, and what a server knows of it there.

A thread of this process, a process of its own and a replica elsewhere are the same from here: one
batch at a time goes in, its answers come back on the event loop. A policy keeps nothing of any
robot, so it can be lost and loaded again at any time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deft_client.types import ActOptions, Observation, ServerInfo
from deft_policies.base import ActionLimits, ActRequest, LimitedPolicy, Policy, is_immediate
from deft_server.hosting.attempts import Attempts, answer_batch

LimitsOf = Callable[[str | None], ActionLimits]


@dataclass(frozen=True, eq=False)
class HostedPolicy:
    """What a server knows of a policy, wherever it lives. Everything here is quick.

    `check` raises `RequestError` for what is known beforehand to have no answer. `limits` tells the
    range of actions under a statistics key that `check` let pass; None where the policy tells none.
    `answer_here` answers a batch at once, on the event loop; None where that would take time.
    """

    info: ServerInfo
    check: Callable[[Observation, ActOptions], None]
    limits: LimitsOf | None = None
    answer_here: Callable[[Sequence[ActRequest]], Attempts] | None = None

    @staticmethod
    def of(policy: Policy) -> "HostedPolicy":
        """A policy of this process."""
        limits = policy.action_limits if isinstance(policy, LimitedPolicy) else None

        def answer_here(batch: Sequence[ActRequest]) -> Attempts:
            return answer_batch(policy, batch)

        quick = answer_here if is_immediate(policy) else None
        return HostedPolicy(policy.info, policy.check, limits, quick)


class Listener(Protocol):
    """Who is told, on the event loop, what becomes of a policy and its batches."""

    def policy_loaded(self, host: "PolicyHost", policy: HostedPolicy) -> None:
        """The policy is loaded and warm."""

    def policy_broken(self, host: "PolicyHost", error: BaseException) -> None:
        """The policy could not be loaded or warmed up; trying again would not help."""

    def policy_lost(self, host: "PolicyHost", reason: str) -> None:
        """The policy is gone, whatever it was doing, and so is the host; another may do better."""

    def batch_finished(self, host: "PolicyHost", attempts: Attempts) -> None:
        """A batch came back."""


class PolicyHost(Protocol):
    """Where a policy lives. Called on the event loop, but for `stop`."""

    @property
    def is_disposable(self) -> bool:
        """Whether `stop` ends even a policy that hangs, with all that it holds."""

    def start(self) -> None:
        """Begin to load the policy and warm it; must not wait."""

    def submit(self, batch: Sequence[ActRequest]) -> None:
        """Have a batch answered; the next one may come when this one is finished."""

    def stop(self, timeout_s: float) -> bool:
        """Finish the batch in hand, for so long, and end; return whether the policy ended.

        Blocks. Nothing is told to the listener any more.
        """


NewHost = Callable[[Listener], PolicyHost]
