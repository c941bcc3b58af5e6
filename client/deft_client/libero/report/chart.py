"""Plots as HTML with inline SVG, drawn here so that a report needs neither a library nor a network.

Marks are drawn in a stretched 100 x 100 box and every letter is HTML beside it: a plot fills any
width, and its text keeps its size on a telephone. Colours come from the style sheet, as classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_TICKS = 4
_MAX_POINTS = 400  # per line; more cannot be seen and only make the page heavy


@dataclass(frozen=True)
class Line:
    """One line of a plot; `style` is its class, such as `run0`."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str


@dataclass(frozen=True)
class Axis:
    """What an axis shows."""

    name: str
    low: float
    high: float

    def place(self, value: float) -> float:
        """Where a value lies, in percent from the low end."""
        return 100 * (value - self.low) / ((self.high - self.low) or 1.0)


def line_plot(title: str, lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """Lines over a common x axis; hovering shows the values."""
    paths = "".join(_path(line, x, y) for line in lines)
    grid = "".join(
        f'<line class="grid" x1="0" x2="100" y1="{100 - y.place(tick):.2f}" '
        f'y2="{100 - y.place(tick):.2f}"/>'
        for tick in ticks(y.low, y.high)
    )
    scale = f'data-x="{x.low:g} {x.high:g}" data-y="{y.low:g} {y.high:g}"'
    return (
        f'<figure class="plot" {scale} data-xname="{escape(x.name)}">'
        f"<figcaption>{escape(title)}</figcaption>"
        f'<div class="area"><div class="ylabels">{_labels(y, "bottom")}</div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{grid}{paths}</svg>'
        f'<div class="xlabels">{_labels(x, "left")}</div></div>'
        f'<div class="xname">{escape(x.name)}</div></figure>'
    )


@dataclass(frozen=True)
class Bar:
    """One bar; `hint` is what hovering shows."""

    value: float
    label: str
    style: str
    hint: str


def bar_plot(title: str, groups: Mapping[str, Sequence[Bar]], x_name: str) -> str:
    """Groups of upright bars, each with its label on top."""
    highest = max((bar.value for bars in groups.values() for bar in bars), default=0.0) or 1.0
    columns = []
    for name, bars in groups.items():
        drawn = "".join(
            f'<div class="bar" title="{escape(bar.hint)}"><b>{escape(bar.label)}</b>'
            f'<i class="{bar.style}" style="height:{100 * bar.value / highest:.2f}%"></i></div>'
            for bar in bars
        )
        columns.append(
            f'<div class="group"><div class="bars">{drawn}</div><span>{escape(name)}</span></div>'
        )
    return (
        f'<figure class="plot"><figcaption>{escape(title)}</figcaption>'
        f'<div class="groups">{"".join(columns)}</div>'
        f'<div class="xname">{escape(x_name)}</div></figure>'
    )


def interval_bar(share: float, low: float, high: float, style: str) -> str:
    """A lying bar from 0 to a share, with a whisker for its interval."""
    return (
        '<div class="track">'
        f'<i class="{style}" style="width:{100 * share:.2f}%"></i>'
        f'<u style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></u></div>'
    )


@dataclass(frozen=True)
class Part:
    """A part of a stacked bar."""

    name: str
    value: float
    style: str


def stacked_bar(parts: Sequence[Part], full: float) -> str:
    """Parts one after the other; `full` is the value that fills the width."""
    drawn = "".join(
        f'<i class="{part.style}" style="width:{100 * part.value / (full or 1.0):.3f}%" '
        f'title="{escape(part.name)}: {part.value:.2f} ms"></i>'
        for part in parts
        if part.value > 0
    )
    return f'<div class="stack">{drawn}</div>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names beside their colours: pairs of name and class."""
    items = "".join(f'<li><i class="{style}"></i>{escape(name)}</li>' for name, style in entries)
    return f'<ul class="legend">{items}</ul>'


def ticks(low: float, high: float) -> list[float]:
    """About four round numbers between low and high."""
    if not high > low:
        return [low]
    raw = (high - low) / _TICKS
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def axis_of(name: str, values: Sequence[float], from_zero: bool = False) -> Axis:
    """An axis that holds all values with a little air."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low = min(0.0, low)
    air = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return Axis(name, low if from_zero else low - air, high + air)


def _path(line: Line, x: Axis, y: Axis) -> str:
    step = max(1, math.ceil(len(line.points) / _MAX_POINTS))
    kept = list(line.points[::step])
    if len(kept) == 1:
        kept = kept * 2  # a line cap makes a single point visible
    placed = " ".join(
        f"{x.place(across):.2f},{100 - y.place(up):.2f}" for across, up in kept if math.isfinite(up)
    )
    return f'<polyline class="{line.style}" data-name="{escape(line.name)}" points="{placed}"/>'


def _labels(axis: Axis, side: str) -> str:
    return "".join(
        f'<span style="{side}:{axis.place(tick):.2f}%">{_number(tick)}</span>'
        for tick in ticks(axis.low, axis.high)
    )


def _number(value: float) -> str:
    text = f"{value:.10g}"
    return "0" if text in ("0", "-0") else text.replace("-", "−")
