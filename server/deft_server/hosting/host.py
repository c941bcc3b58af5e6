"""The seam behind the scheduler: where a policy lives, and what a server knows of it there.

A thread of this process, a process of its own and replicas elsewhere are the same from here: a
numbered batch goes in, its answers come back on the event loop. A policy keeps nothing of any
robot, so it can be lost and loaded again at any time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
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

    @property
    def num_waiting(self) -> int:
        """How many frames wait for a batch."""

    def policy_loaded(
        self, host: "PolicyHost", policy: HostedPolicy, num_replicas: int = 1
    ) -> None:
        """The policy is loaded and warm, and takes so many batches at a time; may come again."""

    def policy_broken(self, host: "PolicyHost", error: BaseException) -> None:
        """The policy could not be loaded or warmed up; trying again would not help."""

    def policy_lost(self, host: "PolicyHost", reason: str) -> None:
        """The policy is gone, whatever it was doing, and so is the host; another may do better."""

    def batch_finished(self, host: "PolicyHost", number: int, attempts: Attempts) -> None:
        """A batch came back."""


class PolicyHost(Protocol):
    """Where a policy lives. Called on the event loop, but for `stop`."""

    @property
    def is_disposable(self) -> bool:
        """Whether `stop` ends even a policy that hangs, with all that it holds."""

    @property
    def watches_itself(self) -> bool:
        """Whether it ends batches that take too long by itself."""

    def start(self) -> None:
        """Begin to load the policy and warm it; must not wait."""

    def submit(self, number: int, batch: Sequence[ActRequest]) -> None:
        """Have a batch answered, under a number; at most `num_replicas` are given at a time."""

    def stop(self, timeout_s: float) -> bool:
        """Finish the batches in hand, for so long, and end; return whether the policy ended.

        Blocks. Nothing is told to the listener any more.
        """


NewHost = Callable[[Listener], PolicyHost]


@dataclass(frozen=True)
class Elsewhere:
    """Stands for a policy that this process does not load: `new_host` knows where it lives."""

    new_host: NewHost


LoadPolicy = Callable[[], Policy]


@dataclass(frozen=True)
class PolicyRecipe:
    """A function, as `module:name`, and its arguments; call the recipe to load the policy here."""

    function: str
    arguments: tuple[str, ...] = ()

    def __call__(self) -> Policy:
        """Load the policy."""
        module, _, name = self.function.partition(":")
        policy: Policy = getattr(import_module(module), name)(*self.arguments)
        return policy


def load_and_warm(load: LoadPolicy) -> Policy:
    """Load a policy and make it ready to answer."""
    policy = load()
    policy.warm_up()
    return policy
