"""A policy that lives elsewhere: what its host does with a batch, and what the server keeps.

A session's memory travels with its frame and returns with the answer, so a host keeps nothing and
any host can answer any frame. Knows nothing of how the two sides reach each other.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deft_client.types import ActionChunk, ActOptions, Observation, ServerInfo
from deft_policies.base import ActionLimits, ActRequest, LimitedPolicy, Policy, Session
from deft_policies.errors import DeviceError, RequestError, UnknownStatisticsKeyError
from deft_server.errors import NotReadyError, PolicyFailedError
from deft_server.serving.policy_thread import Answer, Attempts, Failure, answer_batch


@dataclass(frozen=True)
class Memory:
    """A session as bytes, and which version of the policy they mean something to."""

    version: str
    state: bytes


@dataclass(eq=False)
class RemoteSession:
    """The server's side of a session; None before the first answer."""

    memory: Memory | None = None


@dataclass(frozen=True, eq=False)
class RemoteFrame:
    """One frame on its way to a host."""

    observation: Observation
    options: ActOptions
    memory: Memory | None


@dataclass(frozen=True)
class Trouble:
    """Why a host did not answer a frame. Data, because exceptions do not survive every journey."""

    failure: Failure
    message: str
    field: str = ""

    @staticmethod
    def of(error: Exception) -> "Trouble":
        """Return what is to be told of an exception that `answer_batch` or a check gave."""
        if isinstance(error, RequestError):
            return Trouble(Failure.REQUEST, str(error), error.field)
        failure = Failure.DEVICE if isinstance(error, DeviceError) else Failure.RAISED
        return Trouble(failure, str(error))

    def as_error(self) -> Exception:
        """Return the exception that the server's protocols know."""
        if self.failure is Failure.REQUEST:
            return RequestError(self.field, self.message)
        if self.failure is Failure.DEVICE:
            return DeviceError(self.message)
        return PolicyFailedError(self.message)


@dataclass(frozen=True, eq=False)
class RemoteAnswer:
    """What became of one frame; the memory is the session's after it."""

    outcome: ActionChunk | Trouble
    memory: Memory | None


@dataclass(frozen=True, eq=False)
class RemoteAnswers:
    """What became of a batch, and who says so."""

    host: str
    version: str
    answers: tuple[RemoteAnswer, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, eq=False)
class Face:
    """What a server has to know of a policy that it does not hold."""

    version: str
    info: ServerInfo
    limits: Mapping[str | None, ActionLimits]  # by statistics key; empty where there are none


class Host:
    """Holds a policy and answers for it. Everything on the one thread that may touch it."""

    def __init__(self, load: Callable[[], Policy], version: str, name: str) -> None:
        self._policy = load()
        self._policy.warm_up()
        self._version = version
        self._name = name

    @property
    def face(self) -> Face:
        """What the server has to know."""
        policy, info = self._policy, self._policy.info
        limits: dict[str | None, ActionLimits] = {}
        if isinstance(policy, LimitedPolicy):
            limits = {key: policy.action_limits(key) for key in info.statistics_keys}
            if info.default_statistics_key is not None:
                limits[None] = policy.action_limits(None)
        return Face(self._version, info, limits)

    def answer(self, frames: Sequence[RemoteFrame]) -> RemoteAnswers:
        """Answer a batch; a frame that the policy cannot take does not touch the others."""
        sessions = [self._open(frame.memory) for frame in frames]
        refused = [self._refusal(frame) for frame in frames]
        batch = [
            ActRequest(frame.observation, session, frame.options)
            for frame, session, trouble in zip(frames, sessions, refused, strict=True)
            if trouble is None
        ]
        attempts = answer_batch(self._policy, batch) if batch else Attempts([], [], 0.0)
        given = iter(attempts.answers)
        answers = [
            self._pack(next(given) if trouble is None else trouble, session)
            for session, trouble in zip(sessions, refused, strict=True)
        ]
        return RemoteAnswers(self._name, self._version, tuple(answers), tuple(attempts.failures))

    def _open(self, memory: Memory | None) -> Session:
        """Return a session as it was; what another version remembers is forgotten."""
        if memory is None or memory.version != self._version:
            return self._policy.open_session()
        # Bytes that a host of this very deployment made; they never leave server and hosts.
        session: Session = pickle.loads(memory.state)
        return session

    def _refusal(self, frame: RemoteFrame) -> Trouble | None:
        try:
            self._policy.check(frame.observation, frame.options)
        except RequestError as error:
            return Trouble.of(error)
        return None

    def _pack(self, answer: Answer | Trouble, session: Session) -> RemoteAnswer:
        if isinstance(answer, Trouble):
            return RemoteAnswer(answer, None)
        if isinstance(answer, Exception):
            return RemoteAnswer(Trouble.of(answer), None)
        return RemoteAnswer(answer, Memory(self._version, pickle.dumps(session)))


@dataclass(frozen=True, eq=False)
class RemotePolicy:
    """The server's side of a policy: all but `act`, which the hosts do."""

    face: Face

    @property
    def info(self) -> ServerInfo:
        """What the hosts advertise."""
        return self.face.info

    def open_session(self) -> Session:
        """Return a memory with nothing in it; a host fills it."""
        return RemoteSession()

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Refuse an unknown statistics key; the rest is checked by the host, before it acts."""
        key, info = options.statistics_key, self.info
        if key is None and info.default_statistics_key is not None:
            return
        if key is None or key not in info.statistics_keys:
            raise UnknownStatisticsKeyError(key, info.statistics_keys)

    def warm_up(self) -> None:
        """Nothing to warm: a host is warm before it is used."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActionChunk]:
        """Never called: what the worker is given it sends to a host."""
        raise NotReadyError("a policy that lives elsewhere cannot act here")


class LimitedRemotePolicy(RemotePolicy):
    """The same for a policy that knows the range of its actions."""

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        """Return the limits under a statistics key that `check` let pass; None is the default."""
        return self.face.limits[statistics_key]


def policy_of(face: Face) -> RemotePolicy:
    """Return the server's side of the policy with this face."""
    return LimitedRemotePolicy(face) if face.limits else RemotePolicy(face)


@dataclass(frozen=True, eq=False)
class Parcel:
    """A batch as it leaves the server; `unpack` brings back what returns into its sessions."""

    requests: Sequence[ActRequest]
    frames: tuple[RemoteFrame, ...] = field(init=False)

    def __post_init__(self) -> None:
        frames = tuple(
            RemoteFrame(one.observation, one.options, _session(one).memory) for one in self.requests
        )
        object.__setattr__(self, "frames", frames)

    def unpack(self, returned: RemoteAnswers, service_s: float) -> Attempts:
        """Keep what the sessions remember now, and return the answers."""
        answers: list[Answer] = []
        for request, one in zip(self.requests, returned.answers, strict=True):
            if one.memory is not None:
                _session(request).memory = one.memory
            outcome = one.outcome
            answers.append(outcome.as_error() if isinstance(outcome, Trouble) else outcome)
        return Attempts(answers, list(returned.failures), service_s, returned.host)

    def lost(self, reason: str, service_s: float) -> Attempts:
        """Return what is told of a batch that nobody answered; the sessions are as before."""
        error = NotReadyError(f"the replica was lost: {reason}; send the frame again")
        return Attempts([error] * len(self.requests), [Failure.LOST], service_s)


def _session(request: ActRequest) -> RemoteSession:
    assert isinstance(request.session, RemoteSession)
    return request.session
