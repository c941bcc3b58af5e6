"""What the server needs from a policy, and nothing more."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deft_core.types import ActionChunk, ActOptions, Observation, ServerInfo
from deft_policies.errors import NoActionError, PolicyError
from deft_policies.memory import SessionMemory


class Verdict(Enum):
    """What a finding means for serving."""

    GOOD = "ok"
    DOUBTFUL = "warning"  # it works, but perhaps not as wanted
    BAD = "error"  # it will not work


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; the text says what was found and, if need be, the fix."""

    subject: str
    verdict: Verdict
    text: str


OnActions = Callable[[NDArray[np.float64]], object]


@dataclass(frozen=True)
class ActRequest:
    """One observation to answer, with the memory of the robot it came from.

    A policy that writes its actions one after the other calls `on_actions`, on its thread, with
    those that are final so far [step, action_dim]; the answer has them all.
    """

    observation: Observation
    memory: SessionMemory = field(default_factory=SessionMemory)
    options: ActOptions = field(default_factory=ActOptions)
    on_actions: OnActions | None = None


@dataclass(frozen=True, eq=False)
class ActAnswer:
    """The actions for one observation, and what to hand in with the robot's next one.

    With an `error` the chunk has no step: its text and its trace say what was answered instead.
    """

    chunk: ActionChunk
    memory: SessionMemory = field(default_factory=SessionMemory)
    error: NoActionError | None = None


@dataclass(eq=False)
class Running:
    """An observation on its way through a policy; once it has ended, an answer or an error."""

    request: ActRequest
    answer: ActAnswer | None = field(default=None, init=False)
    error: PolicyError | None = field(default=None, init=False)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is to come."""
        return self.answer is not None or self.error is not None


class Policy(Protocol):
    """Maps observations to the actions that follow them. Keeps nothing of any robot.

    `check` may be called from any thread; `act` and `warm_up` only from the one policy thread.
    """

    @property
    def info(self) -> ServerInfo:
        """What this policy is and which options it takes."""

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Raise `RequestError` for what `act` could not answer; cheap, touches no model."""

    def warm_up(self) -> None:
        """Do once what would make the first answer slow, and try whether answers can be trusted.

        Raises `PolicyError` where they cannot: nothing may be served then.
        """

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        """Answer a batch, in order. Blocking.

        Where it raises, the server may try the frames again, in smaller batches; `DeviceError`
        means that a smaller batch might do.
        """


@runtime_checkable
class SteppedPolicy(Protocol):
    """A policy that can also be played round by round, so that a long answer blocks nobody.

    Like `act`, on the policy thread alone; `act` is this loop. Where `start` raises, nothing has
    been taken in; where `step` raises, nothing is on its way any more.
    """

    def start(self, batch: Sequence[ActRequest]) -> Sequence[Running]:
        """Take in observations, in order; they are answered by the next steps."""

    def step(self, first: Collection[Running] = ()) -> Sequence[Running]:
        """Play one round of all that is on its way; returns what has ended.

        Where `first` names some, the others may sit this round out.
        An answer's timings are those of all rounds since its start, its trace tells the passes.
        """

    def cancel(self, running: Running) -> None:
        """Let go of one between two steps; nothing where it has ended."""


class OneCall:
    """A policy that answers a batch in one call, played in rounds: each ends what has joined."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._joined: list[Running] = []

    def start(self, batch: Sequence[ActRequest]) -> Sequence[Running]:
        """Have observations wait for the next step."""
        started = [Running(one) for one in batch]
        self._joined += started
        return started

    def step(self, first: Collection[Running] = ()) -> Sequence[Running]:
        """Answer all that has joined."""
        joined, self._joined = self._joined, []
        answers = self._policy.act([one.request for one in joined])
        for one, answer in zip(joined, answers, strict=True):
            one.answer = answer
        return joined

    def cancel(self, running: Running) -> None:
        """Let go of one that has joined."""
        self._joined = [one for one in self._joined if one is not running]


def stepped(policy: Policy) -> SteppedPolicy:
    """Return a policy as one that is played round by round, which it may be already."""
    return policy if isinstance(policy, SteppedPolicy) else OneCall(policy)


@dataclass(frozen=True, eq=False)
class ActionLimits:
    """What any action of a robot must look like, so that a server can refuse one that does not.

    Where the policy `may_exceed` the range, an answer beyond it is no sign of a fault.
    """

    low: NDArray[np.float64]  # [action_dim]
    high: NDArray[np.float64]  # [action_dim]
    may_exceed: bool = False


@runtime_checkable
class LimitedPolicy(Protocol):
    """A policy that knows the range of its actions; may be called from any thread."""

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        """Return the limits under a statistics key that `check` let pass; None is the default."""
