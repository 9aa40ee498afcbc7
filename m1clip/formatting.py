"""Numbers as a person says them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any

from m1clip.errors import UserError


def clock(seconds: float) -> str:
    """1:05, 2:03:09 or 3d 4h."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """A short time with a unit: 85 ms, 2.6 s, 3:20."""
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 100 else clock(seconds)


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def percent(share: float, digits: int = 1) -> str:
    """A share between 0 and 1."""
    return f"{100 * share:.{digits}f}%"


def chance(share: float) -> str:
    """A small share with enough digits not to read as nothing."""
    return f"{100 * share:.2g}%"


def number(value: float) -> str:
    """A figure of any size in few letters."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 100_000 or magnitude < 0.001:
        text = f"{value:.1e}"
        return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if magnitude >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def when(seconds: float) -> str:
    """The local time of day, with the date unless it is today's."""
    try:
        then, now = time.localtime(seconds), time.localtime()
    except (OverflowError, ValueError, OSError):  # beyond the calendar of the C library
        return "?"
    same = then[:3] == now[:3]
    return time.strftime("%H:%M" if same else "%d %b %H:%M", then)


def ago(seconds: float) -> str:
    """How long ago, roughly."""
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s ago"  # below 0: the clock was set back meanwhile
    if seconds < 5400:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago" if seconds < 172_800 else f"{seconds / 86400:.0f} days ago"


def plural(count: int, noun: str) -> str:
    """1 image, 2 images."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
         "KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30, "TI": 2.0**40}  # fmt: skip
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def amount(text: str, unit: str, option: str) -> float:
    """The number behind such a text, in whole units; `unit` is B or FLOP, and may be left out after K, M, G, T."""
    found = re.fullmatch(rf"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGTP]?I?)({unit}(?:S|/S)?)?\s*", text.upper())
    scale = SCALE.get(found.group(2)) if found else None
    # A bare number is refused: 8 for 8 GB would be eight bytes.
    if found is None or scale is None or not any(found.group(2, 3)) or float(found.group(1)) <= 0:
        raise UserError(f"{option} {text}: give a number with a unit, such as 8G{unit}")
    return float(found.group(1)) * scale


def number_or_auto(hint: Any, tokens: Sequence[Any]) -> int:
    """For cyclopts: a whole number, or the word auto, which is 0."""
    value = str(tokens[0].value)
    if value == "auto":
        return 0
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{tokens[0].keyword or '--batch'} {value}: give a whole number, or auto") from None


def steps_or_seconds(value: int | str, option: str) -> tuple[int, float]:
    """(steps, 0.0) of a whole number, (0, seconds) of a time such as 30s, 10m or 1h."""
    text = str(value).strip().lower()
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", text, re.ASCII)
    if found is not None and float(found.group(1)) > 0:
        return 0, float(found.group(1)) * SECONDS[found.group(2)]
    if re.fullmatch(r"\d{1,12}", text, re.ASCII) and not isinstance(value, bool):
        return int(text), 0.0
    raise UserError(f"{option} {value}: give a whole number of steps, or a time such as 30s, 10m or 1h")


def steps_or_time(hint: Any, tokens: Sequence[Any]) -> int | str:
    """For cyclopts: a whole number of steps stays a number, a time stays as it was typed."""
    value = str(tokens[0].value)
    steps_or_seconds(value, str(tokens[0].keyword or "--save-every"))
    return int(value) if value.strip().isdecimal() else value.strip()
