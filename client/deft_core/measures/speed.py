"""How many times faster one way of answering is than another, and whether that can be said."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deft_core.measures.statistics import LEAST_EPISODES, Interval, bootstrap_interval

_OWN_CORE = 0.97  # of the time that passes, where nothing else wants the core
# Plain decoding does the same work for every frame: an episode whose answers took this many times
# as long as the median episode's met something else on the machine.
_UNEVEN = 1.5


@dataclass(frozen=True)
class SpeedUp:
    """Milliseconds per answer of the baseline over those of the run: 2 is twice as fast.

    A ratio of sums over the episodes of both, with the 95% interval of drawing episodes anew.
    `doubts` say why it cannot be relied on; without any it may stand in a headline.
    """

    times: float
    interval: Interval
    of_medians: float
    num_episodes: int
    doubts: tuple[str, ...] = ()

    def sentence(self, run: str, baseline: str) -> str:
        """What may be said of it."""
        if self.doubts:
            episodes = "1 episode" if self.num_episodes == 1 else f"{self.num_episodes} episodes"
            return (
                f"{run} answered {self.times:.2f} times as fast as {baseline} in {episodes}, but "
                f"that does not allow a conclusion: {'; '.join(self.doubts)}."
            )
        return (
            f"{run} answers {self.times:.2f} times as fast as {baseline} (95%: "
            f"{self.interval:.2f}; {self.of_medians:.2f} by medians) in {self.num_episodes} "
            "episodes."
        )


def speed_up(
    baseline: Sequence[Sequence[float]], run: Sequence[Sequence[float]], doubts: Sequence[str] = ()
) -> SpeedUp:
    """Compare the milliseconds of every answer, episode by episode; all of them have some."""
    sums = [
        [sum(one), len(one), sum(own), len(own)] for one, own in zip(baseline, run, strict=True)
    ]
    counted = np.array(sums, dtype=np.float64)
    if len(counted) < LEAST_EPISODES:
        episodes = "1 episode" if len(counted) == 1 else f"{len(counted)} episodes"
        doubts = (f"times of {episodes}, {LEAST_EPISODES} are needed", *doubts)
    return SpeedUp(
        times=float(_times(counted.sum(axis=0)[None])[0]),
        interval=bootstrap_interval(counted, _times),
        of_medians=float(np.median(np.concatenate(baseline)) / np.median(np.concatenate(run))),
        num_episodes=len(counted),
        doubts=(*doubts, *_unevenness(baseline)),
    )


def _times(sums: np.ndarray) -> np.ndarray:
    return np.asarray(sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3]))


def _unevenness(baseline: Sequence[Sequence[float]]) -> list[str]:
    means = [sum(one) / len(one) for one in baseline]
    worst = max(means) / float(np.median(means))
    if worst <= _UNEVEN:
        return []
    return [
        f"the machine was busy (answers of one episode of the baseline took {worst:.1f} times as "
        "long as in its median episode)"
    ]


def cpu_contention_warnings(worked_s: float, passed_s: float) -> list[str]:
    """Of times during which the answering thread was measured to be given `worked_s` of a core."""
    if not worked_s or worked_s > _OWN_CORE * passed_s:
        return []
    return [f"the machine was busy (answers had {worked_s / passed_s:.0%} of a core)"]
