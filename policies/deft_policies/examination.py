"""What can be found out about a machine or a policy before anything is loaded."""

from dataclasses import dataclass
from enum import Enum


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
