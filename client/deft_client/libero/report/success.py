"""The sections about success: a card per run, success per task, and paired comparisons."""

from collections.abc import Sequence
from html import escape

from deft_client.libero.report.chart import interval_bar
from deft_client.libero.report.page import (
    View,
    legend_of,
    section,
    table,
)
from deft_client.libero.report.summary import RunSummary, Successes
from deft_client.libero.report.tables import Comparison, interval_text

_NOTEWORTHY_LATE_SHARE = 0.05


def cards(views: Sequence[View]) -> str:
    """A card per run with the numbers that matter most."""
    return f'<div class="runs">{"".join(_card(view) for view in views)}</div>'


def _card(view: View) -> str:
    summary, successes = view.summary, view.summary.successes
    big = f"{100 * successes.share:.1f}%" if successes.num_judged else "–"
    told = f"{successes.num_succeeded} of {successes.num_judged} episodes succeeded"
    if successes.num_judged:
        told += f", 95% interval {interval_text(successes)}%"
    if successes.num_errored:
        told += f"; {successes.num_errored} errored and not counted"
    facts = "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _facts(summary)
    )
    return (
        f'<article class="run" style="--c:var(--{view.style})"><h2>{escape(view.name)}</h2>'
        f'<div class="big">{big}</div><p class="note">{told}</p>'
        f'<div class="{view.style}">{_bar(successes)}</div><dl>{facts}</dl>{_warning(summary)}'
        "</article>"
    )


def _warning(summary: RunSummary) -> str:
    if summary.late_share <= _NOTEWORTHY_LATE_SHARE:
        return ""
    return (
        '<p class="note warning">The simulator itself did not keep 20 Hz here. Answers still took '
        "effect after their own latency, but they were given on a busy machine.</p>"
    )


def _facts(summary: RunSummary) -> list[tuple[str, str]]:
    trip, drafting = summary.round_trip, summary.drafting
    facts = []
    if trip.count:
        spread = f"<small>p95 {trip.p95:.1f}</small><small>p99 {trip.p99:.1f}</small>"
        facts.append(("median round trip", f"{trip.p50:.1f} ms{spread}"))
        rate = "fresh actions a second" if summary.is_real_time else "actions a second"
        facts.append((rate, f"{summary.control_rate:.1f}"))
    if drafting is not None:
        facts.append(("passes per action", f"{drafting.passes_per_action:.2f}"))
        facts.append(("committed length", f"{drafting.committed_length:.2f}"))
        facts.append(("relaxed share", f"{100 * drafting.relaxed_share:.1f}%"))
    if summary.is_real_time:
        facts.append(("held steps", f"{100 * summary.held_share:.1f}%"))
        facts.append(("late simulator steps", f"{100 * summary.late_share:.1f}%"))
    return facts


def _bar(successes: Successes) -> str:
    if not successes.num_judged:
        return ""
    interval = successes.interval
    return interval_bar(successes.share, interval.low, interval.high, "")


def success_by_task(views: Sequence[View]) -> str:
    """A row per task with a bar per run."""
    instructions = {
        (task.suite, task.number): task.instruction for view in views for task in view.summary.tasks
    }
    tasks = sorted(instructions.items())
    rows = []
    several = len({suite for (suite, _), _ in tasks}) > 1
    for (suite, number), instruction in tasks:
        rates = "".join(
            _rate(view, suite, number) for view in views if view.run.header.suite == suite
        )
        place = f"{suite} {number}" if several else str(number)
        rows.append(
            f'<div class="task"><span><b>{escape(place)}</b>{escape(instruction)}</span>'
            f'<div class="rates">{rates}</div></div>'
        )
    return section(
        "Success by task",
        "The bar is the share of episodes that succeeded, the line its 95% Wilson interval.",
        f'{legend_of(views)}<div class="tasks">{"".join(rows)}</div>' if rows else "",
    )


def _rate(view: View, suite: str, number: int) -> str:
    for task in view.summary.tasks:
        if (task.suite, task.number) == (suite, number):
            successes = task.successes
            told = f"{successes.num_succeeded}/{successes.num_judged}"
            interval = f'<span class="quiet">{interval_text(successes)}</span>'
            return (
                f'<div class="rate"><div class="{view.style}">{_bar(successes)}</div>'
                f"<span>{told} {interval}</span></div>"
            )
    return '<div class="rate"><div></div><span class="quiet">not played</span></div>'


def comparisons(compared: Sequence[Comparison]) -> str:
    """Every pair of runs on the trials they share."""
    rows = [
        (
            escape(one.first),
            escape(one.second),
            f"<b>{escape(one.verdict)}</b>",
            str(one.num_pairs),
            str(one.both),
            str(one.only_first),
            str(one.only_second),
            str(one.neither),
            f"{100 * one.difference:+.1f}" if one.num_pairs else "–",
            f"{one.p_value:.3g}" if one.num_pairs else "–",
            f"{one.num_same_actions}/{one.num_pairs}",
        )
        for one in compared
    ]
    columns = (
        "first run", "second run", "verdict", "pairs", "both", "only first", "only second",
        "neither", "points", "McNemar p", "same actions",
    )  # fmt: skip
    return section(
        "Paired comparison",
        "Each pair of runs on the trials both of them finished. McNemar's exact test asks whether "
        "the trials that went differently could be coin tosses; points are percentage points of "
        "the second run above the first; same actions counts episodes equal to the last bit.",
        table(columns, rows, num_text=3) if rows else "",
    )
