"""Exceptions of the policies.

PolicyError
├── RequestError        the caller asked for something this policy does not do
│   ├── UnknownStatisticsKeyError
│   └── UnknownDecodingError
├── NotFiniteError        the model computed NaN or infinity: there is no answer
├── NoActionError         what the model wrote holds no action: `reasoning` has it
├── CheckpointError       files that cannot be loaded; the message names the file and the fix
└── DeviceError           the device cannot do it: memory, dtype, missing library
"""

from collections.abc import Sequence


class PolicyError(Exception):
    """Base class of everything a policy raises on purpose."""


class RequestError(PolicyError):
    """The caller asked for something this policy does not do. `field` names the culprit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class UnknownStatisticsKeyError(RequestError):
    """There are no action statistics under that key; the message lists those there are."""

    def __init__(self, key: str | None, known: Sequence[str]) -> None:
        problem = (
            "no statistics_key was given" if key is None else f"unknown statistics_key {key!r}"
        )
        super().__init__("statistics_key", f"{problem}; known keys: {', '.join(known) or 'none'}")


class UnknownDecodingError(RequestError):
    """There is no decoding method of that name; the message lists those there are."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__("decoding", f"unknown decoding {name!r}; known: {', '.join(known)}")


class NotFiniteError(PolicyError):
    """The model computed NaN or infinity; the largest of such numbers means nothing."""


class MixedAnswersError(PolicyError):
    """What was read belongs to another answer: a fault of ours, found before it reached a robot."""


class NoActionError(PolicyError):
    """What the model wrote holds no action. The session's memory of it is as good as any."""

    reasoning = ""  # the text of the answer, where it has been decoded


class CheckpointError(PolicyError):
    """Files that cannot be loaded; the message names the file and the fix."""


class DeviceError(PolicyError):
    """The device cannot do what was asked: memory, dtype or a missing library."""
