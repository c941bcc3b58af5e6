"""Plots as SVG files of their own: lines over a number, every colour also a marker of its own."""

from collections.abc import Iterator, Sequence
from html import escape

from deft_libero.report.chart import Axis, axis_of, tick_text

WIDTH, HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM, _LANE = 64, 16, 44, 84, 92
_COLOURS = ("#0b62a4", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0f766e")
_MARKERS = ("M-3-3h6v6h-6z", "M0-4l4 7h-8z", "M0-4l4 4-4 4-4-4z", "M-4 0a4 4 0 108 0a4 4 0 10-8 0z",
            "M-3-3l6 6M-3 3l6-6", "M0 4l4-7h-8z")  # fmt: skip
Points = Sequence[tuple[float, float]]


def line_plot(
    title: str, x_name: str, y_name: str, lines: Sequence[tuple[str, Points]], apart: bool = False
) -> str:
    """An SVG of lines by name; those without a point are left out.

    All are drawn in one field, or `apart`, each in one of its own, so that none hides another.
    """
    kept = [(name, points) for name, points in lines if points]
    x = axis_of(x_name, [across for _, points in kept for across, _ in points])
    y = axis_of(y_name, [up for _, points in kept for _, up in points], from_zero=True)
    body: list[str] = []
    top, bottom = _TOP, HEIGHT - _BOTTOM
    for number, (name, points) in enumerate(kept):
        if apart:
            top, bottom = _TOP + number * _LANE, _TOP + (number + 1) * _LANE - 24
            body += [*_field(x, y, top, bottom), _text(_LEFT + 6, top + 10, name)]
        else:
            body += _field(x, y, top, bottom) if number == 0 else ()
            across, up = _LEFT + 190 * (number % 3), HEIGHT - 30 + 18 * (number // 3)
            body += [_marker(number, across + 8, up - 4), _text(across + 20, up, name)]
        body += _line(number, points, x, y, top, bottom)
    height = bottom + 48 if apart else HEIGHT
    return _svg(title, height, [*body, *_x_axis(x, bottom)])


def _svg(title: str, height: int, body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">'
    )
    paper = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    name = f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>'
    return "\n".join([head, paper, name, *body, "</svg>"]) + "\n"


def _field(x: Axis, y: Axis, top: int, bottom: int) -> Iterator[str]:
    """Grid, ticks and name of the upright axis."""
    right, middle = WIDTH - _RIGHT, (top + bottom) // 2
    for tick in y.ticks:
        up = _up(y, tick, top, bottom)
        yield f'<path d="M{_LEFT} {up:.1f}H{right}" stroke="#ddd"/>'
        yield _text(_LEFT - 8, up + 4, tick_text(tick), 'text-anchor="end"')
    turned = f'text-anchor="middle" transform="rotate(-90 16 {middle})"'
    yield _text(16, middle, y.name, turned)
    yield f'<path d="M{_LEFT} {top}V{bottom}H{right}" stroke="#444" fill="none"/>'


def _x_axis(x: Axis, bottom: int) -> Iterator[str]:
    centred = 'text-anchor="middle"'
    for tick in x.ticks:
        yield _text(_across(x, tick), bottom + 16, tick_text(tick), centred)
    yield _text((_LEFT + WIDTH - _RIGHT) // 2, bottom + 34, x.name, centred)


def _line(number: int, points: Points, x: Axis, y: Axis, top: int, bottom: int) -> Iterator[str]:
    places = [(_across(x, across), _up(y, up, top, bottom)) for across, up in points]
    drawn = " ".join(f"{across:.1f},{up:.1f}" for across, up in places)
    style = f'fill="none" stroke-width="1.5" stroke="{_COLOURS[number % 6]}"'
    yield f'<polyline points="{drawn}" {style}/>'
    yield from (_marker(number, across, up) for across, up in places)


def _marker(number: int, across: float, up: float) -> str:
    colour, shape = _COLOURS[number % 6], _MARKERS[number % 6]
    place = f'transform="translate({across:.1f} {up:.1f})"'
    return f'<path class="mark" d="{shape}" {place} fill="{colour}" stroke="{colour}"/>'


def _text(across: float, up: float, text: str, style: str = "") -> str:
    return f'<text x="{across:.1f}" y="{up:.1f}" {style}>{escape(text)}</text>'


def _across(axis: Axis, value: float) -> float:
    return _LEFT + axis.place(value) / 100 * (WIDTH - _LEFT - _RIGHT)


def _up(axis: Axis, value: float, top: int, bottom: int) -> float:
    return bottom - axis.place(value) / 100 * (bottom - top)
