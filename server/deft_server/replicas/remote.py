"""A policy that lives elsewhere: what its replica does with a batch, and how the answers travel.

A session's memory travels with its frame and returns with the answer, so a replica keeps nothing
and any replica can answer any frame. Knows nothing of how the two sides reach each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deft_policies.base import ActRequest
from deft_server.errors import NotReadyError
from deft_server.hosting.attempts import Attempts, Failure
from deft_server.hosting.host import LoadPolicy, load_and_warm
from deft_server.hosting.messages import PolicyFacts, decode_message, encode_message
from deft_server.hosting.worker import answer, facts_of

BACKLOG_FRESH_S = 5.0


@dataclass(frozen=True)
class FrontState:
    """What a front says with a batch: the version it knows, and how many batches wait there."""

    front: str
    version: str
    num_batches: float


class Backlogs:
    """What a replica was told by each front, as long as it is fresh."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, float]] = {}  # batches, and when

    def note(self, state: FrontState, now_s: float) -> None:
        """Take in what a front says with a batch."""
        self._told[state.front] = state.num_batches, now_s

    def total(self, now_s: float) -> float:
        """Return the batches that wait at all fronts."""
        fresh = {
            front: told for front, told in self._told.items() if now_s - told[1] < BACKLOG_FRESH_S
        }
        self._told = fresh
        return sum(batches for batches, _ in fresh.values())


@dataclass(frozen=True, eq=False)
class ReplicaAnswers:
    """What became of a batch, and who says so; with `facts` where the front knows others.

    Packed, because exceptions do not survive every journey.
    """

    replica: str
    version: str
    packed: bytes
    facts: PolicyFacts | None = None

    def attempts(self, service_s: float) -> Attempts:
        """Return what came back as the scheduler knows it; `service_s` includes the journey."""
        attempts = decode_message(self.packed)
        assert isinstance(attempts, Attempts)
        return replace(attempts, service_s=service_s, replica=self.replica)


class Replica:
    """Holds a policy and answers for it. Everything on the one thread that may touch it."""

    def __init__(self, load: LoadPolicy, version: str, name: str) -> None:
        self._policy = load_and_warm(load)
        self._version = version
        self._name = name

    @property
    def version(self) -> str:
        """What tells this policy from those before and after it."""
        return self._version

    @property
    def facts(self) -> PolicyFacts:
        """What the server has to know."""
        return facts_of(self._policy)

    def answer(self, frames: Sequence[ActRequest], known_version: str) -> ReplicaAnswers:
        """Answer a batch; a frame that the policy cannot take does not touch the others."""
        packed = encode_message(answer(self._policy, frames))
        facts = None if known_version == self._version else self.facts
        return ReplicaAnswers(self._name, self._version, packed, facts)


def lost(num_frames: int, reason: str, service_s: float) -> Attempts:
    """Return what is told of a batch that nobody answered; the sessions are as before."""
    error = NotReadyError(f"the replica was lost: {reason}; send the frame again")
    return Attempts([error] * num_frames, [Failure.LOST], service_s)
