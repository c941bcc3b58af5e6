"""Decoding methods on the same frames in turn, so that what else the machine does hits all alike.

Measured while an episode is played: the first method acts, the others answer what it sees.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean

import numpy as np

from deft_client.libero.policies.source import EpisodePolicy
from deft_client.measures.speed import speed_up
from deft_client.measures.table import markdown_table
from deft_client.types import ActionChunk, Observation

Answers = Mapping[str, Sequence[ActionChunk]]  # of one episode, by method; each with a trace


class InterleavedPolicy:
    """Asks every method about every frame; the first one's actions are the answer.

    Who is asked first changes from frame to frame, because the first may find colder caches.
    """

    def __init__(self, methods: Mapping[str, EpisodePolicy]) -> None:
        self._methods = dict(methods)
        self.answers: dict[str, list[ActionChunk]] = {name: [] for name in methods}

    def start(self, session_id: str) -> None:
        """Begin an episode: every method in a session of its own."""
        for name, policy in self._methods.items():
            policy.start(f"{session_id}-{name}")

    def act(self, observation: Observation) -> ActionChunk:
        """Ask all, answer with the first one's actions."""
        names = list(self._methods)
        turn = len(self.answers[names[0]]) % len(names)
        for name in names[turn:] + names[:turn]:
            self.answers[name].append(self._methods[name].act(observation))
        return self.answers[names[0]][-1]

    def close(self) -> None:
        """Free all connections."""
        for policy in self._methods.values():
            policy.close()


def describe(episodes: Sequence[Answers], doubts: Sequence[str] = ()) -> str:
    """A table of the methods, and how much faster each is than the first one.

    `doubts` say why times of this machine tell nothing; then there are none.
    """
    plain, *others = episodes[0]
    rows = [
        [
            name,
            "–" if doubts else f"{fmean(_round_trips(episodes, name)):.1f}",
            f"{fmean(chunk.trace.num_passes for chunk in _all(episodes, name) if chunk.trace):.2f}",
            _identical(_all(episodes, name), _all(episodes, plain)),
        ]
        for name in (plain, *others)
    ]
    columns = ["method", "ms an answer", "passes", f"as {plain}"]
    lines = [markdown_table(columns, rows, aligned=True)]
    baseline = [_round_trips([one], plain) for one in episodes]
    for name in others:
        own = [_round_trips([one], name) for one in episodes]
        lines.append(f"{speed_up(baseline, own, doubts).sentence(name, plain)}\n")
    return "".join(lines)


def _all(episodes: Sequence[Answers], name: str) -> list[ActionChunk]:
    return list(chain.from_iterable(one[name] for one in episodes))


def _round_trips(episodes: Sequence[Answers], name: str) -> list[float]:
    return [chunk.timings.round_trip_ms for chunk in _all(episodes, name)]


def _identical(chunks: Sequence[ActionChunk], plain: Sequence[ActionChunk]) -> str:
    pairs = list(zip(chunks, plain, strict=True))
    same = [
        np.array_equal(own.actions, other.actions) and own.reasoning == other.reasoning
        for own, other in pairs
    ]
    if all(same):
        return "all answers"
    most = max(float(np.abs(own.actions - other.actions).max()) for own, other in pairs)
    return f"{100 * fmean(same):.0f}% of the answers, actions of others by at most {most:.3f}"
