"""What a replica does with a frame, and how the answer travels back to the front.

A session's memory travels with its frame and returns with the answer, so a replica keeps nothing
and any replica can answer any frame. Knows nothing of how the two sides reach each other.
"""

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_policies.errors import DeviceError, RequestError
from deft_server.errors import DeadlineError, PolicyFailedError
from deft_server.serving.frame import Failure, Outcome, QueuedFrame
from deft_server.serving.hosting import HostedPolicy, LoadPolicy, load_and_warm
from deft_server.serving.rounds import Rounds
from deft_server.serving.sessions import RobotSession

BACKLOG_FRESH_S = 5.0


@dataclass(frozen=True)
class FrontState:
    """What a front says with a frame: the versions it knows, how many batches wait there, and
    for how many seconds the answer is of use."""

    front: str
    versions: tuple[str, ...]
    num_batches: float
    left_s: float = math.inf


class Backlogs:
    """How many batches wait at each front, as long as the number is fresh."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[float, float]] = {}  # batches, and when

    def note(self, state: FrontState, now_s: float) -> None:
        """Take in what a front says with a frame."""
        self._waiting[state.front] = state.num_batches, now_s

    def total(self, now_s: float) -> float:
        """Return the batches that wait at all fronts."""
        fresh = {
            front: known
            for front, known in self._waiting.items()
            if now_s - known[1] < BACKLOG_FRESH_S
        }
        self._waiting = fresh
        return sum(batches for batches, _ in fresh.values())


@dataclass(frozen=True, eq=False)
class ReplicaAnswer:
    """What became of a frame, and who says so; with `policy` where the front knows another.

    An exception travels as its class and arguments, because not all of them can be pickled.
    """

    replica: str
    version: str
    answer: PolicyAnswer | tuple[type[Exception], tuple[str, ...]]
    failures: list[Failure]
    policy: HostedPolicy | None = None
    batch_size: int = 1  # the most frames that were answered together with this one
    num_tries: int = 1  # how often it began

    def unpacked(self) -> Outcome:
        """Return the answer as the scheduler knows it."""
        if isinstance(self.answer, PolicyAnswer):
            return self.answer
        kind, arguments = self.answer
        return kind(*arguments)


class Replica:
    """Holds a policy and plays its rounds, which frames join and leave; on an event loop.

    The policy has a thread of its own, the only one that touches it.
    """

    def __init__(self, load: LoadPolicy, version: str, name: str) -> None:
        self.version = version  # what tells this policy from those before and after it
        self.busy_since_s: float | None = None  # since when a round is played, if one is
        self._name = name
        self._thread = ThreadPoolExecutor(1, "policy")
        policy = self._thread.submit(load_and_warm, load).result()
        self.policy = HostedPolicy.of(policy)
        self._rounds = Rounds(policy)
        self._joining: list[QueuedFrame] = []
        self._ended: dict[QueuedFrame, asyncio.Future[None]] = {}
        self._playing: asyncio.Task[None] | None = None

    @property
    def facts(self) -> HostedPolicy:
        """What a front has to know of the policy."""
        return replace(self.policy, here=None)

    @property
    def num_frames(self) -> int:
        """How many frames are here."""
        return len(self._ended)

    async def answer(self, ask: PolicyRequest, state: FrontState) -> ReplicaAnswer:
        """Answer a frame, in the same rounds as all that are here."""
        now_s = time.monotonic()
        session = RobotSession("", None, now_s, ask.memory)  # the front keeps the robot's
        deadline_s = now_s + state.left_s
        frame = QueuedFrame(ask.observation, ask.options, session, now_s, deadline_s)
        try:
            self.policy.check(ask.observation, ask.options)
            await self._played(frame)
        except RequestError as error:
            frame.outcome = error
        outcome = frame.outcome or DeadlineError("no answer was ready at the deadline")
        known = None if self.version in state.versions else self.facts
        batch_size = max(1, frame.batch_size)
        return ReplicaAnswer(
            self._name,
            self.version,
            _pack(outcome),
            frame.failures,
            known,
            batch_size,
            frame.num_tries,
        )

    async def _played(self, frame: QueuedFrame) -> None:
        """Have a frame join, and wait until it has ended."""
        self._joining.append(frame)
        self._ended[frame] = asyncio.get_running_loop().create_future()
        if self._playing is None:
            self._playing = asyncio.create_task(self._play())
        try:
            await self._ended[frame]
        finally:
            frame.is_cancelled = True
            del self._ended[frame]

    async def _play(self) -> None:
        """Play rounds for as long as anything is on its way."""
        loop = asyncio.get_running_loop()
        try:
            while self._joining or self._rounds.num_running:
                joining, self._joining = self._joining, []
                self.busy_since_s = time.monotonic()
                ended, _ = await loop.run_in_executor(self._thread, self._rounds.play, joining)
                for frame in ended:
                    waiting = self._ended.get(frame)
                    if waiting is not None and not waiting.done():  # else it was given up just now
                        waiting.set_result(None)
        finally:
            self.busy_since_s = self._playing = None


def _pack(outcome: Outcome) -> PolicyAnswer | tuple[type[Exception], tuple[str, ...]]:
    """Return what can travel: a failure of the frame, the device or the clock, or the policy."""
    if isinstance(outcome, PolicyAnswer):
        return outcome
    if isinstance(outcome, RequestError):
        return RequestError, (outcome.field, str(outcome))
    known = (one for one in (DeadlineError, DeviceError) if isinstance(outcome, one))
    return next(known, PolicyFailedError), (str(outcome),)
