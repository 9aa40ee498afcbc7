"""How long it will still take: from steps and evaluations that were measured, never from a guess."""

from __future__ import annotations

import statistics

from m1clip.watch.history import History


def step_seconds(history: History) -> float | None:
    """The median of the newest steps of this session."""
    values = [r["step_seconds"] for r in history.recent if isinstance(r.get("step_seconds"), int | float)]
    return statistics.median(values) if values else None


def seconds_left(history: History) -> float | None:
    """Steps still to do and evaluations on the way and at the end; None before the first measured step."""
    per_step = step_seconds(history)
    if per_step is None or not history.total or history.end:
        return None
    left = max(0, history.total - history.step)
    evaluations = [r["seconds"] for r in history.evaluations if isinstance(r.get("seconds"), int | float)]
    each = statistics.median(evaluations) if evaluations else 0.0
    every = history.setting("train", "eval_every", int) or history.total
    still = history.total // every - history.step // every + (history.total % every > 0)
    return left * per_step + (still + 1) * each  # and the test split at the end


def elapsed(history: History) -> float | None:
    """Seconds of training so far, over all sessions."""
    last = history.steps.last
    return None if last is None else last.get("elapsed")
