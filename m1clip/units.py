"""Amounts as people type them: 8GB, 2.6TFLOP, 512MiB; times: 30s, 10m, 1h."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from m1clip.errors import UserError

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
