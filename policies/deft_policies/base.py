"""What the server needs from a policy, and nothing more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deft_client.types import (
    ActionChunk,
    ActOptions,
    Observation,
    ServerInfo,
)


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


class Session(Protocol):
    """What a policy remembers of one robot between frames.

    The server keeps it, hands it back with the robot's next frame and never looks inside.
    """


@dataclass(frozen=True)
class ActRequest:
    """One observation to answer, with the memory of the robot it came from."""

    observation: Observation
    session: Session
    options: ActOptions = field(default_factory=ActOptions)


class Policy(Protocol):
    """Maps observations to the actions that follow them.

    `check` and `open_session` may be called from any thread; `act` and `warm_up` only from the
    one policy thread.
    """

    @property
    def info(self) -> ServerInfo:
        """What this policy is and which options it takes."""

    def open_session(self) -> Session:
        """Return the memory of a robot that has just started an episode."""

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Raise `RequestError` for what `act` could not answer; cheap, touches no model."""

    def warm_up(self) -> None:
        """Do once what would make the first answer slow."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActionChunk]:
        """Answer a batch, in order. Blocking. No two requests share a session.

        Where it raises, no session has changed: the server may try the frames again, in smaller
        batches. `DeviceError` means that a smaller batch might do.
        """


@dataclass(frozen=True, eq=False)
class ActionLimits:
    """What any action of a robot must look like, so that a server can refuse one that does not.

    Where `is_motion` is true, zero means "do not move"; elsewhere (a gripper) staying as one is
    means repeating the last command. Where the policy `may_exceed` the range, an answer beyond it
    is no sign of a fault.
    """

    low: NDArray[np.float64]  # [action_dim]
    high: NDArray[np.float64]  # [action_dim]
    is_motion: NDArray[np.bool_]  # [action_dim]
    may_exceed: bool = False


@runtime_checkable
class LimitedPolicy(Protocol):
    """A policy that knows the range of its actions; may be called from any thread."""

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        """Return the limits under a statistics key that `check` let pass; None is the default."""


_IMMEDIATE = "is_immediate"

ActT = TypeVar("ActT", bound=Callable[..., list[ActionChunk]])


def immediate(act: ActT) -> ActT:
    """Mark an `act` that takes microseconds, whatever the batch, and touches no device.

    A server may then call it wherever it is, which saves the hand-over to the policy thread. The
    mark belongs to the function: a subclass that overrides `act` does not inherit it.
    """
    setattr(act, _IMMEDIATE, True)
    return act


def is_immediate(policy: Policy) -> bool:
    """Is the policy's `act` marked as immediate?"""
    return getattr(policy.act, _IMMEDIATE, False)
