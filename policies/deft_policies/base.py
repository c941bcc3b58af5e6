"""What a policy is: the one interface behind the server, the commands and the benchmarks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

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
class PolicyRequest:
    """One observation to answer, with the memory of the robot it came from.

    A policy that writes its actions one after the other calls `on_actions`, on its thread, with
    those that are final so far [step, action_dim]; the answer has them all.
    """

    observation: Observation
    memory: SessionMemory = field(default_factory=SessionMemory)
    options: ActOptions = field(default_factory=ActOptions)
    on_actions: OnActions | None = None


@dataclass(frozen=True, eq=False)
class PolicyAnswer:
    """The actions for one observation, and what to hand in with the robot's next one.

    With an `error` the chunk has no step: its text and its trace say what was answered instead.
    """

    chunk: ActionChunk
    memory: SessionMemory = field(default_factory=SessionMemory)
    error: NoActionError | None = None


@dataclass(eq=False)
class Running:
    """A request that a policy has started; once it has ended, an answer or an error."""

    request: PolicyRequest
    answer: PolicyAnswer | None = field(default=None, init=False)
    error: PolicyError | None = field(default=None, init=False)

    @property
    def has_ended(self) -> bool:
        """Whether the answer, or the error, is there."""
        return self.answer is not None or self.error is not None


@dataclass(frozen=True, eq=False)
class ActionLimits:
    """What any action of a robot must look like, so that a server can refuse one that does not.

    Where the policy `may_exceed` the range, an answer beyond it is no sign of a fault.
    """

    low: NDArray[np.float64]  # [action_dim]
    high: NDArray[np.float64]  # [action_dim]
    may_exceed: bool = False


class Policy(ABC):
    """Maps observations to the actions that follow them. Keeps nothing of any robot.

    `start` takes requests in, and each `step` advances them by a round, so that a long answer
    blocks no other. `info`, `check` and `action_limits` may be called from any thread; everything
    else only from the one policy thread.
    """

    joins_midway = True  # whether requests may start while others run

    @property
    @abstractmethod
    def info(self) -> ServerInfo:
        """What this policy is and which options it takes."""

    @abstractmethod
    def check(self, observation: Observation, options: ActOptions) -> None:
        """Raise `RequestError` for what could not be answered; cheap, touches no model."""

    def action_limits(self, statistics_key: str | None) -> ActionLimits | None:
        """The range of actions under a statistics key that `check` let pass, if it is known.

        None is the default key.
        """
        return None

    @abstractmethod
    def warm_up(self) -> None:
        """Do once what would make the first answer slow, and try whether answers can be trusted.

        Raises `PolicyError` where they cannot: nothing may be served then.
        """

    @abstractmethod
    def start(self, batch: Sequence[PolicyRequest]) -> Sequence[Running]:
        """Start requests, in order; the next steps answer them. Where it raises, none has started.

        The server may try them again, in smaller batches; `DeviceError` means that a smaller batch
        might do.
        """

    @abstractmethod
    def step(self, first: Collection[Running] = ()) -> Sequence[Running]:
        """Advance all requests by one step; return those that have ended. Blocking.

        A step is one round for the answers that run and one for those that start. Where `first`
        names some, the others may wait for a later step. An answer's timings are sums over its
        rounds. Where it raises, no request is running any more.
        """

    @abstractmethod
    def cancel(self, running: Running) -> None:
        """Drop a request between two steps; one that has ended is left alone."""

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        """Answer a batch, in order; raises the first request's error, if any has one. Blocking."""
        started = self.start(batch)
        while any(not running.has_ended for running in started):
            self.step()
        for running in started:
            if running.error is not None:
                raise running.error
        return [running.answer for running in started if running.answer is not None]


class OneCallPolicy(Policy):
    """A policy that answers a whole batch in one call, which is `act`: one step ends them all."""

    joins_midway = False
    _started: tuple[Running, ...] = ()  # since the last step

    @abstractmethod
    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        """Answer a batch, in order. Blocking."""

    def start(self, batch: Sequence[PolicyRequest]) -> Sequence[Running]:
        """Have requests wait for the next step."""
        started = [Running(request) for request in batch]
        self._started = (*self._started, *started)
        return started

    def step(self, first: Collection[Running] = ()) -> Sequence[Running]:
        """Answer all that have started."""
        started, self._started = self._started, ()
        answers = self.act([running.request for running in started]) if started else []
        for running, answer in zip(started, answers, strict=True):
            running.answer = answer
        return started

    def cancel(self, running: Running) -> None:
        """Drop a request before the step that would answer it."""
        self._started = tuple(other for other in self._started if other is not running)
