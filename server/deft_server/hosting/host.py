"""The seam behind the scheduler: where a policy lives, and what a server knows of it there.

A thread of this process and replicas elsewhere are the same from here: a batch goes in, and comes
back with its answers on the event loop. A policy keeps nothing of any robot, so it can be lost and
loaded again at any time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from deft_client.types import ActOptions, Observation, ServerInfo
from deft_policies.base import ActionLimits, LimitedPolicy, Policy, SteppedPolicy, is_immediate
from deft_server.serving.queue import ActBatch

LimitsOf = Callable[[str | None], ActionLimits]


@dataclass(frozen=True, eq=False)
class HostedPolicy:
    """What a server knows of a policy, wherever it lives. Everything here is quick.

    `check` raises `RequestError` for what is known beforehand to have no answer. `limits` tells the
    range of actions under a statistics key that `check` let pass; None where the policy tells none.
    `immediate` is the policy itself where it takes no time and answers on the event loop.
    `is_stepped` tells that frames may join and leave it between rounds.
    """

    info: ServerInfo
    check: Callable[[Observation, ActOptions], None]
    limits: LimitsOf | None = None
    immediate: Policy | None = None
    is_stepped: bool = False

    @staticmethod
    def of(policy: Policy) -> "HostedPolicy":
        """A policy of this process."""
        limits = policy.action_limits if isinstance(policy, LimitedPolicy) else None
        quick = policy if is_immediate(policy) else None
        stepped = isinstance(policy, SteppedPolicy)
        return HostedPolicy(policy.info, policy.check, limits, quick, stepped)


class Listener(Protocol):
    """Who is told, on the event loop, what becomes of a policy and its batches."""

    @property
    def num_batches_waiting(self) -> float:
        """How many batches could be made of the frames that wait."""

    def policy_loaded(
        self, host: "PolicyHost", policy: HostedPolicy, num_replicas: int = 1
    ) -> None:
        """The policy is loaded and warm, and takes so many batches at a time; may come again."""

    def policy_broken(self, host: "PolicyHost", error: BaseException) -> None:
        """The policy could not be loaded or warmed up; trying again would not help."""

    def round_played(self, host: "PolicyHost", ended: Sequence[ActBatch]) -> None:
        """These batches came back from the policy, with their answers."""


class PolicyHost(Protocol):
    """Where a policy lives. Called on the event loop, but for `stop`."""

    @property
    def last_round_s(self) -> float | None:
        """When the last round ended, monotonic; None where hangs are ended elsewhere."""

    def start(self) -> None:
        """Begin to load the policy and warm it; must not wait."""

    def submit(self, batch: ActBatch) -> None:
        """Have a batch answered; no more are given at a time than the queue has places."""

    def stop(self, timeout_s: float) -> bool:
        """Finish the batches in hand, for so long, and end; return whether the policy ended.

        Blocks. Nothing is told to the listener any more.
        """


NewHost = Callable[[Listener], PolicyHost]


@dataclass(frozen=True)
class RemotePolicy:
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
