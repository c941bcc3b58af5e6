"""The sections about speed: latency by stage and over time, and what speculation did."""

from collections.abc import Sequence
from html import escape

from deft_client.libero.report.chart import (
    Bar,
    Line,
    Part,
    axis_of,
    bar_plot,
    legend,
    line_plot,
    stacked_bar,
)
from deft_client.libero.report.page import (
    View,
    legend_of,
    section,
    table,
)
from deft_client.libero.report.summary import RunSummary
from deft_client.libero.results.records import STAGES
from deft_client.libero.results.statistics import percentiles

_WHOLE = ("total_ms", "round_trip_ms")
STAGES_OF_SERVER = tuple(stage for stage in STAGES if stage not in _WHOLE)
# Colours: one per stage, then what the server did besides, then what lies outside the server.
_STAGE_STYLES = {
    "wire": "stage0", "queue": "stage1", "prepare": "stage2", "vision": "stage3",
    "prefill": "stage4", "draft": "stage5", "verify": "stage6", "commit": "stage7",
    "finish": "stage8", "rest of the server": "stage9", "network and client": "stage10",
}  # fmt: skip


def latency(views: Sequence[View]) -> str:
    """Where the time goes, how it is spread, and whether it drifts."""
    timed = [view for view in views if view.summary.round_trip.count]
    if not timed:
        return ""
    longest = max(view.summary.round_trip.mean for view in timed)
    parts = {view.name: stage_parts(view.summary) for view in timed}
    rows = "".join(
        f'<div class="stage-row"><span>{escape(view.name)}</span>'
        f"{stacked_bar(parts[view.name], longest)}"
        f"<span>{view.summary.round_trip.mean:.1f} ms</span></div>"
        for view in timed
    )
    shown = {part.name for ones in parts.values() for part in ones if part.value > 0}
    named = [(name, style) for name, style in _STAGE_STYLES.items() if name in shown]
    return section(
        "Latency",
        "Mean round trip of an answer by stage, then its percentiles, then each episode in the "
        "order of playing.",
        rows + legend(named) + _percentile_table(timed) + _over_time(timed),
    )


def stage_parts(summary: RunSummary) -> list[Part]:
    """The mean round trip, split into stages that add up to it."""
    means = {stage: spread.mean for stage, spread in summary.stages.items()}
    parts = {
        stage.removesuffix("_ms"): means.get(stage, 0.0)
        for stage in STAGES_OF_SERVER
        if means.get(stage)
    }
    total, trip = means.get("total_ms", 0.0), means.get("round_trip_ms", 0.0)
    inside = sum(parts.values())
    parts["rest of the server"] = max(0.0, total - inside)
    parts["network and client"] = max(0.0, trip - max(total, inside))
    return [Part(name, value, _STAGE_STYLES[name]) for name, value in parts.items()]


def _percentile_table(views: Sequence[View]) -> str:
    stages = [stage for stage in STAGES if any(stage in view.summary.stages for view in views)]
    rows = []
    for stage in stages:
        cells = []
        for view in views:
            spread = view.summary.stages.get(stage)
            cells += (
                [f"{value:.2f}" for value in (spread.p50, spread.p95, spread.p99)]
                if spread
                else ["–", "–", "–"]
            )
        rows.append((stage.removesuffix("_ms").replace("_", " "), *cells))
    names = "".join(
        f'<th class="n {view.style}" colspan="3">{escape(view.name)}</th>' for view in views
    )
    columns = ["stage", *("p50", "p95", "p99") * len(views)]
    above = f"<tr><th></th>{names}</tr>" if len(views) > 1 else ""
    return f"<h3>Percentiles by stage, ms</h3>{table(columns, rows, above=above)}"


def _over_time(views: Sequence[View]) -> str:
    lines = []
    for view in views:
        played = sorted(view.run.records, key=lambda record: record.finished_s)
        spreads = [
            percentiles([answer.timings.round_trip_ms for answer in record.answers])
            for record in played
            if record.answers
        ]
        for name, style in (("p50", view.style), ("p95", f"{view.style} faint")):
            points = [
                (float(number), getattr(spread, name))
                for number, spread in enumerate(spreads, start=1)
            ]
            lines.append(Line(f"{view.name} {name}", points, style))
    x = axis_of("episode", [point[0] for line in lines for point in line.points])
    y = axis_of("ms", [point[1] for line in lines for point in line.points], from_zero=True)
    drawn = line_plot("Round trip in ms: median, and dashed the 95th percentile", lines, x, y)
    return f"<h3>Over the evaluation</h3>{legend_of(views)}{drawn}"


def speculation(views: Sequence[View]) -> str:
    """Committed length by position and the distribution of accepted lengths."""
    drafting = [view for view in views if view.summary.drafting is not None]
    if not drafting:
        return ""
    return section(
        "Speculation",
        "A pass of the target model commits the drafted tokens it accepts and one of its own. "
        "Longer is faster; with one token per pass nothing is gained.",
        f'{legend_of(drafting)}<div class="{"plots" if len(drafting) < 3 else "plots one"}">'
        f"{_by_position(drafting)}{_accepted(drafting)}</div>",
    )


def _by_position(views: Sequence[View]) -> str:
    groups: dict[str, list[Bar]] = {}
    for view in views:
        assert view.summary.drafting is not None
        for position, spread in view.summary.drafting.committed_by_position.items():
            hint = f"{view.name}: {spread.count} passes began at token {position}"
            bar = Bar(spread.mean, f"{spread.mean:.1f}", view.style, hint)
            groups.setdefault(str(position), []).append(bar)
    ordered = dict(sorted(groups.items(), key=lambda group: int(group[0])))
    title = "Committed length of the passes that begin at a token"
    return bar_plot(title, ordered, "token of the action")


def _accepted(views: Sequence[View]) -> str:
    groups: dict[str, list[Bar]] = {}
    for view in views:
        assert view.summary.drafting is not None
        counts = view.summary.drafting.accepted_counts
        for length, count in counts.items():
            share = 100 * count / view.summary.drafting.num_passes
            bar = Bar(share, f"{share:.0f}", view.style, f"{view.name}: {count} passes")
            groups.setdefault(str(length), []).append(bar)
    ordered = dict(sorted(groups.items(), key=lambda group: int(group[0])))
    return bar_plot("Percent of passes by accepted length", ordered, "drafted tokens accepted")
