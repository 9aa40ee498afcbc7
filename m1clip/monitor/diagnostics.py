"""What the numbers mean, in plain words. Pure functions of a history: each has a test with records written by hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from m1clip.formatting import duration, percent, plural, size
from m1clip.monitor.history import History
from m1clip.runlog import SELECTION

Level = Literal["good", "note", "bad"]
DATA_SHARE = 0.10
SLOWER = 1.25
HOT = 90.0  # degrees Celsius
STALLED = 30.0  # seconds without a line, at least


@dataclass(frozen=True)
class Verdict:
    """One sentence, and how much it matters."""

    level: Level
    words: str


def verdicts(history: History, now: float, state: str) -> list[Verdict]:
    """All that can be said, the worst first."""
    found = [verdict for judge in JUDGES if (verdict := judge(history))]
    found += [verdict for verdict in (stalled(history, now, state), broken_off(history, state)) if verdict]
    order = {"bad": 0, "note": 1, "good": 2}
    return sorted(found, key=lambda verdict: order[verdict.level])


def not_a_number(history: History) -> Verdict | None:
    """NaN or infinity in the newest loss."""
    if history.recent and not _is_number(history.recent[-1].get("loss")):
        step = history.recent[-1]["step"]
        return Verdict("bad", f"the loss is not a number at step {step:,}: lower --lr, or train in fp32")
    return None


def data_bound(history: History) -> Verdict | None:
    """The device waits for batches."""
    shares = _values(history.recent, "data_fraction")
    if len(shares) < 2:
        return None
    share = statistics.mean(shares)
    if share < DATA_SHARE:
        return None
    workers = history.setting("data", "workers", int) or 0
    return Verdict(
        "bad" if share > 0.3 else "note",
        f"data is holding the device back: {percent(share, 0)} of each step; try --workers {2 * workers or 2}",
    )


def throttling(history: History) -> Verdict | None:
    """Steps that take longer than those at the start of this session."""
    first, last = _values(history.first[1:], "step_seconds"), _values(history.recent, "step_seconds")[-10:]
    if len(first) < 3 or len(last) < 3 or history.recent[-1]["step"] <= history.first[-1]["step"]:
        return None
    ratio = statistics.median(last) / statistics.median(first)
    if ratio < SLOWER:
        return None
    heat = _values(list(history.recent)[-1:], "celsius")
    why = (
        f"the machine is throttling at {heat[0]:.0f} °C"
        if heat and heat[0] >= HOT
        else "the machine is throttling, or busy with something else"
    )
    return Verdict("bad", f"{why}: steps {ratio:.1f}x slower than at the start")


def near_chance(history: History) -> Verdict | None:
    """The figure that chooses the best model cannot be told from pure chance."""
    row, name = history.evaluations.last, history.metric
    if row is None or not all(_is_number(row.get(f"{name}{part}")) for part in ("", "/low", "/chance")):
        return None
    if row[f"{name}/low"] > row[f"{name}/chance"]:
        return None
    return Verdict(
        "note",
        f"{SELECTION[name]} is within noise of chance: {percent(row[name])}, chance {percent(row[f'{name}/chance'])}",
    )


def loss_rises(history: History) -> Verdict | None:
    """The loss of the newest tenth stands clearly above the lowest it was."""
    losses = _values(history.steps, "loss")
    if len(losses) < 20:
        return None
    part = max(3, len(losses) // 10)
    means = [statistics.mean(losses[i : i + part]) for i in range(len(losses) % part, len(losses) - part + 1, part)]
    spread = statistics.pstdev(losses[-part:])
    if means[-1] > 1.1 * min(means) and means[-1] - min(means) > 2 * spread:
        words = f"the loss is rising: {means[-1]:.3g} now, {min(means):.3g} before; --lr may be too high"
        return Verdict("bad", words)
    return None


def no_longer_better(history: History) -> Verdict | None:
    """The figure that chooses the best model has not risen for three evaluations."""
    name = history.metric
    rows = [row for row in history.evaluations if _is_number(row.get(name))]
    if len(rows) < 4:
        return None
    best = max(range(len(rows)), key=lambda index: rows[index][name])
    stale = len(rows) - 1 - best
    if stale < 3:
        return None
    losses = _values(history.steps, "loss")
    since = [row["loss"] for row in history.steps if row["step"] >= rows[best]["step"] and _is_number(row.get("loss"))]
    by_heart = len(since) > 5 and statistics.mean(losses[-3:]) < 0.9 * statistics.mean(since[:3])
    words = f"{SELECTION[name]} has not risen for {stale} evaluations (best at step {rows[best]['step']:,})"
    return Verdict("note", words + (": it now learns the training images by heart" if by_heart else ""))


def gradients(history: History) -> Verdict | None:
    """Gradients far above their usual size, or none at all."""
    norms = _values(history.recent, "grad_norm")
    if len(norms) < 5:
        return None
    usual = statistics.median(norms)
    if norms[-1] > 10 * usual > 0:
        return Verdict("note", f"the gradient norm jumped to {norms[-1]:.3g}, {norms[-1] / usual:.0f} times the usual")
    if usual < 1e-7:
        return Verdict("bad", "the gradients have vanished: nothing is learned any more")
    return None


def temperature(history: History) -> Verdict | None:
    """The temperature stands at the end of its range."""
    values = _values(list(history.recent)[-3:], "temperature")
    if len(values) == 3 and max(values) <= 0.0101:
        return Verdict("note", "the temperature is at its limit of 0.01: the model is as sure as it can be")
    return None


def memory(history: History) -> Verdict | None:
    """Little memory is left; on the CPU alone, where the machine's memory is what counts."""
    facts = history.environment.get("facts")
    total: Any = facts.get("memory_bytes") if isinstance(facts, dict) else None
    used = _values(list(history.recent)[-1:], "memory_bytes")
    on_cpu = history.setting("train", "device", str) == "cpu"
    if not on_cpu or not _is_number(total) or not used or used[0] < 0.85 * total:
        return None
    return Verdict("bad", f"memory is nearly full: {size(used[0])} of {size(total)}; lower --batch-size")


