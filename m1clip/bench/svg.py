"""Plots as inline SVG, by hand: bars with spread, stacked bars, lines. Colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 480  # user units: narrow, so that text stays readable on a phone
ROW, BAR = 40, 12
COLOURS = 8  # --c0 ... --c7 of the page


@dataclass(frozen=True)
class Bar:
    """One line of a bar chart."""

    label: str
    value: float
    low: float
    high: float
    text: str
    colour: int = 0


def bars(rows: Sequence[Bar], title: str) -> str:
    """Horizontal bars from 0 with a whisker from quartile to quartile; the label stands above its bar."""
    most = max(row.high for row in rows) or 1.0
    scale = (WIDTH - 8) / most
    parts = []
    for index, row in enumerate(rows):
        y = index * ROW
        parts.append(
            f'<text x="0" y="{y + 14}">{escape(row.label)}</text>'
            f'<text class="v" x="{WIDTH}" y="{y + 14}">{escape(row.text)}</text>'
            f'<rect x="0" y="{y + 20}" width="{max(1.5, row.value * scale):.1f}" height="{BAR}" rx="3" '
            f'style="fill:var(--c{row.colour % COLOURS})"><title>{escape(row.label)}: {escape(row.text)}</title></rect>'
            + _whisker(row.low * scale, row.high * scale, y + 20 + BAR / 2)
        )
    return _svg(len(rows) * ROW, title, parts)


def stacked(rows: Sequence[tuple[str, dict[str, float], str]], names: Sequence[str], title: str) -> str:
    """Horizontal bars made of parts: (label, value of each part, text at the right)."""
    most = max(sum(values.values()) for _, values, _ in rows) or 1.0
    scale = WIDTH / most
    parts = []
    for index, (label, values, text) in enumerate(rows):
        y, x = index * ROW, 0.0
        parts.append(f'<text x="0" y="{y + 14}">{escape(label)}</text>')
        parts.append(f'<text class="v" x="{WIDTH}" y="{y + 14}">{escape(text)}</text>')
        for colour, name in enumerate(names):
            width = values.get(name, 0.0) * scale
            if width > 0.2:
                share = values[name] / sum(values.values())
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 20}" width="{max(0.5, width - 1):.1f}" height="{BAR}" '
                    f'style="fill:var(--c{colour % COLOURS})"><title>{escape(name)}: {share:.0%}</title></rect>'
                )
            x += width
    return legend(names) + _svg(len(rows) * ROW, title, parts)


@dataclass(frozen=True)
class Line:
    """One line of a plot: points (x, y, low, high), and a model's curve as (x, y)."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    curve: Sequence[tuple[float, float]] = ()
    colour: int | None = None  # the same thing has one colour in all plots; None: by its place in this one


def lines(series: Sequence[Line], title: str, x_name: str, y_name: str, text: Callable[[float], str]) -> str:
    """Both axes logarithmic; points with their quartiles, joined by a line; a model's curve dashed."""
    height, left, bottom = 260, 54, 34
    xs = [p[0] for line in series for p in line.points]
    ys = [value for line in series for p in line.points for value in p[1:]]
    ys += [y for line in series for x, y in line.curve if min(xs) <= x <= max(xs)]
    x_axis, y_axis = _Axis(min(xs), max(xs), left, WIDTH - 8), _Axis(min(ys), max(ys), height - bottom, 8)
    parts = [_grid(x_axis, y_axis, height, left, bottom, text)]
    colours = [place if line.colour is None else line.colour for place, line in enumerate(series)]
    for colour, line in zip(colours, series, strict=True):
        style = f"stroke:var(--c{colour % COLOURS})"
        path = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y, _, _ in line.points)
        parts.append(f'<polyline class="line" points="{path}" style="{style}"/>')
        if line.curve:
            path = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in line.curve)
            parts.append(f'<polyline class="curve" points="{path}" style="{style}"/>')
        for x, y, low, high in line.points:
            parts.append(
                f'<line class="w" x1="{x_axis(x):.1f}" x2="{x_axis(x):.1f}" y1="{y_axis(low):.1f}" '
                f'y2="{y_axis(high):.1f}"/><circle cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="4" '
                f'style="fill:var(--c{colour % COLOURS})"><title>{escape(line.name)}, {x:g}: {escape(text(y))}'
                f"</title></circle>"
            )
    parts.append(
        f'<text class="a" x="{WIDTH - 8}" y="{height - 2}" text-anchor="end">{escape(x_name)}</text>'
    )
    parts.append(f'<text class="a" x="0" y="-6">{escape(y_name)}</text>')
    return legend([line.name for line in series], colours) + _svg(height, title, parts, top=18)


def legend(names: Sequence[str], colours: Sequence[int] | None = None) -> str:
    """A key of colours, as text that wraps."""
    keys = "".join(
        f'<span class="key"><i style="background:var(--c{index % COLOURS})"></i>{escape(name)}</span>'
        for index, name in zip(colours or range(len(names)), names, strict=True)
    )
    return f'<p class="legend">{keys}</p>'


class _Axis:
    """A logarithmic scale; a span of less than a factor 2 is widened, so that noise does not fill the plot."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if high < 2 * low:
            low, high = low / 1.4, high * 1.4
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + min(1.02, max(-0.02, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """1, 10, 100 ..., with 2 and 5 between where the span is short."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [tick for tick in found if self.low <= tick <= self.high]


def _grid(
    x_axis: _Axis, y_axis: _Axis, height: int, left: int, bottom: int, text: Callable[[float], str]
) -> str:
    parts = []
    for tick in x_axis.ticks():
        x = x_axis(tick)
        parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{height - bottom}"/>')
        parts.append(
            f'<text class="a" x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle">{tick:g}</text>'
        )
    for tick in y_axis.ticks():
        y = y_axis(tick)
        parts.append(f'<line class="g" x1="{left}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="a" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text(tick))}</text>'
        )
    return "".join(parts)


def _whisker(low: float, high: float, y: float) -> str:
    if high - low < 1:
        return ""
    ends = "".join(
        f'<line class="w" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + 4}"/>' for x in (low, high)
    )
    return f'<line class="w" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>{ends}'


def _svg(height: float, title: str, parts: Sequence[str], top: int = 0) -> str:
    return (
        f'<svg viewBox="0 {-top} {WIDTH} {height + top}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
