"""The report as one HTML page that needs nothing but itself (and the videos it links to).

Here it is decided what the page shows; `templates/page.html` says how. The template engine escapes
whatever comes from results.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from deft_core.measures.speculation import Speculation
from deft_core.measures.speed import SpeedUp
from deft_core.measures.statistics import percentiles
from deft_libero.errors import needed
from deft_libero.report.chart import Bar, BarPlot, Line, LinePlot, axis_of, tick_text
from deft_libero.report.difference import Comparison, compare
from deft_libero.report.picture import Racer, find_races
from deft_libero.report.speed import baseline_first, baseline_of
from deft_libero.report.summary import RunSummary, by_task, summarise
from deft_libero.report.tables import interval_text, notes_of
from deft_libero.results.records import STAGES, VIDEO_FPS, EpisodeRecord, Outcome, TrialKey
from deft_libero.results.store import RunResults

if TYPE_CHECKING:
    from jinja2 import Template

NUM_COLOURS = 6
_NOTEWORTHY_LATE_SHARE = 0.05
_MAX_RACES = 12
_MAX_STARTS = 16
_SLOWEST_RATE, _FASTEST_RATE = 1 / 16, 16.0  # of a video in a browser
# What differs between any two runs, and says nothing of what they measured.
_OWN_FACTS = ("run", "started", "folder")
_DIMENSIONS = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
_MARKS = {Outcome.SUCCEEDED: "✓", Outcome.FAILED: "×", Outcome.ERRORED: "!",
          Outcome.REPLAYED: "·"}  # fmt: skip
_WHOLE = ("total_ms", "round_trip_ms")
# Colours: one per stage, then what the server did besides, then what lies outside the server.
_STAGE_STYLES = {
    "wire": "stage0", "queue": "stage1", "prepare": "stage2", "vision": "stage3",
    "prefill": "stage4", "draft": "stage5", "verify": "stage6", "judge": "stage11",
    "commit": "stage7", "finish": "stage8", "rest of the server": "stage9",
    "network and client": "stage10",
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """A run as the page shows it; `style` is the class of its colour."""

    run: RunResults
    summary: RunSummary
    style: str
    name: str  # without the suite where all runs are of the same one
    link_from: Path  # folder of the page, from which links to videos are relative
    comparison: Comparison | None  # with its baseline; None for a baseline

    @property
    def speedup(self) -> SpeedUp | None:
        """How many times faster it answered than its baseline, where that can be measured."""
        return self.comparison.speedup if self.comparison else None

    def link(self, record: EpisodeRecord) -> str:
        """A relative link to an episode's video, or nothing if it is not there."""
        path = self.run.video(record)
        return "" if path is None else quote(os.path.relpath(path, self.link_from.resolve()))


def build_views(runs: Sequence[RunResults], link_from: Path) -> list[View]:
    """The runs with their numbers, baselines first; colours repeat after the sixth."""
    runs = baseline_first(runs)
    names = dict(zip(map(id, runs), short_names(runs), strict=True))
    views = []
    for number, run in enumerate(runs):
        baseline = baseline_of(run, runs)
        name, style = names[id(run)], f"run{number % NUM_COLOURS}"
        compared = compare(baseline, run, (names[id(baseline)], name)) if baseline else None
        views.append(View(run, summarise(run), style, name, link_from, compared))
    return views


def short_names(runs: Sequence[RunResults]) -> list[str]:
    """What tells the runs apart: their names, without suite and last words that all share."""
    names = [run.header.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.header.name} ({run.folder.parent.name})" for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.header.name} ({run.header.run})" for run in runs]
    if len({run.header.suite for run in runs}) > 1:
        return names
    suite = runs[0].header.suite if runs else ""
    short = [name.removeprefix(suite).strip() or name for name in names]
    while len(runs) > 1 and all(" " in name for name in short):
        if len({name.rpartition(" ")[2] for name in short}) > 1:
            break
        short = [name.rpartition(" ")[0] for name in short]
    return short


