"""Curves as text: two by four braille dots a letter, or plain letters where braille cannot be shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from m1clip.watch.words import number

Point = tuple[float, float]
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a braille letter
BRAILLE = 0x2800
BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = " .:-=+*#@"


def chart(
    points: Sequence[Point], width: int, height: int, braille: bool = True, log: bool = False
) -> list[str]:
    """`height` lines of `width` letters: a scale at the left, the curve beside it, first and last step below."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log)]
    if width < 12 or height < 2:
        return [" " * width] * height
    if not finite:
        blank = [" " * width for _ in range(height)]
        blank[height // 2] = "waiting for the first figures".center(width)[:width]
        return blank
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = (
            (low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9) if not log else (low / 2, high * 2)
        )
    labels = [number(high), number(_middle(low, high, log)), number(low)]
    gutter = max(len(label) for label in labels) + 1
    rows = height - 1
    body = _plot(finite, width - gutter, rows, low, high, braille, log)
    lines = []
    for row in range(rows):
        label = labels[0] if row == 0 else labels[2] if row == rows - 1 else ""
        if row == rows // 2 and rows > 4:
            label = labels[1]
        lines.append(f"{label:>{gutter - 1}} {body[row]}")
    first, last = f"{min(x for x, _ in finite):,.0f}", f"step {max(x for x, _ in finite):,.0f}"
    room = width - gutter
    axis = f"{first}{last:>{room - len(first)}}" if room > len(first) + len(last) else last.rjust(room)
    return [*lines, " " * gutter + axis[:room]]


def _middle(low: float, high: float, log: bool) -> float:
    return math.sqrt(low * high) if log else (low + high) / 2


def _plot(
    points: Sequence[Point], width: int, height: int, low: float, high: float, braille: bool, log: bool
) -> list[str]:
    across, down = (2, 4) if braille else (1, 1)
    columns, rows = width * across, height * down
    left, right = min(x for x, _ in points), max(x for x, _ in points)

    def place(y: float) -> int:
        share = (math.log(y / low) / math.log(high / low)) if log else (y - low) / (high - low)
        return round((1 - min(1.0, max(0.0, share))) * (rows - 1))

    dots = [[False] * columns for _ in range(rows)]
    before: tuple[int, int] | None = None
    for x, y in points:
        column = round((x - left) / (right - left) * (columns - 1)) if right > left else 0
        row = place(y)
        if before is not None:
            _line(dots, before, (column, row))
        dots[row][column] = True
        before = (column, row)
    if not braille:
        return ["".join("*" if dot else " " for dot in line) for line in dots]
    # An empty braille letter is drawn as eight faint rings by some fonts: a space is none.
    return [
        "".join(
            chr(
                BRAILLE
                + sum(DOTS[r][c] for r in range(4) for c in range(2) if dots[4 * row + r][2 * column + c])
            )
            for column in range(width)
        ).replace(chr(BRAILLE), " ")
        for row in range(height)
    ]


def _line(dots: list[list[bool]], start: tuple[int, int], stop: tuple[int, int]) -> None:
    steps = max(abs(stop[0] - start[0]), abs(stop[1] - start[1]))
    for index in range(1, steps):
        column = round(start[0] + (stop[0] - start[0]) * index / steps)
        row = round(start[1] + (stop[1] - start[1]) * index / steps)
        dots[row][column] = True


def meter(share: float, width: int, unicode: bool = True) -> str:
    """A bar of a share between 0 and 1, to the eighth of a letter."""
    share = min(1.0, max(0.0, share))
    if not unicode:
        full = round(share * width)
        return "#" * full + "." * (width - full)
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    part = "▏▎▍▌▋▊▉"[rest - 1] if rest else ""
    return "█" * full + part + "░" * (width - full - len(part))


def sparks(values: Sequence[float], top: float = 1.0, unicode: bool = True) -> str:
    """One letter a value, by its height."""
    blocks = BLOCKS if unicode else PLAIN_BLOCKS
    return "".join(blocks[min(8, max(0, round(8 * value / top)))] if top else " " for value in values)
