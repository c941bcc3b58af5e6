"""A policy that lives elsewhere: what its host does with a batch, and what the server keeps.

A session's memory travels with its frame and returns with the answer, so a host keeps nothing and
any host can answer any frame. Knows nothing of how the two sides reach each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deft_client.types import ActOptions, Observation, ServerInfo
from deft_policies.base import ActAnswer, ActionLimits, ActRequest, LimitedPolicy, Policy
from deft_policies.errors import DeviceError, RequestError, UnknownStatisticsKeyError
from deft_server.errors import NotReadyError, PolicyFailedError
from deft_server.serving.policy_thread import Answer, Attempts, Failure, answer_batch


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
class RemoteAnswers:
    """What became of a batch, and who says so."""

    host: str
    version: str
    answers: tuple[ActAnswer | Trouble, ...]
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

    def answer(self, frames: Sequence[ActRequest]) -> RemoteAnswers:
        """Answer a batch; a frame that the policy cannot take does not touch the others."""
        refused = [self._refusal(frame) for frame in frames]
        batch = [one for one, trouble in zip(frames, refused, strict=True) if trouble is None]
        attempts = answer_batch(self._policy, batch) if batch else Attempts([], [], 0.0)
        given = iter(attempts.answers)
        answers = [_told(next(given)) if trouble is None else trouble for trouble in refused]
        return RemoteAnswers(self._name, self._version, tuple(answers), tuple(attempts.failures))

    def _refusal(self, frame: ActRequest) -> Trouble | None:
        try:
            self._policy.check(frame.observation, frame.options)
        except RequestError as error:
            return Trouble.of(error)
        return None


def _told(answer: Answer) -> ActAnswer | Trouble:
    return Trouble.of(answer) if isinstance(answer, Exception) else answer


@dataclass(frozen=True, eq=False)
class RemotePolicy:
    """The server's side of a policy: all but `act`, which the hosts do."""

    face: Face

    @property
    def info(self) -> ServerInfo:
        """What the hosts advertise."""
        return self.face.info

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Refuse an unknown statistics key; the rest is checked by the host, before it acts."""
        key, info = options.statistics_key, self.info
        if key is None and info.default_statistics_key is not None:
            return
        if key is None or key not in info.statistics_keys:
            raise UnknownStatisticsKeyError(key, info.statistics_keys)

    def warm_up(self) -> None:
        """Nothing to warm: a host is warm before it is used."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
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


def unpack(returned: RemoteAnswers, service_s: float) -> Attempts:
    """Return what came back as the scheduler knows it."""
    answers: list[Answer] = [
        one.as_error() if isinstance(one, Trouble) else one for one in returned.answers
    ]
    return Attempts(answers, list(returned.failures), service_s, returned.host)


def lost(num_frames: int, reason: str, service_s: float) -> Attempts:
    """Return what is told of a batch that nobody answered; the sessions are as before."""
    error = NotReadyError(f"the replica was lost: {reason}; send the frame again")
    return Attempts([error] * num_frames, [Failure.LOST], service_s)
