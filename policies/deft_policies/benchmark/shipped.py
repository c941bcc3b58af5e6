"""Recorded frames that ship: what tiny-libero saw when it played LIBERO's objects."""

from functools import cache
from pathlib import Path

from deft_policies.benchmark.replay import ReplayFrame, read_stored

FOLDER = Path(__file__).parent / "frames"
NUM_EPISODES, NUM_STEPS = 5, 20


@cache
def read_shipped() -> tuple[ReplayFrame, ...]:
    """Twenty consecutive frames of each of five episodes."""
    return tuple(read_stored(FOLDER, NUM_EPISODES * NUM_STEPS))
