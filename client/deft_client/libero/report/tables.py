"""The same numbers as text: for the terminal, for a pull request (markdown), for a sheet (CSV)."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deft_client.commands.table import legend, markdown_table, without_empty
from deft_client.libero.report.summary import RunSummary, Successes
from deft_client.libero.results.records import EpisodeRecord, Outcome
from deft_client.libero.results.statistics import Interval, mcnemar_exact
from deft_client.libero.results.store import RunResults

LUCK = 0.05  # p-values below it are called a difference


@dataclass(frozen=True)
class Comparison:
    """Paired by (suite, task, trial), over episodes that were judged in both runs."""

    first: str
    second: str
    num_pairs: int
    both: int
    only_first: int
    only_second: int
    neither: int
    num_same_actions: int  # pairs whose actions agree to the last bit
    p_value: float
    have_same_assets: bool

    @property
    def difference(self) -> float:
        """Success of the second minus success of the first, in shares; NaN without pairs."""
        if not self.num_pairs:
            return float("nan")
        return (self.only_second - self.only_first) / self.num_pairs

    @property
    def has_identical_actions(self) -> bool:
        """Whether no action differs in any bit."""
        return 0 < self.num_pairs == self.num_same_actions

    @property
    def verdict(self) -> str:
        """What the numbers allow to say."""
        if not self.num_pairs:
            return "no trial was judged in both"
        if not self.have_same_assets:
            return "different assets: not comparable"
        if self.has_identical_actions:
            return "identical actions"
        if self.p_value >= LUCK:
            return "no difference shown"
        return f"{self.first if self.only_first > self.only_second else self.second} is better"


def compare(first: RunResults, second: RunResults, first_name: str, second_name: str) -> Comparison:
    """Pair two runs and test the difference with McNemar's exact test."""
    others = {record.key: record for record in second.records if _is_judged(record)}
    pairs = [
        (record, others[record.key])
        for record in first.records
        if _is_judged(record) and record.key in others
    ]
    wins = [(_won(one), _won(other)) for one, other in pairs]
    only_first, only_second = wins.count((True, False)), wins.count((False, True))
    return Comparison(
        first=first_name,
        second=second_name,
        num_pairs=len(pairs),
        both=wins.count((True, True)),
        only_first=only_first,
        only_second=only_second,
        neither=wins.count((False, False)),
        num_same_actions=sum(np.array_equal(one.actions, other.actions) for one, other in pairs),
        p_value=mcnemar_exact(only_first, only_second),
        have_same_assets=first.header.assets == second.header.assets,
    )


def _is_judged(record: EpisodeRecord) -> bool:
    return record.outcome.is_judged


def _won(record: EpisodeRecord) -> bool:
    return record.outcome is Outcome.SUCCEEDED


def success_text(successes: Successes) -> str:
    """`87.5% (35/40)`, or a dash where nothing was judged."""
    if not successes.num_judged:
        return "–"
    return f"{100 * successes.share:.1f}% ({successes.num_succeeded}/{successes.num_judged})"


def interval_text(successes: Successes) -> str:
    """`73.9–94.5`, in percent."""
    interval = successes.interval
    return f"{100 * interval.low:.1f}–{100 * interval.high:.1f}" if successes.num_judged else "–"


def points_text(interval: Interval) -> str:
    """`-3.1 to +0.4`, in percentage points."""
    return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


def terminal_table(summaries: Sequence[RunSummary]) -> str:
    """A row per run, without the columns that all leave out; below, what its words mean."""
    columns, rows = without_empty(_RUN_COLUMNS, [_run_cells(one) for one in summaries])
    return markdown_table(columns, rows, aligned=True) + legend(columns, _MEANINGS)


def markdown_tables(
    summaries: Sequence[RunSummary], comparisons: Sequence[Comparison], notes: Sequence[str] = ()
) -> str:
    """All tables of the report."""
    columns, rows = without_empty(_RUN_COLUMNS, [_run_cells(one) for one in summaries])
    parts = [markdown_table(columns, rows), legend(columns, _MEANINGS)]
    parts += ["".join(f"- {one}\n" for one in notes)] if notes else []
    for names, cells in ((_TASK_COLUMNS, _task_rows), (_STAGE_COLUMNS, _stage_rows)):
        parts.append(markdown_table(names, [row for one in summaries for row in cells(one)]))
    if comparisons:
        compared = [comparison_cells(one) for one in comparisons]
        parts += [markdown_table(COMPARISON_COLUMNS, compared), legend(COMPARISON_COLUMNS, _PAIRED)]
    return "\n".join(parts)


def other_starts(runs: Sequence[RunResults], names: Sequence[str]) -> list[str]:
    """A sentence for every run whose judged starts are not those of all runs of its suite."""
    starts = [{one.key for one in run.records if one.outcome.is_judged} for run in runs]
    said = []
    for run, name, own in zip(runs, names, starts, strict=True):
        suite = run.header.suite
        peers = [
            one for one, other in zip(starts, runs, strict=True) if other.header.suite == suite
        ]
        shared = set.intersection(*peers)
        if own and own != shared:
            said.append(
                f"{name}: {len(own)} starts, of which all runs of {suite} have {len(shared)}; its "
                "success is compared on shared starts alone, in the pairs"
            )
    return said


