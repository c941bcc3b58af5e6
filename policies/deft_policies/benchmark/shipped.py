"""Recorded frames that ship: what tiny-libero saw when it played LIBERO's objects."""

from functools import cache
from pathlib import Path

from deft_policies.benchmark.replay import ReplayFrame, read_stored

FOLDER = Path(__file__).parent / "frames"
NUM_EPISODES, NUM_STEPS = 5, 20


def read_shipped(limit: int = NUM_EPISODES * NUM_STEPS) -> list[ReplayFrame]:
    """The first frames of each of five episodes, as many of each as there is room for."""
    by_episode: dict[str, list[ReplayFrame]] = {}
    for frame in _every():
        by_episode.setdefault(frame.episode, []).append(frame)
    per_episode = max(1, limit // NUM_EPISODES)
    return [one for of_episode in by_episode.values() for one in of_episode[:per_episode]][:limit]


@cache
def _every() -> tuple[ReplayFrame, ...]:
    return tuple(read_stored(FOLDER, NUM_EPISODES * NUM_STEPS))
