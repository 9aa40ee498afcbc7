"""When to use which: model size against batch, each cell from a measurement or marked as not measured."""

from __future__ import annotations

from typing import Any

from m1clip.bench.crossover import Result
from m1clip.bench.verdict import name_of, ratio_words, usable

SIZES = (("tiny, below 10M", 0, 10e6), ("small, 10-100M", 10e6, 100e6), ("medium, 100-500M", 100e6, 500e6),
         ("large, above 500M", 500e6, float("inf")))  # fmt: skip
BATCHES = (
    ("batch 1-8", 1, 8),
    ("batch 9-64", 9, 64),
    ("batch 65-512", 65, 512),
    ("batch above 512", 513, 10**9),
)
NOT_MEASURED = "not measured here"


def usage_table(results: list[Result]) -> list[dict[str, Any]]:
    """Rows of cells: the fastest way that was measured there, against the next best device or precision."""
    rows = []
    for title, least, most in SIZES:
        cells = []
        for _, low, high in BATCHES:
            inside = [r for r in results if least <= r["parameters"] < most
                      and low <= r["candidate"]["batch"] <= high and usable(r)]  # fmt: skip
            cells.append(_cell(inside))
        rows.append({"size": title, "cells": cells})
    return rows


def _cell(results: list[Result]) -> str:
    """Ways are compared at one model and batch: the largest measured in the cell."""
    if not results:
        return NOT_MEASURED
    top = max(results, key=lambda r: (r["parameters"], r["candidate"]["batch"]))["candidate"]
    group = [r for r in results if all(r["candidate"][key] == top[key] for key in ("model", "batch"))]
    best = min(group, key=lambda r: r["seconds"]["median"])
    text = f"{name_of(best)} ({top['model']}, batch {top['batch']}"
    others = [r for r in group if r["candidate"]["device"] != best["candidate"]["device"]]
    others = others or [r for r in group if r["candidate"]["precision"] != best["candidate"]["precision"]]
    if others:
        rival = min(others, key=lambda r: r["seconds"]["median"])
        text += f": {ratio_words(rival, best)} than {name_of(rival)}"
    return f"{text})"
