"""Text for the terminal (numbers, durations, sizes, tables), and parsing of typed quantities."""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from m1clip.errors import UserError

MISSING = "-"  # shown for None
MIN_PART = 4  # letters of a name that suggest a longer name which contains them
TYPO_SIMILARITY = 0.8  # of two names of which one is the other with a typing error


def did_you_mean(name: str, names: Iterable[str], suggestion: str = "", prefix: str = "") -> str:
    """Return the part of an error that suggests a name: `meant`, or the one most like `name`.

    "" if there is none.
    """
    names = list(names)
    similar = [suggestion] if suggestion else most_similar(name, names)
    if not similar:  # names that differ only in case, such as VIT-B-32
        similar = [candidate for candidate in names if candidate.lower() == name.lower()]
    if not similar and len(name) >= MIN_PART:  # multi for multi-positive
        similar = [candidate for candidate in names if name.lower() in candidate.lower()]
    return f": did you mean '{prefix}{similar[0]}'?" if similar else ""


def most_similar(name: str, names: Sequence[str]) -> list[str]:
    """At most one name that somebody may have meant: the right spelling, or a name that begins alike.

    Names that are the first words of the other one come before names with similar letters:
    --lr-rate means --lr and not --lora.
    """
    if typo := difflib.get_close_matches(name, names, n=1, cutoff=TYPO_SIMILARITY):
        return typo
    words = _words(name)
    beginnings = [
        candidate for candidate in names if words[: len(_words(candidate))] == _words(candidate)
    ]
    if beginnings:
        return [max(beginnings, key=len)]
    return difflib.get_close_matches(name, names, n=1)


def _words(name: str) -> list[str]:
    return re.split("[-_]", name.lower().lstrip("-"))


def one_line(text: str) -> str:
    """Make text from files, requests and other programs printable on one line.

    Control characters, which include escape sequences and line ends, and characters that change the
    direction of the text are shown as escapes: a name cannot move the cursor, color the terminal or
    hide a part of itself.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable(text: str) -> str:
    """Apply `one_line` to each line of a text."""
    return "\n".join(map(one_line, text.split("\n")))


def clock(seconds: float | None) -> str:
    """1:05, 2:03:09 or 3d 4h."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float | None) -> str:
    """A time with its unit: 6.2 µs, 85 ms, 2.57 s, 3:20."""
    if seconds is None or seconds >= 99.95:
        return clock(seconds)
    return _with_unit(seconds, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)), 0.1)


def size(count: float | None) -> str:
    """Bytes with their unit: 1.42 GB."""
    return _with_unit(
        count, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)), 0.9995
    )


def _with_unit(value: float | None, units: Sequence[tuple[str, float]], min_value: float) -> str:
    """Write three significant digits in the first unit that gives at least `min_value`."""
    if value is None:
        return MISSING
    suitable = [(unit, scale) for unit, scale in units if value >= min_value * scale]
    unit, scale = suitable[0] if suitable else units[-1]
    return f"{value / scale:.3g} {unit}"


def percent(fraction: float | None, digits: int = 1) -> str:
    """71.3%; below 1% with two significant digits, so that 1 of 5,000 does not become 0.0%."""
    if fraction is None:
        return MISSING
    return (
        f"{100 * fraction:.2g}%"
        if digits and 0 < abs(fraction) < 0.01
        else f"{100 * fraction:.{digits}f}%"
    )


def number(value: float | None) -> str:
    """Three significant digits: 0.0712, 3.14, 12,345, 5e-5."""
    if value is None:
        return MISSING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 0.001 <= abs(value) < 100_000:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def when(seconds: float) -> str:
    """The local time of day, with the date unless it is today's."""
    try:
        then = time.localtime(seconds)
        now = time.localtime()
    except (OverflowError, ValueError, OSError):  # out of range for the C library
        return "?"
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%d %b %H:%M", then)


def ago(seconds: float) -> str:
    """How long ago, roughly."""
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s ago"  # below 0: the clock was set back
    if seconds < 5400:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago" if seconds < 172_800 else f"{seconds / 86400:.0f} days ago"


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def plural(count: int, noun: str) -> str:
    """1 image, 2 images."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a text table; columns of numbers are right-aligned, the first and others left-aligned.

    An empty row becomes an empty line.
    """
    lines = [head, *([one_line(cell) for cell in row] for row in rows)]
    columns = [[row[index] for row in lines if row] for index in range(len(head))]
    widths = [max(map(len, column)) for column in columns]
    right = [
        index > 0 and all(cell[:1] in NUMERIC for cell in column[1:])
        for index, column in enumerate(columns)
    ]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, right, strict=bool(row))
        return "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in cells
        )

    return "\n".join(line(row).rstrip() for row in lines)


NUMERIC = tuple("0123456789+-.")


UNIT_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
UNIT_FACTORS |= {"KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30, "TI": 2.0**40}
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def amount(text: str, unit: str, option: str) -> float:
    """Parse a quantity such as 8GB; `unit` is B or FLOP, and optional after K, M, G, T."""
    match = re.fullmatch(
        rf"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGTP]?I?)({unit}(?:S|/S)?)?\s*", text.upper()
    )
    scale = UNIT_FACTORS.get(match.group(2)) if match else None
    # A bare number is rejected: 8, meant as 8 GB, would be eight bytes.
    if match is None or scale is None or not any(match.group(2, 3)) or float(match.group(1)) <= 0:
        raise UserError(f"{option} {text}: expected a number with a unit, such as 8G{unit}")
    return float(match.group(1)) * scale


class SaveInterval(NamedTuple):
    """How often a checkpoint is saved: every N steps, seconds or epochs; the other two are 0."""

    steps: int = 0
    seconds: float = 0.0
    epochs: float = 0.0


def save_interval(value: int | str, option: str) -> SaveInterval:
    """Parse a number of steps, a time (30s, 10m or 1h) or epochs (2e, 2ep or "2 epochs")."""
    text = str(value).strip().lower()
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(?:([smh])|\s?(e|ep|epochs?))", text, re.ASCII)
    if match is not None and float(match[1]) > 0:
        if match[3]:
            return SaveInterval(epochs=float(match[1]))
        return SaveInterval(seconds=float(match[1]) * SECONDS[match[2]])
    if re.fullmatch(r"\d{1,12}", text, re.ASCII) and not isinstance(value, bool):
        return SaveInterval(steps=int(text))
    raise UserError(
        f"{option} {value}: expected an integer number of steps, a time such as 30s, 10m or 1h, or"
        " epochs such as 2e"
    )
