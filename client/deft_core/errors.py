"""Exceptions of the bytes that robots and servers share, and the problem document of a server.

DeftError
├── UsageError                      asked for what cannot be done; commands end with exit code 2
└── WireError                       bytes that cannot be used; `field` names the culprit
    ├── MalformedMessageError       not a message of this protocol, or a field is missing or unknown
    ├── MessageTooLargeError        beyond a limit: bytes, pixels, characters, cameras, state
    ├── UnsupportedMessageError     a version, content type or image encoding we do not speak
    └── UnusableValueError          well formed, but of the wrong type, shape, dtype or range
"""

import warnings
from dataclasses import dataclass


def warn_renamed(earlier: str, name: str) -> None:
    """Warn of a public name that is kept for one version; call it in what the user called."""
    warnings.warn(f"{earlier} is now {name}", DeprecationWarning, stacklevel=3)


class DeftError(Exception):
    """Base class of everything this package raises on purpose."""


class UsageError(DeftError):
    """Asked for what cannot be done; the message says what. Commands end with exit code 2."""


class WireError(DeftError):
    """Bytes that cannot be used. `field` names the culprit, such as `image.shape`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class MalformedMessageError(WireError):
    """Not a message of this protocol, or a field is missing or unknown."""


class MessageTooLargeError(WireError):
    """Beyond one of the limits; the message says which and how far."""


class UnsupportedMessageError(WireError):
    """A version, content type or image encoding that we do not speak."""


class UnusableValueError(WireError):
    """A field of the wrong type, shape, dtype or range."""


@dataclass(frozen=True)
class Problem:
    """What a server says when it cannot help: the members of application/problem+json."""

    status: int
    title: str
    detail: str = ""
    type: str = "about:blank"
    field: str | None = None
    request_id: str | None = None
    retry_after_s: float | None = None  # also the Retry-After header
    reasoning: str | None = None  # what the policy wrote, where it holds no action
