"""A policy that lives elsewhere: what its replica does with a batch, and how the answers travel.

A session's memory travels with its frame and returns with the answer, so a replica keeps nothing
and any replica can answer any frame. Knows nothing of how the two sides reach each other.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from deft_client.types import ActOptions, Observation, ServerInfo
from deft_policies.base import (
    ActAnswer,
    ActionLimits,
    ActRequest,
    LimitedPolicy,
    Policy,
    SteppedPolicy,
)
from deft_policies.errors import DeviceError, RequestError
from deft_policies.model.statistics import find_statistics_key
from deft_server.errors import DeadlineError, PolicyFailedError
from deft_server.hosting.host import HostedPolicy, LoadPolicy, load_and_warm
from deft_server.hosting.rounds import Rounds
from deft_server.serving.queue import ActBatch, Answer, Failure

BACKLOG_FRESH_S = 5.0


@dataclass(frozen=True)
class FrontState:
    """What a front says with a batch: the version it knows, how many batches wait there, and for
    how many seconds the answers are of use."""

    front: str
    version: str
    num_batches: float
    left_s: float = math.inf


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
class PolicyFacts:
    """What a server has to know of a policy that lives elsewhere."""

    info: ServerInfo
    limits: dict[str, ActionLimits] = field(default_factory=dict)  # by statistics key, if it tells
    is_stepped: bool = False


def facts_of(policy: Policy) -> PolicyFacts:
    """Ask a policy what a server has to know of it."""
    info, is_stepped = policy.info, isinstance(policy, SteppedPolicy)
    if not isinstance(policy, LimitedPolicy):
        return PolicyFacts(info, is_stepped=is_stepped)
    limits = {key: policy.action_limits(key) for key in info.statistics_keys}
    return PolicyFacts(info, limits, is_stepped)


def hosted(facts: PolicyFacts) -> HostedPolicy:
    """A policy that is known by its facts alone; its replica checks the rest of every frame."""
    known, default = facts.info.statistics_keys, facts.info.default_statistics_key

    def key_of(statistics_key: str | None) -> str:
        return find_statistics_key(known, default if statistics_key is None else statistics_key)

    def check(_: Observation, options: ActOptions) -> None:
        key_of(options.statistics_key)

    def limits(statistics_key: str | None) -> ActionLimits:
        return facts.limits[key_of(statistics_key)]

    told = limits if facts.limits else None
    return HostedPolicy(facts.info, check, told, is_stepped=facts.is_stepped)


@dataclass(frozen=True, eq=False)
class ReplicaAnswers:
    """What became of a batch, and who says so; with `facts` where the front knows others.

    Exceptions travel as `_PackedError`, because not all of them can be pickled.
    """

    replica: str
    version: str
    answers: list["ActAnswer | _PackedError"]
    failures: list[Failure]
    facts: PolicyFacts | None = None
    size: int = 1  # the most frames that were answered together with these

    def unpacked(self) -> list[Answer]:
        """Return the answers as the scheduler knows them."""
        return [one.unpacked() if isinstance(one, _PackedError) else one for one in self.answers]


@dataclass(frozen=True)
class _PackedError:
    """A frame's failure: of the request, the device or the clock, or else of the policy."""

    message: str
    field: str | None = None
    is_device: bool = False
    is_late: bool = False

    def unpacked(self) -> Exception:
        if self.is_late:
            return DeadlineError(self.message)
        if self.field is not None:
            return RequestError(self.field, self.message)
        return DeviceError(self.message) if self.is_device else PolicyFailedError(self.message)


class Replica:
    """Holds a policy and plays its rounds, which batches join and leave; on an event loop.

    The policy has a thread of its own, the only one that touches it.
    """

    def __init__(self, load: LoadPolicy, version: str, name: str) -> None:
        self.version = version  # what tells this policy from those before and after it
        self.busy_since_s: float | None = None  # since when a round is played, if one is
        self.num_frames = 0  # that are here
        self._name = name
        self._thread = ThreadPoolExecutor(1, "policy")
        self._policy = self._thread.submit(load_and_warm, load).result()
        self.facts = facts_of(self._policy)
        self._rounds = Rounds(self._policy)
        self._joining: list[ActBatch] = []
        self._ended: dict[ActBatch, asyncio.Future[None]] = {}
        self._playing: asyncio.Task[None] | None = None

    async def answer(self, frames: Sequence[ActRequest], state: FrontState) -> ReplicaAnswers:
        """Answer a batch; a frame that the policy cannot take does not touch the others."""
        answers: list[Answer | None] = [self._refusal(one) for one in frames]
        good = [index for index, refused in enumerate(answers) if refused is None]
        batch = ActBatch((), requests=[frames[index] for index in good])
        batch.deadline_s = time.monotonic() + state.left_s
        if good:
            await self._answered(batch)
            late = DeadlineError("no answer was ready at the deadline")
            for index, one in zip(good, batch.answers or [late] * len(good), strict=True):
                answers[index] = one
        packed = [_pack(one) for one in answers if one is not None]
        facts = None if state.version == self.version else self.facts
        return ReplicaAnswers(
            self._name, self.version, packed, batch.failures, facts, max(1, batch.size)
        )

    async def _answered(self, batch: ActBatch) -> None:
        """Have a batch join, and wait until it has ended."""
        self._joining.append(batch)
        self._ended[batch] = asyncio.get_running_loop().create_future()
        self.num_frames += len(batch.requests)
        if self._playing is None:
            self._playing = asyncio.create_task(self._play())
        try:
            await self._ended[batch]
        finally:
            self.num_frames -= len(batch.requests)
            batch.deadline_s = 0.0  # whoever asked may have gone
            del self._ended[batch]

    async def _play(self) -> None:
        """Play rounds for as long as anything is on its way."""
        loop = asyncio.get_running_loop()
        while self._joining or self._rounds.num_running:
            joining, self._joining = self._joining, []
            self.busy_since_s = time.monotonic()
            ended = await loop.run_in_executor(self._thread, self._rounds.play, joining)
            for batch in ended:
                if batch in self._ended:
                    self._ended[batch].set_result(None)
        self.busy_since_s = self._playing = None

    def _refusal(self, frame: ActRequest) -> RequestError | None:
        try:
            self._policy.check(frame.observation, frame.options)
        except RequestError as error:
            return error
        return None


def _pack(answer: Answer) -> ActAnswer | _PackedError:
    if isinstance(answer, ActAnswer):
        return answer
    culprit = answer.field if isinstance(answer, RequestError) else None
    return _PackedError(
        str(answer), culprit, isinstance(answer, DeviceError), isinstance(answer, DeadlineError)
    )