def build_page(views: Sequence[View], key: TrialKey | None = None) -> str:
    """The whole page as HTML. `key` is the episode whose actions are drawn."""
    timed = [view for view in views if view.summary.round_trip.count]
    drawn = _records_of(views, key or choose_episode(views))
    races = find_races([view.run for view in views])
    return _load_template().render(
        views=views,
        suites=list(dict.fromkeys(view.run.header.suite for view in views)),
        days=sorted({view.run.header.created[:10] for view in views}),
        badges=list(_badges(views)),
        facts=_facts,
        noteworthy_late_share=_NOTEWORTHY_LATE_SHARE,
        tasks=_tasks(views),
        faster=sorted(filter(_is_told, views), key=_times, reverse=True),
        doubts=_doubts(views),
        notes=notes_of([view.run for view in views], [view.name for view in views]),
        compared=[view for view in views if view.comparison],
        timed=timed,
        stage_styles=_STAGE_STYLES,
        stage_parts=stage_parts,
        stage_names={name for view in timed for name in stage_parts(view.summary)},
        stages=[name for name in STAGES if any(name in view.summary.stages for view in timed)],
        over_time=_over_time,
        drafting=[view for view in views if _acts_at_once(view)],
        by_start=_by_start,
        by_accepted=_by_accepted,
        drawn=drawn,
        action_plots=_action_plots(drawn),
        marks=_MARKS,
        by_task=by_task,
        races=list(races.items())[:_MAX_RACES],
        num_more_races=len(races) - _MAX_RACES,
        id=id,
        view_of={id(view.run): view for view in views},
        rate_of=_rate_of,
        playback_speedup=_playback_speedup,
        differences=[one for one in _provenance(views) if _differs(*one)],
        provenance=_provenance(views),
    )


