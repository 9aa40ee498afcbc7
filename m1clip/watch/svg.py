"""Plots as SVG text: they need no script, print sharply and weigh little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from m1clip.watch.words import number

COLOURS = ("#0b7285", "#d9480f", "#7048e8", "#2b8a3e", "#c2255c", "#b58100", "#1971c2", "#495057")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 28
MOST = 600  # points of a curve; more cannot be seen


@dataclass(frozen=True)
class Curve:
    """One line of a plot; `band` is (low, high) for each point."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False
    dots: bool = False
    band: Sequence[tuple[float, float]] | None = None


def plot(title: str, curves: Sequence[Curve], unit: str = "", log: bool = False, across: str = "step") -> str:
    """A figure with its title, or one that says that nothing was measured."""
    curves = [_clean(curve, log) for curve in curves]
    curves = [curve for curve in curves if curve.points]
    head = f"<figure class='plot'><figcaption>{escape(title)}</figcaption>"
    if not curves:
        return f"{head}<p class='none'>not measured in this run</p></figure>"
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    ys += [edge for curve in curves for pair in curve.band or () for edge in pair]
    scale = _Scale(min(xs), max(xs), *_padded(min(ys), max(ys), log), log)
    body = [_grid(scale, unit, across)]
    body += [_draw(curve, scale) for curve in curves]
    words = "; ".join(f"{c.name}: from {number(c.points[0][1])} to {number(c.points[-1][1])}" for c in curves)
    legend = "".join(_key(curve) for curve in curves) if len(curves) > 1 else ""
    return (
        f"{head}<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(f'{title}. {words}', quote=True)}'>"
        f"{''.join(body)}</svg><div class='key'>{legend}</div></figure>"
    )


@dataclass(frozen=True)
class _Scale:
    left: float
    right: float
    low: float
    high: float
    log: bool

    def x(self, value: float) -> float:
        width = self.right - self.left
        share = (value - self.left) / width if width else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values inside a range."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside a range; where there are few, also twice and five times."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tens = [10.0**power for power in powers if low <= 10.0**power <= high]
    if len(tens) >= 3:
        return tens
    finer = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [value for value in finer if low <= value <= high] or [low, high]


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return (low * 0.9, high * 1.1) if high > low else (low / 2, high * 2)
    room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _grid(scale: _Scale, unit: str, across: str) -> str:
    parts = []
    values = log_ticks(scale.low, scale.high) if scale.log else ticks(scale.low, scale.high)
    for value in values:
        y = scale.y(value)
        parts.append(f"<path class='g' d='M{LEFT} {y:.1f}H{WIDTH - RIGHT}'/>")
        parts.append(
            f"<text x='{LEFT - 6}' y='{y + 3.5:.1f}' text-anchor='end'>{number(value)}{escape(unit)}</text>"
        )
    for value in ticks(scale.left, scale.right, 4):
        parts.append(
            f"<text x='{scale.x(value):.1f}' y='{HEIGHT - BOTTOM + 15}' text-anchor='middle'>{number(value)}</text>"
        )
    parts.append(
        f"<text x='{WIDTH - RIGHT}' y='{HEIGHT - 2}' text-anchor='end' class='a'>{escape(across)}</text>"
    )
    parts.append(f"<path class='x' d='M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}'/>")
    return "".join(parts)


def _draw(curve: Curve, scale: _Scale) -> str:
    colour = COLOURS[curve.colour % len(COLOURS)]
    dash = "4 4" if curve.dashed else DASHES[curve.colour // len(COLOURS) % len(DASHES)]
    places = [(scale.x(x), scale.y(y)) for x, y in curve.points]
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    out = ""
    if curve.band:
        upper = [f"{x:.1f} {scale.y(high):.1f}" for (x, _), (_, high) in zip(places, curve.band, strict=True)]
        lower = [f"{x:.1f} {scale.y(low):.1f}" for (x, _), (low, _) in zip(places, curve.band, strict=True)]
        out += f"<path d='M{'L'.join([*upper, *reversed(lower)])}Z' fill='{colour}' fill-opacity='.14'/>"
    out += f"<path d='{line}' fill='none' stroke='{colour}' stroke-width='1.7'{_dash(dash)}/>"
    if curve.dots or len(places) == 1:
        out += "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' fill='{colour}'/>" for x, y in places)
    return out


def _dash(pattern: str) -> str:
    return f" stroke-dasharray='{pattern}'" if pattern else ""


def _key(curve: Curve) -> str:
    colour = COLOURS[curve.colour % len(COLOURS)]
    dash = "4 4" if curve.dashed else DASHES[curve.colour // len(COLOURS) % len(DASHES)]
    line = f"<path d='M0 3H22' stroke='{colour}' stroke-width='2.4'{_dash(dash)}/>"
    return f"<span><svg viewBox='0 0 22 6' class='k'>{line}</svg>{escape(curve.name)}</span>"


def _clean(curve: Curve, log: bool) -> Curve:
    """Finite points alone, no more than can be seen."""
    keep = [
        index for index, (x, y) in enumerate(curve.points)
        if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log)
    ]  # fmt: skip
    if len(keep) > MOST:
        keep = [keep[index * (len(keep) - 1) // (MOST - 1)] for index in range(MOST)]
    points = [curve.points[index] for index in keep]
    band = [curve.band[index] for index in keep] if curve.band and not log else None
    return Curve(curve.name, points, curve.colour, curve.dashed, curve.dots, band)


def bars(title: str, rows: Sequence[tuple[str, float, str]], top: float | None = None) -> str:
    """Horizontal bars: name, value, words."""
    if not rows:
        return ""
    most = top or max(value for _, value, _ in rows) or 1.0
    lines = []
    for name, value, words in rows:
        width = 100 * min(1.0, max(0.0, value / most))
        drawn = f"<rect width='100' height='8' class='t'/><rect width='{width:.1f}' height='8' fill='{COLOURS[0]}'/>"
        lines.append(_strip(name, "0 0 100 8", drawn, words))
    return _listed(title, lines)


def _strip(name: str, box: str, drawn: str, words: str) -> str:
    svg = f"<svg viewBox='{box}' preserveAspectRatio='none' aria-hidden='true'>{drawn}</svg>"
    return f"<tr><th scope='row'>{escape(name)}</th><td class='bar'>{svg}</td><td class='n'>{escape(words)}</td></tr>"


def _listed(title: str, lines: Sequence[str]) -> str:
    rows = "".join(lines)
    return f"<figure class='plot'><figcaption>{escape(title)}</figcaption><table class='bars'>{rows}</table></figure>"


def heat(title: str, rows: Sequence[tuple[str, Sequence[float], str]]) -> str:
    """One strip of colours a row, on a common logarithmic scale; the words stand at its end."""
    logs = [math.log10(v) for _, values, _ in rows for v in values if v > 0 and math.isfinite(v)]
    if not logs:
        return ""
    low, high = min(logs), max(logs)
    lines = []
    for name, values, words in rows:
        cells = []
        for index, value in enumerate(values):
            share = (math.log10(value) - low) / (high - low) if value > 0 and high > low else 0.0
            cells.append(f"<rect x='{index}' width='1.02' height='1' fill='{ramp(share)}'/>")
        lines.append(_strip(name, f"0 0 {max(1, len(values))} 1", "".join(cells), words))
    return _listed(title, lines)


RAMP = ((48, 18, 59), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))


def ramp(share: float) -> str:
    """A colour from dark blue to yellow, even to the eye."""
    place = min(0.9999, max(0.0, share)) * (len(RAMP) - 1)
    low = int(place)
    mix = (round(a + (b - a) * (place - low)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mix)