def episodes_csv(runs: Iterable[RunResults]) -> str:
    """One row per episode."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ("name", "run", "assets", "suite", "task", "trial", "instruction", "outcome", "steps",
         "answers", "mean_round_trip_ms", "passes", "relaxed_tokens", "tokens", "held_steps",
         "late_steps", "largest_step", "largest_step_inside", "wall_s", "video", "error")
    )  # fmt: skip
    for run in runs:
        for one in run.records:
            spent = [answer.timings.round_trip_ms for answer in one.answers]
            writer.writerow(
                (run.header.name, run.header.run, one.assets, one.key.suite, one.key.task,
                 one.key.trial, one.instruction, one.outcome.value, one.num_steps,
                 len(one.answers), f"{sum(spent) / len(spent):.3f}" if spent else "",
                 sum(len(answer.accepted) for answer in one.answers),
                 sum(answer.num_relaxed for answer in one.answers),
                 sum(answer.num_tokens for answer in one.answers),
                 one.held_steps, one.late_steps, f"{one.seams.commanded:.6g}",
                 f"{one.seams.inside:.6g}", f"{one.wall_s:.3f}", one.video, one.error)
            )  # fmt: skip
    return stream.getvalue()


_RUN_COLUMNS = (
    "run", "success", "95%", "errored", "p50 ms", "p95 ms", "p99 ms", "actions/s", "passes",
    "text", "text ms", "action", "action ms", "committed", "relaxed", "held", "step", "inside",
)  # fmt: skip
_MEANINGS = {
    "success": "episodes that succeeded, of those that were played to their end",
    "95%": "Wilson's interval of that share",
    "errored": "episodes in which a tool broke; they count neither way",
    "p50 ms": "half of the answers took no longer, from the frame sent to the action received",
    "actions/s": "in lock-step what the answers would sustain, in real time fresh ones",
    "passes": "forward passes of the model for an action, the prefill included",
    "text": "of these, passes for what it writes before; action: for what is behind it",
    "committed": "tokens that a pass with guesses settles: the accepted ones, and one more",
    "relaxed": "executed tokens that are not the model's own greedy choice",
    "held": "share of the steps in which the arm held, for want of an answer",
    "step": "largest change from one action to the next; inside: the same within answered chunks",
}
_PAIRED = {
    "pairs": "starts that both runs were judged on",
    "McNemar p": "chance that coin tosses part the pairs that went differently as much",
    "same actions": "episodes whose actions are equal to the last bit",
}
_TASK_COLUMNS = ("run", "task", "instruction", "success", "95%", "errored")
_STAGE_COLUMNS = ("run", "stage", "p50 ms", "p95 ms", "p99 ms", "mean ms")
COMPARISON_COLUMNS = (
    "first", "second", "pairs", "both", "only first", "only second", "neither", "difference",
    "McNemar p", "same actions", "verdict",
)  # fmt: skip


def _run_cells(summary: RunSummary) -> tuple[str, ...]:
    speculation, trip = summary.speculation, summary.round_trip
    return (
        summary.header.name,
        success_text(summary.successes),
        interval_text(summary.successes),
        str(summary.successes.num_errored),
        *(f"{value:.1f}" if trip.count else "–" for value in (trip.p50, trip.p95, trip.p99)),
        f"{summary.control_rate:.1f}" if summary.control_rate else "–",
        f"{speculation.passes_per_action:.2f}" if speculation else "–",
        *_thinking_cells(summary),
        f"{speculation.committed_length:.2f}" if speculation else "–",
        f"{100 * speculation.relaxed_share:.1f}%" if speculation else "–",
        f"{100 * summary.held_share:.0f}%" if summary.is_real_time else "–",
        f"{summary.seams.commanded:.2f}" if summary.is_real_time else "–",
        f"{summary.seams.inside:.2f}" if summary.is_real_time else "–",
    )


def _thinking_cells(summary: RunSummary) -> tuple[str, ...]:
    found = None if summary.speculation is None else summary.speculation.thinking
    if found is None:
        return ("–",) * 4
    numbers = (found.text_passes, found.text_ms, found.action_passes, found.action_ms)
    return tuple(f"{value:.2f}" for value in numbers)


def _task_rows(summary: RunSummary) -> Iterable[tuple[str, ...]]:
    for task in summary.tasks:
        yield (
            summary.header.name,
            str(task.number),
            task.instruction,
            success_text(task.successes),
            interval_text(task.successes),
            str(task.successes.num_errored),
        )


def _stage_rows(summary: RunSummary) -> Iterable[tuple[str, ...]]:
    for stage, spread in summary.stages.items():
        values = (spread.p50, spread.p95, spread.p99, spread.mean)
        name = stage.removesuffix("_ms").replace("_", " ")
        yield (summary.header.name, name, *(f"{value:.2f}" for value in values))


def comparison_cells(one: Comparison) -> tuple[str, ...]:
    """A row below COMPARISON_COLUMNS."""
    return (
        one.first,
        one.second,
        str(one.num_pairs),
        str(one.both),
        str(one.only_first),
        str(one.only_second),
        str(one.neither),
        f"{100 * one.difference:+.1f} points" if one.num_pairs else "–",
        f"{one.p_value:.3g}" if one.num_pairs else "–",
        f"{one.num_same_actions}/{one.num_pairs}",
        one.verdict,
    )
