"""Plots as SVG files of their own: lines over a number, every colour also a shape of its own."""

from collections.abc import Iterator, Sequence
from html import escape

from deft_client.libero.report.chart import Axis, Line, LinePlot, axis_of, tick_text

WIDTH, HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 84
_COLOURS = ("#0b62a4", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0f766e")
_DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3", "12 3")


def line_plot(
    title: str, x_name: str, lines: Sequence[tuple[str, list[tuple[float, float]]]]
) -> str:
    """An SVG of lines by name; those without a point are left out."""
    kept = [Line(name, points, "") for name, points in lines if points]
    x = axis_of(x_name, [across for line in kept for across, _ in line.points])
    y = axis_of("", [up for line in kept for _, up in line.points], from_zero=True)
    return "\n".join(_draw(LinePlot(title, kept, x, y))) + "\n"


def _draw(plot: LinePlot) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield f'<text x="{_LEFT}" y="22" font-size="14">{escape(plot.title)}</text>'
    yield from _grid(plot)
    for number, line in enumerate(plot.lines):
        style = f'stroke="{_COLOURS[number % 6]}" stroke-dasharray="{_DASHES[number % 6]}"'
        points = " ".join(f"{_across(plot.x, x):.1f},{_up(plot.y, y):.1f}" for x, y in line.points)
        yield f'<polyline points="{points}" fill="none" stroke-width="2" {style}/>'
        across, up = _LEFT + 190 * (number % 3), HEIGHT - 30 + 18 * (number // 3)
        yield f'<path d="M{across} {up - 4}h22" stroke-width="2" {style}/>'
        yield f'<text x="{across + 28}" y="{up}">{escape(line.name)}</text>'
    yield "</svg>"


def _grid(plot: LinePlot) -> Iterator[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for tick in plot.y.ticks:
        up = _up(plot.y, tick)
        yield f'<path d="M{_LEFT} {up:.1f}H{right}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">{tick_text(tick)}</text>'
    centred = 'text-anchor="middle"'
    for tick in plot.x.ticks:
        across = _across(plot.x, tick)
        yield f'<text x="{across:.1f}" y="{bottom + 16}" {centred}>{tick_text(tick)}</text>'
    middle = (_LEFT + right) // 2
    yield f'<text x="{middle}" y="{bottom + 34}" {centred}>{escape(plot.x.name)}</text>'
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" stroke="#444" fill="none"/>'


def _across(axis: Axis, value: float) -> float:
    return _LEFT + axis.place(value) / 100 * (WIDTH - _LEFT - _RIGHT)


def _up(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.place(value) / 100 * (HEIGHT - _TOP - _BOTTOM)
