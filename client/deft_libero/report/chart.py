"""Where the marks of a plot lie; how they look is the template's.

Marks are placed in a box of 100 x 100 that is stretched to the plot, with letters as HTML beside
it: a plot fills any width, and its text keeps its size on a telephone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_TICKS = 4
_MAX_POINTS = 400  # per line; more cannot be seen and only make the page heavy
_MAX_MARKERS = 50


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

    @property
    def ticks(self) -> list[float]:
        """About four round numbers between the ends."""
        if not self.high > self.low:
            return [self.low]
        raw = (self.high - self.low) / _TICKS
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True)
class LinePlot:
    """Lines over a common x axis."""

    title: str
    lines: Sequence[Line]
    x: Axis
    y: Axis

    def path(self, line: Line) -> str:
        """A line's points, as an SVG polyline has them."""
        return " ".join(f"{across:.2f},{up:.2f}" for across, up in self._places(line))

    def markers(self, line: Line) -> str:
        """A dot on every point, as an SVG path with round caps; none where they would touch."""
        if len(line.points) > _MAX_MARKERS:
            return ""
        return "".join(f"M{across:.2f} {up:.2f}h0" for across, up in self._places(line))

    def _places(self, line: Line) -> Iterator[tuple[float, float]]:
        step = max(1, math.ceil(len(line.points) / _MAX_POINTS))
        for across, up in line.points[::step]:
            if math.isfinite(up):
                yield self.x.place(across), 100 - self.y.place(up)


@dataclass(frozen=True)
class Bar:
    """One bar; `hint` is what hovering shows."""

    value: float
    label: str
    style: str
    hint: str


@dataclass(frozen=True)
class BarPlot:
    """Groups of upright bars by the name of the group."""

    title: str
    groups: Mapping[str, Sequence[Bar]]
    x_name: str
    y_name: str

    @property
    def highest(self) -> float:
        """The value that fills the height."""
        return max((bar.value for bars in self.groups.values() for bar in bars), default=0) or 1


def axis_of(name: str, values: Sequence[float], from_zero: bool = False) -> Axis:
    """An axis that holds all values with a little air."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low = min(0.0, low)
    air = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return Axis(name, low if from_zero else low - air, high + air)


def tick_text(value: float) -> str:
    """A tick as a reader wants it."""
    text = f"{value:.10g}"
    return "0" if text in ("0", "-0") else text.replace("-", "−")
