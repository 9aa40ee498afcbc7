"""Diagnostic messages about a run, as pure functions of its history."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from m1clip.formatting import duration, number, percent, plural, size
from m1clip.monitor.history import History, numbers
from m1clip.runlog import SELECTION, Record, selection_metric

Level = Literal["error", "warning", "good"]
DATA_FRACTION = 0.10  # of a step spent waiting for batches
SLOWER = 1.25  # times the first steps
HOT = 90.0  # degrees Celsius
STALLED = 30.0  # seconds without a line, at least
NEARLY_FULL = 0.85  # of the memory


@dataclass(frozen=True)
class Diagnostic:
    """A message and its severity."""

    level: Level
    message: str


def diagnose(history: History, now: float, state: str) -> list[Diagnostic]:
    """All diagnostics that apply, the worst first."""
    found = [*(check(history) for check in CHECKS), stalled(history, now, state), interrupted(history, state)]
    order = ("error", "warning", "good")
    return sorted((each for each in found if each), key=lambda each: order.index(each.level))


def not_a_number(history: History) -> Diagnostic | None:
    """NaN or infinity in the newest loss."""
    if not history.recent or numbers([history.newest], "loss"):
        return None
    return Diagnostic(
        "error", f"the loss is not a number at step {history.newest['step']:,}: lower --lr, or use --precision fp32"
    )


def data_bound(history: History) -> Diagnostic | None:
    """The device waits for batches."""
    fractions = numbers(history.recent, "data_fraction")
    if len(fractions) < 2 or (fraction := statistics.mean(fractions)) < DATA_FRACTION:
        return None
    workers = 2 * (history.setting("data", "workers", int) or 0) or 2
    level: Level = "error" if fraction > 0.3 else "warning"
    return Diagnostic(
        level, f"loading data takes {percent(fraction, 0)} of each step: the device waits; try --workers {workers}"
    )


def throttling(history: History) -> Diagnostic | None:
    """Steps take longer than at the start of this session."""
    first, last = numbers(history.first[1:], "step_seconds"), numbers(history.recent, "step_seconds")[-10:]
    if len(first) < 3 or len(last) < 3 or history.newest["step"] <= history.first[-1]["step"]:
        return None
    ratio = statistics.median(last) / statistics.median(first)
    if ratio < SLOWER:
        return None
    hot = [celsius for celsius in numbers([history.newest], "celsius") if celsius >= HOT]
    cause = f"throttling at {hot[0]:.0f} °C" if hot else "throttling, or busy with other programs"
    return Diagnostic("error", f"steps are {ratio:.1f}x slower than at the start: the machine is {cause}")


def near_chance(history: History) -> Diagnostic | None:
    """The selection metric cannot be distinguished from chance."""
    value, low, chance = _score(history)
    if low is None or chance is None or low > chance:
        return None
    label = SELECTION[history.metric]
    return Diagnostic("warning", f"{label} is within noise of chance: {percent(value)}, chance {percent(chance)}")


def loss_rises(history: History) -> Diagnostic | None:
    """The recent loss is clearly above its minimum."""
    losses = numbers(history.steps, "loss")
    if len(losses) < 20:
        return None
    part = max(3, len(losses) // 10)
    means = [statistics.mean(losses[i : i + part]) for i in range(len(losses) % part, len(losses) - part + 1, part)]
    now, lowest = means[-1], min(means)
    if now <= 1.1 * lowest or now - lowest <= 2 * statistics.pstdev(losses[-part:]):
        return None
    return Diagnostic("error", f"the loss is rising: {number(now)} now, {number(lowest)} before; try a lower --lr")


def no_longer_better(history: History) -> Diagnostic | None:
    """The selection metric has not improved for three evaluations."""
    rows = [row for row in history.evaluations if numbers([row], history.metric)]
    if len(rows) < 4:
        return None
    best = max(range(len(rows)), key=lambda index: rows[index][history.metric])
    stale, step = len(rows) - 1 - best, rows[best]["step"]
    if stale < 3:
        return None
    since = numbers((row for row in history.steps if row["step"] >= step), "loss")
    overfits = len(since) > 5 and statistics.mean(since[-3:]) < 0.9 * statistics.mean(since[:3])
    message = f"{SELECTION[history.metric]} has not improved for {stale} evaluations (best at step {step:,})"
    return Diagnostic("warning", message + (": the model overfits the training images" if overfits else ""))


def gradients(history: History) -> Diagnostic | None:
    """Exploding or vanishing gradients."""
    norms = numbers(history.recent, "grad_norm")
    if len(norms) < 5:
        return None
    usual = statistics.median(norms)
    if norms[-1] > 10 * usual > 0:
        times = norms[-1] / usual
        return Diagnostic("warning", f"the gradient norm jumped to {number(norms[-1])}, {times:.0f} times its median")
    return Diagnostic("error", "the gradients have vanished: the model is not learning") if usual < 1e-7 else None


def temperature(history: History) -> Diagnostic | None:
    """The temperature has reached its limit."""
    values = numbers(list(history.recent)[-3:], "temperature")
    if len(values) < 3 or max(values) > 0.0101:
        return None
    return Diagnostic("warning", "the temperature has reached its lower limit of 0.01")


def memory(history: History) -> Diagnostic | None:
    """Little memory is left; on the CPU only, where the machine's memory is what counts."""
    facts = history.environment.get("facts")
    total = numbers([facts], "memory_bytes") if isinstance(facts, dict) else []
    used = numbers([history.newest], "memory_bytes")
    on_cpu = history.setting("train", "device", str) == "cpu"
    if not on_cpu or not total or not used or used[0] < NEARLY_FULL * total[0]:
        return None
    return Diagnostic("error", f"memory is nearly full: {size(used[0])} of {size(total[0])}; lower --batch-size")