def _load_template() -> "Template":
    with needed("a report needs jinja2", "libero"):
        import jinja2
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("deft_libero.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(tick=tick_text, interval=interval_text)
    return templates.get_template("page.html")


def _badges(views: Sequence[View]) -> Iterator[str]:
    for assets in dict.fromkeys(view.run.header.assets for view in views):
        yield f"assets: {assets}"
    for policy in dict.fromkeys(_policy(view) for view in views):
        yield f"policy: {policy}"
    if any(view.run.has_torn_line for view in views):
        yield "still being written, or cut short"


def _policy(view: View) -> str:
    header = view.run.header
    if header.server:
        return header.server.get("policy", "unknown")
    chosen = header.options.get("policy", "unknown")
    return f"a server of {header.options.get('profile')}" if chosen == "server" else chosen


def _acts_at_once(view: View) -> bool:
    """Whether its passes can be drawn token by token: of a text there are hundreds."""
    speculation = view.summary.speculation
    return speculation is not None and speculation.thinking is None


def _facts(summary: RunSummary) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Name, value and small print of the numbers that matter most."""
    trip, speculation = summary.round_trip, summary.speculation
    if trip.count:
        spread = (f"p95 {trip.p95:.1f}", f"p99 {trip.p99:.1f}")
        yield "median round trip", f"{trip.p50:.1f} ms", spread
        rate = "fresh actions a second" if summary.is_real_time else "actions a second"
        yield rate, f"{summary.control_rate:.1f}", ()
    if speculation is not None:
        yield "passes per action", f"{speculation.passes_per_action:.2f}", ()
        yield "committed length", f"{speculation.committed_length:.2f}", ()
        yield "relaxed share", f"{100 * speculation.relaxed_share:.1f}%", ()
        if (found := speculation.thinking) is not None:
            spent = (f"{found.text_ms:.1f} ms",), (f"{found.action_ms:.1f} ms",)
            yield "passes for the text", f"{found.text_passes:.2f}", spent[0]
            yield "passes for the action", f"{found.action_passes:.2f}", spent[1]
    if summary.is_real_time:
        yield "held steps", f"{100 * summary.held_share:.1f}%", ()
        yield "late simulator steps", f"{100 * summary.late_share:.1f}%", ()
        inside = (f"{summary.seams.inside:.2f} inside chunks",)
        yield "largest step", f"{summary.seams.commanded:.2f}", inside


def _tasks(views: Sequence[View]) -> list[tuple[tuple[str, int], str]]:
    """Suite and number, and instruction, of every task that was played."""
    tasks = [task for view in views for task in view.summary.tasks.items()]
    return sorted({key: task.instruction for key, task in tasks}.items())


def stage_parts(summary: RunSummary) -> dict[str, float]:
    """The mean round trip in milliseconds, split into stages that add up to it."""
    means = {stage: spread.mean for stage, spread in summary.stages.items()}
    parts = {
        stage.removesuffix("_ms"): mean for stage, mean in means.items() if stage not in _WHOLE
    }
    total, trip = means.get("total_ms", 0.0), means.get("round_trip_ms", 0.0)
    inside = sum(parts.values())
    parts["rest of the server"] = max(0.0, total - inside)
    parts["network and client"] = max(0.0, trip - max(total, inside))
    return {name: value for name, value in parts.items() if value > 0}


def _over_time(views: Sequence[View]) -> LinePlot:
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
    x = axis_of(
        "episode, in the order of playing", [point[0] for line in lines for point in line.points]
    )
    y = axis_of("ms", [point[1] for line in lines for point in line.points], from_zero=True)
    return LinePlot("Round trip of an answer: median, and dashed the 95th percentile", lines, x, y)


def _by_start(views: Sequence[View]) -> BarPlot:
    def bars(view: View, found: Speculation) -> Iterator[tuple[int, Bar]]:
        for token, (mean, count) in found.committed_by_start.items():
            if token < _MAX_STARTS:  # a reasoning has hundreds of tokens
                hint = f"{view.name}: {count} passes drafted from token {token}"
                yield token, Bar(mean, f"{mean:.1f}", view.style, hint)

    title = "Committed length of the passes whose first guess stands there"
    return BarPlot(title, _grouped(views, bars), "token of the answer", "tokens")


def _by_accepted(views: Sequence[View]) -> BarPlot:
    def bars(view: View, found: Speculation) -> Iterator[tuple[int, Bar]]:
        for length, count in found.accepted_counts.items():
            share = 100 * found.share_of_length(length)
            hint = f"{view.name}: {count} of {found.num_checked} passes with guesses"
            yield length, Bar(share, f"{share:.0f}", view.style, hint)

    title = "Passes that had guesses, by how many of them they accepted"
    return BarPlot(title, _grouped(views, bars), "guesses accepted", "% of these passes")


def _grouped(
    views: Sequence[View], bars: Callable[[View, Speculation], Iterator[tuple[int, Bar]]]
) -> dict[str, list[Bar]]:
    """The bars of all runs by their number, in its order."""
    groups: dict[int, list[Bar]] = defaultdict(list)
    for view in views:
        if _acts_at_once(view) and view.summary.speculation is not None:
            for number, bar in bars(view, view.summary.speculation):
                groups[number].append(bar)
    return {str(number): group for number, group in sorted(groups.items())}


def choose_episode(views: Sequence[View]) -> TrialKey | None:
    """The first trial that went differently in the runs; else the first that all of them have."""
    common = [{record.key: record for record in view.run.records if len(record.actions)}
              for view in views]  # fmt: skip
    keys = sorted(set.intersection(*(set(ones) for ones in common))) if common else []
    for key in keys:
        if len({ones[key].outcome for ones in common}) > 1:
            return key
    return keys[0] if keys else None


def _records_of(views: Sequence[View], key: TrialKey | None) -> list[tuple[View, EpisodeRecord]]:
    return [
        (view, record)
        for view in views
        for record in view.run.records
        if record.key == key and len(record.actions)
    ]


def _action_plots(drawn: Sequence[tuple[View, EpisodeRecord]]) -> list[LinePlot]:
    """The commands of one episode, a plot per dimension, a line per run."""
    plots = []
    for dimension, name in enumerate(_DIMENSIONS if drawn else ()):
        lines = [
            Line(view.name, list(enumerate(record.actions[:, dimension].tolist())), view.style)
            for view, record in drawn
        ]
        values = [value for line in lines for _, value in line.points]
        longest = float(max(len(line.points) for line in lines) - 1)
        x = axis_of("step", [0.0, longest], from_zero=True)
        plots.append(LinePlot(name, lines, x, axis_of("command", values)))
    return plots


def _doubts(views: Sequence[View]) -> list[str]:
    """One of each kind."""
    doubts = [one for view in views if view.speedup for one in view.speedup.doubts]
    return list({one.partition(" (")[0]: one for one in doubts}.values())


def _is_told(view: View) -> bool:
    return view.speedup is not None and not view.speedup.doubts


def _times(view: View) -> float:
    return view.speedup.times if view.speedup else 0.0


def _rate_of(racer: Racer) -> float:
    """How fast a video must play for its steps to take as long as they did."""
    return 1000 / VIDEO_FPS / racer.pace_ms


def _playback_speedup(racers: Sequence[Racer]) -> float:
    """How many times faster than true a trial is shown, as browsers play no rate whatever."""
    rates = [_rate_of(racer) for racer in racers]
    return max(_SLOWEST_RATE / min(rates), min(1.0, _FASTEST_RATE / max(rates)))


def _provenance(views: Sequence[View]) -> list[tuple[str, list[str]]]:
    """Everything that decides what the numbers mean: a name, and a value per run."""
    facts = [_run_facts(view.run) for view in views]
    names = dict.fromkeys(name for one in facts for name in one)
    return [(name, [one.get(name, "") for one in facts]) for name in names]


def _differs(name: str, values: Sequence[str]) -> bool:
    return len(set(values)) > 1 and name not in _OWN_FACTS


def _run_facts(run: RunResults) -> Mapping[str, str]:
    header = run.header
    return {
        "run": header.run,
        "started": header.created,
        "suite": header.suite,
        "assets": header.assets,
        **{name.replace("_", " "): value for name, value in header.options.items()},
        **{f"server: {name}": value for name, value in header.server.items()},
        **{f"version of {name}": value for name, value in header.versions.items()},
        **header.notes,
        "folder": str(run.folder),
    }
