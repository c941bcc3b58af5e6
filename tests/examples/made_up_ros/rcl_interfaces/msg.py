"""The answer to a change of parameters."""

from dataclasses import dataclass


@dataclass
class SetParametersResult:
    successful: bool
    reason: str = ""