def unreadable_images(history: History) -> Diagnostic | None:
    """Images that could not be read."""
    if not history.skipped:
        return None
    return Diagnostic("warning", f"{plural(history.skipped, 'image')} could not be read; m1clip data lint shows why")


def damaged_log(history: History) -> Diagnostic | None:
    """A log that cannot be opened or has invalid lines."""
    log = history.follower
    if log.problem:
        return Diagnostic("error", f"{log.path.name} cannot be read: {log.problem}")
    return (
        Diagnostic("warning", f"{plural(log.invalid, 'invalid line')} of {log.path.name} skipped")
        if log.invalid
        else None
    )


def learning(history: History) -> Diagnostic | None:
    """How far the selection metric is above chance, or how the loss is falling."""
    value, low, chance = _score(history)
    if value is not None and low is not None and chance is not None and low > chance:
        times = f", {value / chance:,.0f} times chance" if chance else ""
        return Diagnostic("good", f"the model is learning: {SELECTION[history.metric]} {percent(value)}{times}")
    losses = numbers(history.steps, "loss")
    if len(losses) >= 6 and (now := statistics.mean(losses[-3:])) < 0.98 * (then := statistics.mean(losses[:3])):
        return Diagnostic("good", f"the loss is falling: {number(then)} at first, {number(now)} now")
    return None


def stalled(history: History, now: float, state: str) -> Diagnostic | None:
    """A running process that has not logged anything for much longer than usual."""
    if state != "running" or not history.recent:
        return None
    last = numbers(history.recent, "step")[-2:]
    usual = statistics.median(numbers(history.recent, "step_seconds") or [0.0]) * max(last[-1] - last[0], 1)
    silent = now - history.last_time
    if silent < max(STALLED, 5 * usual, *(3 * seconds for seconds in numbers(history.evaluations, "seconds"))):
        return None
    return Diagnostic("error", f"nothing logged for {duration(silent)}; usually every {duration(usual)}")


def interrupted(history: History, state: str) -> Diagnostic | None:
    """A run that can be resumed, and how."""
    if state not in ("died", "stopped"):
        return None
    level: Level = "error" if state == "died" else "warning"
    return Diagnostic(level, f"{state} at step {history.step:,}; continue with: m1clip train --resume {history.run}")


CHECKS: tuple[Callable[[History], Diagnostic | None], ...] = (
    *(not_a_number, data_bound, throttling, near_chance, loss_rises, no_longer_better, gradients, temperature),
    *(memory, unreadable_images, damaged_log, learning),
)


def _score(history: History) -> tuple[float | None, ...]:
    """Value, lower end of the interval and chance level of the selection metric at the newest evaluation."""
    row = history.evaluations.last or {}
    found = [numbers([row], history.metric + part) for part in ("", "/low", "/chance")]
    return tuple(values[0] if values else None for values in found)


def describe(record: Record) -> str:
    """An event as text."""
    kind, step, steps = record["kind"], record.get("step"), record.get("steps")
    at = f" at step {step:,}" if isinstance(step, int) else ""
    metric = selection_metric(record)
    scores = numbers([record], metric)
    score = f"{SELECTION[metric]} {percent(scores[0])}" if scores else ""
    difference = record.get("gradient_difference")
    texts: dict[str, str] = {
        "eval": f"evaluated{at}" + (f": {score}" if score else ""),
        "start": f"started{at if step else ''}" + (f", {steps:,} steps in total" if isinstance(steps, int) else ""),
        "checkpoint": f"checkpoint saved{at}",
        "end": f"finished{at}" + (f": {record.get('split')} {score}" if score else ""),
        "event": f"{record.get('event', 'event')}{at}" + (f": {record['reason']}" if "reason" in record else ""),
        "warning": f"warning: {record.get('text', '')}",
        "skipped": f"could not read {record.get('where', 'an image')}",
        "parity": "parity checked" if difference is None else f"gradients differ from the CPU's by {difference}",
    }
    return texts.get(kind, str(kind))
