"""The sections about single episodes: their outcomes, the actions of one of them, and videos."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape

from deft_client.libero.report.chart import Line, axis_of, line_plot
from deft_client.libero.report.page import View, legend_of, section
from deft_client.libero.results.records import EpisodeRecord, Outcome, TrialKey

_MARKS = {Outcome.SUCCEEDED: "✓", Outcome.FAILED: "×", Outcome.ERRORED: "!"}
_DIMENSIONS = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
_MAX_VIDEOS = 12


def outcomes(views: Sequence[View]) -> str:
    """A square per episode, a line per task."""
    body = "".join(
        f'<div><h3 class="{view.style}">{escape(view.name)}</h3><div class="matrix">'
        f"{_strips(view)}</div></div>"
        for view in views
        if view.run.records
    )
    return section(
        "Episodes",
        "A line per task, a square per trial: ✓ succeeded, × failed, ! errored. Outlined squares "
        "open their video; the trial and the reason of an error show under the pointer.",
        f'<div class="matrices">{body}</div>' if body else "",
    )


def _strips(view: View) -> str:
    by_task: dict[tuple[str, int], list[EpisodeRecord]] = defaultdict(list)
    for record in view.run.records:
        by_task[record.key.suite, record.key.task].append(record)
    strips = []
    for (_, number), records in sorted(by_task.items()):
        cells = "".join(_cell(view, one) for one in records)
        strips.append(f'<div class="strip"><b>{number}</b>{cells}</div>')
    return "".join(strips)


def _cell(view: View, record: EpisodeRecord) -> str:
    told = f"trial {record.key.trial}: {record.outcome.value}, {record.num_steps} steps"
    if record.error:
        told += f" ({record.error})"
    link = view.link(record.video)
    tag, target = ("a", f' href="{link}"') if link else ("span", "")
    mark = _MARKS[record.outcome]
    return (
        f'<{tag}{target} class="cell {record.outcome.value}" title="{escape(told)}" '
        f'aria-label="{escape(told)}">{mark}</{tag}>'
    )


def choose_episode(views: Sequence[View]) -> TrialKey | None:
    """The first trial that went differently in the runs; else the first that all of them have."""
    common = [{record.key: record for record in view.run.records if len(record.actions)}
              for view in views]  # fmt: skip
    keys = sorted(set.intersection(*(set(ones) for ones in common))) if common else []
    for key in keys:
        if len({ones[key].outcome for ones in common}) > 1:
            return key
    return keys[0] if keys else None


def action_curves(views: Sequence[View], key: TrialKey | None) -> str:
    """What the robot was told in one episode, a plot per dimension, a line per run."""
    chosen = [
        (view, record)
        for view in views
        for record in view.run.records
        if record.key == key and len(record.actions)
    ]
    if not chosen:
        return ""
    plots = []
    for dimension, name in enumerate(_DIMENSIONS):
        lines = [
            Line(view.name, list(enumerate(record.actions[:, dimension].tolist())), view.style)
            for view, record in chosen
        ]
        values = [value for line in lines for _, value in line.points]
        longest = float(max(len(line.points) for line in lines) - 1)
        x = axis_of("step", [0.0, longest], from_zero=True)
        plots.append(line_plot(name, lines, x, axis_of(name, values)))
    ends = ", ".join(f"{view.name} {record.outcome.value}" for view, record in chosen)
    return section(
        "Actions of one episode",
        f"{chosen[0][1].instruction} ({key}): {ends}. In the simulator's units, before the "
        "controller scales them.",
        f'{legend_of([view for view, _ in chosen])}<div class="plots small">{"".join(plots)}</div>',
    )


def videos(views: Sequence[View]) -> str:
    """The first videos, failures first; the rest is linked from the squares."""
    found = [
        (view, record, link)
        for view in views
        for record in view.run.records
        if (link := view.link(record.video))
    ]
    found.sort(key=lambda one: (one[1].outcome is Outcome.SUCCEEDED, one[1].key))
    figures = "".join(
        f'<figure><video controls muted playsinline preload="metadata" src="{link}"></video>'
        f'<figcaption><span class="{record.outcome.value}-text">{record.outcome.value}</span> · '
        f"{escape(record.instruction)} · task {record.key.task}, trial {record.key.trial}"
        f"{' · ' + escape(view.name) if len(views) > 1 else ''}</figcaption></figure>"
        for view, record, link in found[:_MAX_VIDEOS]
    )
    more = len(found) - _MAX_VIDEOS
    lead = "Failures first." + (f" {more} more open from the squares above." if more > 0 else "")
    return section("Videos", lead, f'<div class="videos">{figures}</div>' if figures else "")
