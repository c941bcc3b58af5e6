"""Which run another is compared with, and how many times faster it answered."""

from collections.abc import Sequence

from deft_core.measures.speed import SpeedUp, cpu_contention_warnings, speed_up
from deft_core.measures.statistics import LEAST_EPISODES
from deft_libero.results.records import EpisodeRecord, Outcome
from deft_libero.results.store import RunResults

PLAIN = "autoregressive"
_ALIKE = ("pacing", "policy")  # options without which two times have nothing in common


def decoding_of(run: RunResults) -> str:
    """The name of the decoding method, without its knobs; empty where it is unknown."""
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
        doubts += cpu_contention_warnings(worked_s, sum(map(sum, (baselines, own)[side])) / 1000)
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
