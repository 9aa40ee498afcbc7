"""Small pieces of HTML that the sections of the report are made of."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table that scrolls sideways by itself; cells are HTML already, columns in `numbers` stand right."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if index in numbers else ''}>{cell}</{tag}>" for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells([escape(name) for name in head], "th")}</tr>{body}</table></div>'


def figure(svg: str, caption: str) -> str:
    """A plot with a sentence under it."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def seconds(value: float | None) -> str:
    """Such as 2.57 s, 41.3 ms or 6.20 µs."""
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.0f} ns"


def size(value: float | None) -> str:
    """Such as 1.42 GB."""
    if value is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def percent(value: float | None) -> str:
    """Such as 71%; a difference far below that with two figures."""
    if value is None:
        return "-"
    return f"{value:.0%}" if value >= 0.1 else f"{value:.2g}" if value < 1e-3 else f"{value:.1%}"


def share(value: float | None) -> str:
    """A part of a whole: nobody wants to know how far below a thousandth it is."""
    return "under 0.1%" if value is not None and value < 1e-3 else percent(value)


def rate(value: float) -> str:
    """Pairs a second, or joules, with three figures and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
