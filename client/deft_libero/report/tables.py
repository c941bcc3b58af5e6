"""The same numbers as text: for the terminal, for a pull request (markdown), for a sheet (CSV)."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from deft_core.measures.table import NOTHING, Column, column_table, legend, markdown_table
from deft_libero.report.difference import Comparison
from deft_libero.report.summary import RunSummary, Successes
from deft_libero.results.store import RunResults, weights_of

_PLAIN_PLAN = "plain"  # as traces call it


def success_text(successes: Successes) -> str:
    """`87.5% (35/40)`, or a dash where nothing was judged."""
    if not successes.num_judged:
        return NOTHING
    return f"{100 * successes.share:.1f}% ({successes.num_succeeded}/{successes.num_judged})"


def interval_text(successes: Successes) -> str:
    """`73.9–94.5`, in percent."""
    interval = successes.interval
    return (
        f"{100 * interval.low:.1f}–{100 * interval.high:.1f}" if successes.num_judged else NOTHING
    )


def terminal_table(summaries: Sequence[RunSummary]) -> str:
    """A row per run, without the columns that all leave out; below, what its words mean."""
    return column_table(_RUN_COLUMNS, summaries, aligned=True)


def markdown_tables(
    summaries: Sequence[RunSummary], comparisons: Sequence[Comparison], notes: Sequence[str] = ()
) -> str:
    """All tables of the report."""
    parts = [column_table(_RUN_COLUMNS, summaries)]
    parts += ["".join(f"- {one}\n" for one in notes)] if notes else []
    for names, cells in ((_TASK_COLUMNS, _task_rows), (_STAGE_COLUMNS, _stage_rows)):
        parts.append(markdown_table(names, [row for one in summaries for row in cells(one)]))
    if comparisons:
        compared = [comparison_cells(one) for one in comparisons]
        parts += [markdown_table(COMPARISON_COLUMNS, compared), legend(COMPARISON_COLUMNS, _PAIRED)]
    return "\n".join(parts)


def notes_of(runs: Sequence[RunResults], names: Sequence[str]) -> list[str]:
    """What stands below a table of runs: weights, plans, and starts that not all runs have.

    Raises ResultsMismatchError for runs of different weights.
    """
    plans = [
        f"{name}: plans {text}"
        for run, name in zip(runs, names, strict=True)
        if (text := _plans_text(run))
    ]
    return [f"weights {weights_of(runs)}", *plans, *other_starts(runs, names)]


def _plans_text(run: RunResults) -> str:
    """How many of the answers each plan made; empty for plain decoding."""
    counts = Counter(answer.plan for one in run.records for answer in one.answers if answer.plan)
    if set(counts) <= {_PLAIN_PLAN}:
        return ""
    return ", ".join(f"{plan} {num / counts.total():.0%}" for plan, num in counts.most_common())


def other_starts(runs: Sequence[RunResults], names: Sequence[str]) -> list[str]:
    """A sentence for every run whose judged starts are not those of all runs of its suite."""
    starts = [{one.key for one in run.records if one.outcome.is_judged} for run in runs]
    notes = []
    for run, name, own in zip(runs, names, starts, strict=True):
        suite = run.header.suite
        peers = [
            one for one, other in zip(starts, runs, strict=True) if other.header.suite == suite
        ]
        shared = set.intersection(*peers)
        if own and own != shared:
            notes.append(
                f"{name}: {len(own)} starts, of which all runs of {suite} have {len(shared)}; its "
                "success is compared on shared starts alone, in the pairs"
            )
    return notes


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


def _of_times(form: str) -> Callable[[RunSummary], str]:
    return lambda one: form.format(one.round_trip) if one.round_trip.count else NOTHING


def _of_passes(form: str) -> Callable[[RunSummary], str]:
    return lambda one: form.format(one.speculation) if one.speculation else NOTHING


def _of_text(form: str) -> Callable[[RunSummary], str]:
    def text(one: RunSummary) -> str:
        found = one.speculation.thinking if one.speculation else None
        return form.format(found) if found else NOTHING

    return text


def _live(form: str) -> Callable[[RunSummary], str]:
    return lambda one: form.format(one) if one.is_real_time else NOTHING


_RUN_COLUMNS = (
    Column[RunSummary]("run", lambda one: one.header.name),
    Column[RunSummary](
        "success",
        lambda one: success_text(one.successes),
        "episodes that succeeded, of those that were played to their end",
    ),
    Column[RunSummary](
        "95%", lambda one: interval_text(one.successes), "Wilson's interval of that share"
    ),
    Column[RunSummary](
        "errored",
        lambda one: str(one.successes.num_errored),
        "episodes in which a tool broke; they count neither way",
    ),
    Column(
        "p50 ms",
        _of_times("{.p50:.1f}"),
        "half of the answers took no longer, from the frame sent to the action received",
    ),
    Column("p95 ms", _of_times("{.p95:.1f}")),
    Column("p99 ms", _of_times("{.p99:.1f}")),
    Column[RunSummary](
        "actions/s",
        lambda one: f"{one.control_rate:.1f}" if one.control_rate else NOTHING,
        "in lock-step what the answers would sustain, in real time fresh ones",
    ),
    Column(
        "passes",
        _of_passes("{.passes_per_action:.2f}"),
        "forward passes of the model for an action, the prefill included",
    ),
    Column(
        "text",
        _of_text("{.text_passes:.2f}"),
        "of these, passes for what it writes before; action: for what is behind it",
    ),
    Column("text ms", _of_text("{.text_ms:.2f}")),
    Column("action", _of_text("{.action_passes:.2f}")),
    Column("action ms", _of_text("{.action_ms:.2f}")),
    Column(
        "committed",
        _of_passes("{.committed_length:.2f}"),
        "tokens that a pass with guesses settles: the accepted ones, and one more",
    ),
    Column(
        "relaxed",
        _of_passes("{.relaxed_share:.1%}"),
        "executed tokens that are not the model's own greedy choice",
    ),
    Column(
        "held",
        _live("{.held_share:.0%}"),
        "share of the steps in which the arm held, for want of an answer",
    ),
    Column(
        "step",
        _live("{.seams.commanded:.2f}"),
        "largest change from one action to the next; inside: the same within answered chunks",
    ),
    Column("inside", _live("{.seams.inside:.2f}")),
)
_PAIRED = {
    "pairs": "starts that both runs were judged on",
    "McNemar p": "chance that coin tosses part the pairs that went differently as much",
    "same actions": "episodes whose actions are equal to the last bit",
}
_TASK_COLUMNS = ("run", "task", "instruction", "success", "95%", "errored")
_STAGE_COLUMNS = ("run", "stage", "p50 ms", "p95 ms", "p99 ms", "mean ms")
COMPARISON_COLUMNS = (
    "first", "second", "pairs", "both", "only first", "only second", "neither", "difference",
    "McNemar p", "same actions", "success",
)  # fmt: skip


def _task_rows(summary: RunSummary) -> Iterable[tuple[str, ...]]:
    for (_, number), task in summary.tasks.items():
        yield (
            summary.header.name,
            str(number),
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
        f"{100 * one.difference:+.1f} points" if one.num_pairs else NOTHING,
        f"{one.p_value:.3g}" if one.num_pairs else NOTHING,
        f"{one.num_same_actions}/{one.num_pairs}",
        one.verdict,
    )
