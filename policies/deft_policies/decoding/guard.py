"""Placeholder until the cost model lands."""

from dataclasses import dataclass


@dataclass(eq=False)
class SessionAcceptance:
    """What one session has taught about acceptance."""
