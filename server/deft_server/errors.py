"""What can go wrong while serving, and the table of the answers that callers get.

ServerError
├── AccessError                 who is asking
│   ├── WrongHostError          the Host header is not a name of this server
│   ├── MissingKeyError         no API key, or one we do not know
│   └── ForbiddenError          a known caller that may not do this
├── BodyTooLargeError           the request's bytes, counted before they are decoded
├── BodyTooSlowError
├── SupersededFrameError        the session sent a newer frame, or was reset
├── OverloadedError             no room in the queue, or over the caller's rate
├── DeadlineError               a frame cannot be, or was not, answered in time
├── NotReadyError               loading, stopping, stuck or broken
├── UnsafeAnswerError           the policy answered with something no robot should do
├── PolicyFailedError           the policy broke while it answered
└── CallerGoneError             the caller hung up before the answer
"""

from dataclasses import dataclass
from http import HTTPStatus

from starlette.exceptions import HTTPException

from deft_core.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    UnsupportedMessageError,
    UnusableValueError,
)
from deft_policies.errors import DeviceError, NoActionError, RequestError


class ServerError(Exception):
    """Base class of what the server raises on purpose. `field` names the culprit, if any."""

    field: str | None = None


class AccessError(ServerError):
    """The caller may not do this."""


class WrongHostError(AccessError):
    """The Host header is not an allowed name (protection against DNS rebinding)."""

    field = "host"


class MissingKeyError(AccessError):
    """No API key arrived, or one that is not in the file."""


class ForbiddenError(AccessError):
    """The caller is known, and may not do this."""


class BodyTooLargeError(ServerError):
    """More bytes than the server takes."""

    field = "body"


class BodyTooSlowError(ServerError):
    """The body did not arrive in the time given to it."""

    field = "body"


class SupersededFrameError(ServerError):
    """The session sent a newer frame, or was reset, while this one waited."""

    field = "session_id"


class OverloadedError(ServerError):
    """There is more work than time; `retry_after_s` says when there may be room."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(ServerError):
    """An answer could not be had before the deadline."""

    field = "deadline_ms"


class NotReadyError(ServerError):
    """The policy is loading, stopping, stuck or broken."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnsafeAnswerError(ServerError):
    """The policy's answer is not finite, or out of range."""


class PolicyFailedError(ServerError):
    """The policy raised instead of answering; the log has the traceback."""


class CallerGoneError(ServerError):
    """The caller hung up before the answer."""


@dataclass(frozen=True)
class ProblemKind:
    """One row of the table: how a class of errors looks from outside."""

    status: int
    name: str
    title: str


_ROWS: tuple[tuple[type[Exception], ProblemKind], ...] = (
    (MalformedMessageError, ProblemKind(400, "malformed", "Malformed message")),
    (MissingKeyError, ProblemKind(401, "no-access", "API key needed")),
    (ForbiddenError, ProblemKind(403, "forbidden", "Not allowed")),
    (BodyTooSlowError, ProblemKind(408, "too-slow", "Body took too long")),
    (SupersededFrameError, ProblemKind(409, "superseded", "Superseded by a newer frame")),
    (MessageTooLargeError, ProblemKind(413, "too-large", "Too large")),
    (BodyTooLargeError, ProblemKind(413, "too-large", "Too large")),
    (WrongHostError, ProblemKind(421, "wrong-host", "Not a name of this server")),
    (UnsupportedMessageError, ProblemKind(415, "unsupported", "Unsupported encoding")),
    (UnusableValueError, ProblemKind(422, "unusable", "Unusable value")),
    (RequestError, ProblemKind(422, "unusable", "Unusable value")),
    (OverloadedError, ProblemKind(429, "overloaded", "Too many requests")),
    (NoActionError, ProblemKind(500, "no_action", "No action in the answer")),
    (UnsafeAnswerError, ProblemKind(500, "unsafe-answer", "Unsafe answer withheld")),
    (PolicyFailedError, ProblemKind(500, "policy-failed", "Policy failed")),
    (DeviceError, ProblemKind(503, "device", "Device cannot take this now")),
    (NotReadyError, ProblemKind(503, "not-ready", "Not ready")),
    (DeadlineError, ProblemKind(504, "deadline", "Deadline missed")),
)
_BY_STATUS = {
    404: ProblemKind(404, "not-found", "Not found"),
    405: ProblemKind(405, "wrong-method", "Wrong method"),
}
UNEXPECTED = ProblemKind(500, "internal", "Internal error")


def kind_of(error: Exception) -> ProblemKind:
    """Look an exception up in the table."""
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        fallback = ProblemKind(error.status_code, phrase.lower().replace(" ", "-"), phrase)
        return _BY_STATUS.get(error.status_code, fallback)
    return next((kind for known, kind in _ROWS if isinstance(error, known)), UNEXPECTED)
