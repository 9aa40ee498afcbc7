"""Diagnostic messages about a run, as pure functions of its history."""

import statistics
from collections.abc import Callable
from typing import Literal, NamedTuple

from m1clip.analyses import ANALYSES
from m1clip.formatting import duration, number, percent, plural, size
from m1clip.monitor.history import History, numbers
from m1clip.runlog import SELECTION, Record, selection_name

DATA_FRACTION = 0.10  # of a step spent waiting for batches
SLOWER = 1.25  # times the first steps
HOT = 90.0  # degrees Celsius
STALLED = 30.0  # seconds without a line, at least
NEARLY_FULL = 0.85  # of the memory


class Diagnostic(NamedTuple):
    level: Literal["error", "warning", "good"]
    message: str


def diagnose(history: History, now: float, state: str) -> list[Diagnostic]:
    """All diagnostics that apply, the worst first."""
    diagnoses = [
        *(check(history) for check in CHECKS),
        *judged_analyses(history),
        stalled(history, now, state),
        interrupted(history, state),
    ]
    order = ("error", "warning", "good")
    present = [diagnosis for diagnosis in diagnoses if diagnosis]
    return sorted(present, key=lambda diagnosis: order.index(diagnosis.level))


def not_a_number(history: History) -> Diagnostic | None:
    if not history.latest.steps or numbers([history.newest], "loss"):
        return None
    step = f"{history.newest['step']:,}"
    return Diagnostic(
        "error", f"the loss is NaN or infinite at step {step}: lower --lr, or use --precision fp32"
    )


def data_bound(history: History) -> Diagnostic | None:
    fractions = numbers(history.latest.steps, "data_fraction")
    if len(fractions) < 2 or (fraction := statistics.mean(fractions)) < DATA_FRACTION:
        return None
    workers = 2 * (history.files.setting("data", "workers", int) or 1)
    message = (
        f"loading data takes {percent(fraction, 0)} of each step: the device waits; try --workers"
        f" {workers}"
    )
    return Diagnostic("error" if fraction > 0.3 else "warning", message)


def throttling(history: History) -> Diagnostic | None:
    first, last = (
        numbers(history.latest.first_steps[1:], "step_seconds"),
        numbers(history.latest.steps, "step_seconds")[-10:],
    )
    if (
        len(first) < 3
        or len(last) < 3
        or history.newest["step"] <= history.latest.first_steps[-1]["step"]
    ):
        return None
    ratio = statistics.median(last) / statistics.median(first)
    if ratio < SLOWER:
        return None
    hot = [celsius for celsius in numbers([history.newest], "celsius") if celsius >= HOT]
    cause = "throttling, or busy with other programs"
    if any(value > 0 for value in numbers(history.latest.steps, "throttled")):
        cause = "throttling, according to its sensors"
    if hot:
        cause = f"throttling at {hot[0]:.0f} °C"
    return Diagnostic(
        "error", f"steps are {ratio:.1f}x slower than at the start: the machine is {cause}"
    )


def straggler(history: History) -> Diagnostic | None:
    rows = [
        row["rank_seconds"] for row in list(history.latest.steps)[-10:] if row.get("rank_seconds")
    ]
    if len(rows) < 3 or len(rows[-1]) < 2 or len({len(row) for row in rows}) > 1:
        return None
    seconds = [statistics.median(step_times) for step_times in zip(*rows, strict=True)]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    ratio = seconds[slowest] / max(
        statistics.median(seconds[:slowest] + seconds[slowest + 1 :]), 1e-9
    )
    if ratio < SLOWER:
        return None
    return Diagnostic(
        "warning", f"rank {slowest} is {ratio:.1f}x slower than the others, which wait for it"
    )


def learning(history: History) -> Diagnostic | None:
    """How far the selection metric is above chance or, before the first evaluation, whether the
    loss is falling.
    """
    row, metric = history.evaluations.last or {}, history.metric
    if f"{metric}/chance" in row:
        value, chance, label = row[metric], row[f"{metric}/chance"], SELECTION[metric]
        if row[f"{metric}/low"] <= chance:
            message = (
                f"{label} is within noise of chance: {percent(value)}, chance {percent(chance)}"
            )
            return Diagnostic("warning", message)
        times = f", {value / chance:,.0f} times chance" if chance else ""
        return Diagnostic("good", f"the model is learning: {label} {percent(value)}{times}")
    losses = numbers(history.steps, "loss")
    if len(losses) < 6:
        return None
    then = statistics.mean(losses[:3])
    now = statistics.mean(losses[-3:])
    if not _has_fallen(then, now, 0.02):
        return None
    return Diagnostic("good", f"the loss is falling: {number(then)} at first, {number(now)} now")


def _has_fallen(before: float, after: float, fraction: float) -> bool:
    """Whether a loss, which may be below 0, has fallen by a fraction of its size."""
    return before - after > fraction * abs(before)


