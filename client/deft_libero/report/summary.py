"""The numbers of a run, computed from its episodes and nothing else.

Errored episodes count neither as success nor as failure. Latencies are those of every answer of
every episode that was played to its end.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from deft_core.measures.answers import AnswerRecord
from deft_core.measures.speculation import Speculation, speculation_of
from deft_core.measures.statistics import Interval, Percentiles, percentiles, wilson_interval
from deft_libero.results.records import STAGES, EpisodeRecord, Outcome, SeamSizes, TrialKey
from deft_libero.results.store import RunHeader, RunResults

STEPS_PER_S = 20


@dataclass(frozen=True)
class Successes:
    """How a set of episodes ended."""

    num_succeeded: int
    num_failed: int
    num_errored: int

    @property
    def num_judged(self) -> int:
        """Episodes that say something of the policy."""
        return self.num_succeeded + self.num_failed

    @property
    def share(self) -> float:
        """Succeeded over judged; NaN when nothing was judged."""
        return self.num_succeeded / self.num_judged if self.num_judged else float("nan")

    @property
    def interval(self) -> Interval:
        """95% Wilson interval of the share."""
        return wilson_interval(self.num_succeeded, self.num_judged)


@dataclass(frozen=True)
class TaskSummary:
    """One task of a suite."""

    instruction: str
    successes: Successes


@dataclass(frozen=True)
class RunSummary:
    """One run."""

    header: RunHeader
    successes: Successes
    tasks: Mapping[tuple[str, int], TaskSummary]  # by suite and number, in their order
    stages: Mapping[str, Percentiles]  # stages that took time, in the order of StageTimings
    num_steps: int
    num_answers: int
    held_share: float  # of the steps
    late_share: float  # of the steps; the simulator's own slowness in real time
    control_rate: float  # fresh actions per second
    seams: SeamSizes  # the largest of any episode
    speculation: Speculation | None  # None when no answer came with a trace

    @property
    def is_real_time(self) -> bool:
        """Whether the simulator went on without waiting."""
        return self.header.options.get("pacing") == "real-time"

    @property
    def round_trip(self) -> Percentiles:
        """What the client measured around every answer."""
        return self.stages.get("round_trip_ms", percentiles([]))


def summarise(run: RunResults, keys: AbstractSet[TrialKey] | None = None) -> RunSummary:
    """The numbers of a run, or of some of its episodes."""
    records = [one for one in run.records if keys is None or one.key in keys]
    played = [one for one in records if one.outcome is not Outcome.ERRORED]
    answers = [answer for one in played for answer in one.answers]
    num_steps = sum(one.num_steps for one in played)
    num_held = sum(one.held_steps for one in played)
    return RunSummary(
        header=run.header,
        successes=count_outcomes(records),
        tasks={key: _task(ones) for key, ones in sorted(by_task(records).items())},
        stages=_stages(answers),
        num_steps=num_steps,
        num_answers=len(answers),
        held_share=num_held / num_steps if num_steps else 0.0,
        late_share=sum(one.late_steps for one in played) / num_steps if num_steps else 0.0,
        control_rate=_control_rate(run.header, answers, num_steps, num_held),
        seams=largest_seams(one.seams for one in played),
        speculation=speculation_of(answers),
    )


def largest_seams(sizes: Iterable[SeamSizes]) -> SeamSizes:
    """The largest steps of a set of episodes."""
    found = list(sizes)
    return SeamSizes(
        commanded=max((one.commanded for one in found), default=0.0),
        inside=max((one.inside for one in found), default=0.0),
    )


def count_outcomes(records: Iterable[EpisodeRecord]) -> Successes:
    """How often each outcome occurred."""
    outcomes = [record.outcome for record in records]
    return Successes(
        outcomes.count(Outcome.SUCCEEDED),
        outcomes.count(Outcome.FAILED),
        outcomes.count(Outcome.ERRORED),
    )


def by_task(records: Iterable[EpisodeRecord]) -> Mapping[tuple[str, int], list[EpisodeRecord]]:
    """The episodes, a list per suite and task."""
    found: dict[tuple[str, int], list[EpisodeRecord]] = defaultdict(list)
    for record in records:
        found[record.key.suite, record.key.task].append(record)
    return found


def _task(records: Sequence[EpisodeRecord]) -> TaskSummary:
    instruction = next((one.instruction for one in records if one.instruction), "")
    return TaskSummary(instruction, count_outcomes(records))


def _stages(answers: Sequence[AnswerRecord]) -> dict[str, Percentiles]:
    columns = {stage: [getattr(one.timings, stage) for one in answers] for stage in STAGES}
    return {stage: percentiles(values) for stage, values in columns.items() if any(values)}


def _control_rate(
    header: RunHeader, answers: Sequence[AnswerRecord], num_steps: int, num_held: int
) -> float:
    """In lock-step, how many actions a second the answers would sustain; in real time, how many
    fresh ones a second reached the simulator."""
    if header.options.get("pacing") == "real-time":
        return STEPS_PER_S * (num_steps - num_held) / num_steps if num_steps else 0.0
    spent_ms = sum(answer.timings.round_trip_ms for answer in answers)
    return 1000 * num_steps / spent_ms if spent_ms else 0.0
