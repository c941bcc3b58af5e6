"""Decoding methods on the same frames in turn, so that what else the machine does hits all alike.

Measured while an episode is played: the first method acts, the others answer what it sees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from deft_client.libero.policies.source import EpisodePolicy
from deft_client.types import ActionChunk, Observation


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


@dataclass(frozen=True)
class MethodSpeed:
    """What a method did on the frames that all answered; ratios are to the first method."""

    method: str
    actions_per_s: float
    times_faster: float
    predicted: float  # times faster, if only the number of passes made the difference
    passes: float  # per action, the prefill included
    share_behind_prefill: float  # of its round trips
    identical_actions: float  # share of them
    largest_difference: float  # of a number of an action, in robot units


def compare_methods(
    answers: Mapping[str, Sequence[ActionChunk]], num_runs: int = 5
) -> list[MethodSpeed]:
    """Rates and ratios are medians over the frames cut into `num_runs` runs.

    Every answer needs a trace. The prediction leaves the time up to the end of the prefill as it
    is and shortens the rest by the passes saved: what drafting costs is what it misses by.
    """
    plain = next(iter(answers.values()))
    share, passes = _share_behind_prefill(plain), _passes(plain)
    own_rates = _rates(plain, num_runs)
    found = []
    for name, chunks in answers.items():
        rates = _rates(chunks, num_runs)
        ratios = [rate / own for rate, own in zip(rates, own_rates, strict=True)]
        saved = (passes - _passes(chunks)) / (passes - 1)
        pairs = list(zip(chunks, plain, strict=True))
        found.append(
            MethodSpeed(
                method=name,
                actions_per_s=median(rates),
                times_faster=median(ratios),
                predicted=1 / (1 - share * saved),
                passes=_passes(chunks),
                share_behind_prefill=_share_behind_prefill(chunks),
                identical_actions=fmean(np.array_equal(a.actions, b.actions) for a, b in pairs),
                largest_difference=max(
                    float(np.abs(a.actions - b.actions).max()) for a, b in pairs
                ),
            )
        )
    return found


def speed_table(speeds: Sequence[MethodSpeed]) -> str:
    """The comparison for people, with the share that drafting can shorten below it."""
    head = f"{'method':<16}{'actions/s':>10}{'faster':>9}{'by formula':>12}{'passes':>8}  identical"
    lines = [
        f"{one.method:<16}{one.actions_per_s:>10.1f}{one.times_faster:>8.2f}x"
        f"{one.predicted:>11.2f}x{one.passes:>8.2f}  {_identical(one)}"
        for one in speeds
    ]
    told = (
        f"{100 * speeds[0].share_behind_prefill:.0f}% of {speeds[0].method}'s time lies behind the "
        "prefill: only that can drafting shorten."
    )
    return "\n".join([head, *lines, told]) + "\n"


def _identical(one: MethodSpeed) -> str:
    if one.identical_actions == 1:
        return "all actions"
    return f"{100 * one.identical_actions:.0f}%, others by at most {one.largest_difference:.3f}"


def _rates(chunks: Sequence[ActionChunk], num_runs: int) -> list[float]:
    runs = np.array_split([chunk.timings.round_trip_ms for chunk in chunks], num_runs)
    return [1000 / float(run.mean()) for run in runs]


def _passes(chunks: Sequence[ActionChunk]) -> float:
    return fmean(chunk.trace.num_passes for chunk in chunks if chunk.trace)


def _share_behind_prefill(chunks: Sequence[ActionChunk]) -> float:
    times = [chunk.timings for chunk in chunks]
    behind_ms = sum(one.draft_ms + one.verify_ms + one.commit_ms for one in times)
    return behind_ms / sum(one.round_trip_ms for one in times)