def loss_rises(history: History) -> Diagnostic | None:
    losses = numbers(history.steps, "loss")
    if len(losses) < 20:
        return None
    part = max(3, len(losses) // 10)
    means = [
        statistics.mean(losses[i : i + part])
        for i in range(len(losses) % part, len(losses) - part + 1, part)
    ]
    now, lowest = means[-1], min(means)
    is_noise = now - lowest <= 2 * statistics.pstdev(losses[-part:])
    if is_noise or not _has_fallen(-lowest, -now, 0.1):
        return None
    return Diagnostic(
        "error", f"the loss is rising: {number(now)} now, {number(lowest)} before; try a lower --lr"
    )


def no_longer_better(history: History) -> Diagnostic | None:
    best = history.best()
    if not best or (stale := history.evaluations.count_after(best["step"])) < 3:
        return None
    since = numbers((row for row in history.steps if row["step"] >= best["step"]), "loss")
    overfits = len(since) > 5 and _has_fallen(
        statistics.mean(since[:3]), statistics.mean(since[-3:]), 0.1
    )
    message = (
        f"{SELECTION[history.metric]} has not improved for {stale} evaluations (best at step"
        f" {best['step']:,})"
    )
    return Diagnostic(
        "warning", message + (": the model overfits the training images" if overfits else "")
    )


def memory(history: History) -> Diagnostic | None:
    """Little memory is left; on the CPU only, where the machine's memory is what counts."""
    used, total = numbers([history.newest], "memory_bytes"), history.files.machine_memory
    if not used or total is None or used[0] < NEARLY_FULL * total:
        return None
    return Diagnostic(
        "error", f"memory is nearly full: {size(used[0])} of {size(total)}; lower --batch-size"
    )


def judged_analyses(history: History) -> list[Diagnostic]:
    """What the rules of the table of analyses say about their values so far."""
    return [
        Diagnostic("warning", problem)
        for analysis in ANALYSES.values()
        for problem in analysis.problems(history.analysis(analysis), history)
    ]


def unreadable(history: History) -> Diagnostic | None:
    log = history.log
    name = log.path.name
    if log.problem:
        return Diagnostic("error", f"{name} cannot be read: {log.problem}")
    if log.invalid:
        return Diagnostic("warning", f"{plural(log.invalid, 'invalid line')} of {name} skipped")
    if history.skipped:
        images = plural(history.skipped, "image")
        return Diagnostic("warning", f"{images} could not be read; m1clip data lint shows why")
    return None


def stalled(history: History, now: float, state: str) -> Diagnostic | None:
    if state != "running" or len(history.latest.steps) < 2:
        return None
    every = max(1, history.latest.steps[-1]["step"] - history.latest.steps[-2]["step"])
    usual = statistics.median(numbers(history.latest.steps, "step_seconds") or [0.0]) * every
    silent = now - history.last_time
    if silent < max(
        STALLED, 5 * usual, *(3 * seconds for seconds in numbers(history.evaluations, "seconds"))
    ):
        return None
    return Diagnostic(
        "error", f"nothing logged for {duration(silent)}; usually every {duration(usual)}"
    )


def interrupted(history: History, state: str) -> Diagnostic | None:
    if state not in ("crashed", "stopped"):
        return None
    message = (
        f"{state} at step {history.step:,}; continue with: m1clip train --resume {history.run}"
    )
    return Diagnostic("error" if state == "crashed" else "warning", message)


CHECKS: tuple[Callable[[History], Diagnostic | None], ...] = (
    *(
        not_a_number,
        data_bound,
        throttling,
        straggler,
        learning,
        loss_rises,
        no_longer_better,
        memory,
        unreadable,
    ),
)


def describe(record: Record) -> str:
    step, steps = record.get("step"), record.get("steps")
    at = f" at step {step:,}" if step else ""
    metric = selection_name(record)
    score = f"{SELECTION[metric]} {percent(record[metric])}" if numbers([record], metric) else ""
    reason = record.get("reason")
    texts: dict[str, str] = {
        "eval": f"evaluated{at}" + (f": {score}" if score else ""),
        "start": f"started{at}" + (f", {plural(steps, 'step')} in total" if steps else ""),
        "checkpoint": f"checkpoint saved{at}",
        "end": f"finished{at}" + (f": {record.get('split')} {score}" if score else ""),
        "event": f"{record.get('event', 'event')}{at}" + (f": {reason}" if reason else ""),
        "warning": f"warning: {record.get('text', '')}",
        "skipped": f"could not read {record.get('where', 'an image')}",
        "parity": (
            "gradients compared with the CPU's: relative difference"
            f" {record.get('gradient_difference')}"
        ),
    }
    return texts[record["kind"]]
