"""How many times faster a run answered than plain decoding, and whether that can be said at all.

The report, `compare`, the demonstration, the benchmark and the studies all take it from here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deft_client.libero.results.records import EpisodeRecord, Outcome
from deft_client.libero.results.statistics import LEAST_EPISODES, Interval, bootstrap_interval
from deft_client.libero.results.store import RunResults

PLAIN = "autoregressive"
_ALIKE = ("pacing", "policy")  # options without which two times have nothing in common
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

    @property
    def interval_text(self) -> str:
        """`1.31 to 1.52`."""
        return f"{self.interval.low:.2f} to {self.interval.high:.2f}"

    def sentence(self, run: str, baseline: str) -> str:
        """What may be said of it."""
        if self.doubts:
            return f"No speed-up of {run} over {baseline} is told: {'; '.join(self.doubts)}."
        return (
            f"{run} answers {self.times:.2f} times as fast as {baseline} (95%: "
            f"{self.interval_text}; {self.of_medians:.2f} by medians) in {self.num_episodes} "
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
        doubts = (f"times of {len(counted)} episodes, {LEAST_EPISODES} are needed", *doubts)
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


def core_doubts(worked_s: float, passed_s: float) -> list[str]:
    """Of times during which the answering thread was measured to be given `worked_s` of a core."""
    if not worked_s or worked_s > _OWN_CORE * passed_s:
        return []
    return [f"the machine was busy (answers had {worked_s / passed_s:.0%} of a core)"]


def decoding_of(run: RunResults) -> str:
    """The name of the decoding method, without its knobs; empty where nobody said."""
    header = run.header
    text = header.options.get("decoding") or header.server.get("decoding", "")
    return text.partition(":")[0]


def baseline_first(runs: Sequence[RunResults]) -> list[RunResults]:
    """The runs, those with plain decoding before the others."""
    return sorted(runs, key=lambda run: decoding_of(run) != PLAIN)


def baseline_of(run: RunResults, runs: Sequence[RunResults]) -> RunResults | None:
    """What a run is compared with; None for a baseline itself.

    The suite's runs of plain decoding are baselines, and where there is none, its first run. Of
    several that one counts whose options differ least from the run's.
    """
    peers = [one for one in runs if one.header.suite == run.header.suite]
    baselines = [one for one in peers if decoding_of(one) == PLAIN] or peers[:1]
    if run in baselines:
        return None
    return min(baselines, key=lambda one: _num_differences(one, run))


def speedup_of(run: RunResults, baseline: RunResults | None) -> SpeedUp | None:
    """The speed-up; None where runs were not answered alike, or have no timed trial in common."""
    if baseline is None or any(
        run.header.options.get(name) != baseline.header.options.get(name) for name in _ALIKE
    ):
        return None
    before = {one.key: one for one in baseline.records if _is_timed(one)}
    pairs = [(before[one.key], one) for one in run.records if one.key in before and _is_timed(one)]
    if not pairs:
        return None
    baselines, own = ([_round_trips(pair[side]) for pair in pairs] for side in (0, 1))
    doubts = [] if _took_turns(pairs) else ["the runs were not played in turn"]
    for side in (0, 1):
        worked_s = sum(pair[side].worked_s for pair in pairs)
        doubts += core_doubts(worked_s, sum(map(sum, (baselines, own)[side])) / 1000)
    return speed_up(baselines, own, list(dict.fromkeys(doubts)))


def _took_turns(pairs: Sequence[tuple[EpisodeRecord, EpisodeRecord]]) -> bool:
    """Whether the runs followed each other as often as many episodes in turn do."""
    played = sorted((one.finished_s, side) for pair in pairs for side, one in enumerate(pair))
    turns = sum(one[1] != other[1] for one, other in zip(played, played[1:], strict=False))
    return turns + 1 >= 2 * min(LEAST_EPISODES, len(pairs))


def _num_differences(one: RunResults, other: RunResults) -> int:
    options = (one.header.options, other.header.options)
    return sum(options[0].get(name) != options[1].get(name) for name in {*options[0], *options[1]})


def _is_timed(record: EpisodeRecord) -> bool:
    return record.outcome is not Outcome.ERRORED and sum(_round_trips(record)) > 0


def _round_trips(record: EpisodeRecord) -> list[float]:
    return [answer.timings.round_trip_ms for answer in record.answers]