def unreadable(history: History) -> Verdict | None:
    """Images that could not be read."""
    if not history.skipped:
        return None
    return Verdict("note", f"{plural(history.skipped, 'image')} could not be read; m1clip data lint says why")


def damaged_log(history: History) -> Verdict | None:
    """A log that cannot be opened, or lines of it that were skipped."""
    log = history.follower
    if log.problem:
        return Verdict("bad", f"{log.path.name} cannot be read: {log.problem}")
    if not log.invalid:
        return None
    return Verdict("note", f"{plural(log.invalid, 'invalid line')} of {log.path.name} skipped")


def learning(history: History) -> Verdict | None:
    """The good news: how far above chance it is, and how the loss moves."""
    row, name = history.evaluations.last, history.metric
    if row is not None and all(_is_number(row.get(f"{name}{part}")) for part in ("", "/low", "/chance")):
        times = row[name] / row[f"{name}/chance"] if row[f"{name}/chance"] else 0.0
        if row[f"{name}/low"] > row[f"{name}/chance"]:
            return Verdict("good", f"it learns: {SELECTION[name]} {percent(row[name])}, {times:,.0f} times chance")
    losses = _values(history.steps, "loss")
    if len(losses) >= 6 and (now := statistics.mean(losses[-3:])) < 0.98 * (then := statistics.mean(losses[:3])):
        return Verdict("good", f"the loss falls: {then:.3g} at first, {now:.3g} now")
    return None


def stalled(history: History, now: float, state: str) -> Verdict | None:
    """A process that lives but says nothing."""
    if state != "running" or not history.recent:
        return None
    every = history.setting("train", "log_every", int) or 10
    usual = statistics.median(_values(history.recent, "step_seconds") or [0.0]) * every
    quiet = now - history.last_time
    slow = [row["seconds"] for row in history.evaluations if _is_number(row.get("seconds"))]
    if quiet < max(STALLED, 5 * usual, 3 * max(slow, default=0.0)):
        return None
    return Verdict("bad", f"no news for {duration(quiet)}; a line usually comes every {duration(usual)}")


def broken_off(history: History, state: str) -> Verdict | None:
    """A run that can go on, and how."""
    if state not in ("died", "stopped"):
        return None
    level: Level = "bad" if state == "died" else "note"
    return Verdict(level, f"it {state} at step {history.step:,}; go on with: m1clip train --resume {history.run}")


JUDGES: tuple[Callable[[History], Verdict | None], ...] = (
    not_a_number, data_bound, throttling, near_chance, loss_rises, no_longer_better, gradients, temperature, memory,
    unreadable, damaged_log, learning,
)  # fmt: skip


def _values(rows: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if _is_number(row.get(name))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
