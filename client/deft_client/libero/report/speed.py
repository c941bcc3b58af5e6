"""How many times faster a run answered than plain decoding did, on the trials of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deft_client.libero.results.records import EpisodeRecord, Outcome, TrialKey
from deft_client.libero.results.store import RunResults

PLAIN = "autoregressive"
_ALIKE = ("pacing", "policy")  # options without which two times have nothing in common


@dataclass(frozen=True)
class TimesFaster:
    """Mean round trip of the baseline over that of the run: 2 is twice as fast.

    `low` and `high` are the least and most of any one trial: they show how steady the number is.
    """

    num_trials: int
    times: float
    low: float
    high: float


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


def speedup_of(run: RunResults, baseline: RunResults | None) -> TimesFaster | None:
    """The speed-up; None where the runs were not answered alike, or had no trial in common."""
    if baseline is None or any(
        run.header.options.get(name) != baseline.header.options.get(name) for name in _ALIKE
    ):
        return None
    before, after = _round_trips(baseline), _round_trips(run)
    keys = sorted(before.keys() & after.keys())
    if not keys:
        return None
    of_trials = [_mean(before[key]) / _mean(after[key]) for key in keys]
    whole = [_mean([one for key in keys for one in trips[key]]) for trips in (before, after)]
    return TimesFaster(len(keys), whole[0] / whole[1], min(of_trials), max(of_trials))


def _num_differences(one: RunResults, other: RunResults) -> int:
    options = (one.header.options, other.header.options)
    return sum(options[0].get(name) != options[1].get(name) for name in {*options[0], *options[1]})


def _round_trips(run: RunResults) -> Mapping[TrialKey, list[float]]:
    """The milliseconds of every answer, by trial, where any was measured."""
    found = {record.key: _of_record(record) for record in run.records}
    return {key: trips for key, trips in found.items() if sum(trips)}


def _of_record(record: EpisodeRecord) -> list[float]:
    if record.outcome is Outcome.ERRORED:
        return []
    return [answer.timings.round_trip_ms for answer in record.answers]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
