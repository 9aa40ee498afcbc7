"""The tables of a report: figures against chance, differences between runs, published figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from m1clip.runlog import SELECTION
from m1clip.watch.history import PHASES, History
from m1clip.watch.prior_art import FIGURES, SOURCE, is_prior_art
from m1clip.watch.state import status_of
from m1clip.watch.words import chance, clock, duration, number, percent, size

Cell = str


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], kind: str = "") -> str:
    """An HTML table; cells are text and are escaped here."""
    top = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in head)
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body += f"<tr><th scope='row'>{escape(first)}</th>{cells}</tr>"
    return f"<table class='{kind}'><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def score_names(record: dict[str, Any]) -> list[str]:
    """The metrics of an end or evaluation record, in their order."""
    return [name for name in record if f"{name}/chance" in record]


def scores(history: History) -> tuple[str, dict[str, Any]]:
    """The final figures: of the test split where the run has finished, else of its best evaluation."""
    if history.end:
        return f"{history.end.get('split', 'test')} split, after training", history.end
    best = history.best()
    if best is not None:
        return f"{best.get('split', 'val')} split, best evaluation so far (step {best['step']:,})", best
    return "no evaluation yet", {}


def summary(histories: Sequence[History]) -> str:
    """Each metric with interval and chance; with several runs, one column a run and the difference to the first."""
    if len(histories) == 1:
        title, record = scores(histories[0])
        rows = [
            (
                SELECTION.get(name, name),
                _value(name, record),
                _interval(name, record),
                _chance(name, record),
                f"{record[f'{name}/n']:,}",
            )
            for name in score_names(record)
        ]
        head = ("metric", "value", "95% interval", "chance", "n")
        return f"<p class='note'>{escape(title)}</p>" + (table(head, rows, "figures") if rows else "")
    found = [scores(history) for history in histories]
    names = list(dict.fromkeys(name for _, record in found for name in score_names(record)))
    columns = ["metric", "chance", *[history.name for history in histories]]
    lines = []
    for name in names:
        first = found[0][1]
        cells = [
            SELECTION.get(name, name),
            next((_chance(name, record) for _, record in found if name in record), "-"),
        ]
        for _, record in found:
            cells.append(_difference(name, first, record))
        lines.append(cells)
    note = "; ".join(f"{h.name}: {title}" for h, (title, _) in zip(histories, found, strict=True))
    told = (
        "In brackets: the difference to the first run. A star marks one whose 95% intervals do not overlap; "
        "runs of different data or splits cannot be compared by it."
    )
    return f"<p class='note'>{escape(note)}. {told}</p>" + table(columns, lines, "figures")


def costs(histories: Sequence[History]) -> str:
    """State, steps, time, speed, memory, energy: one column a run."""
    rows: list[tuple[str, Callable[[History], str]]] = [
        ("state", lambda h: status_of(h).words),
        ("steps", lambda h: f"{h.step:,} of {h.total:,}"),
        (
            "time of training",
            lambda h: clock(v) if (v := (h.steps.last or {}).get("elapsed")) is not None else "-",
        ),
        ("pairs a second, median", lambda h: _median(h, "pairs_per_second", lambda v: f"{v:,.0f}")),
        ("a step, median", lambda h: _median(h, "step_seconds", duration)),
        ("share spent on data, median", lambda h: _median(h, "data_share", percent)),
        ("loss, first to last", lambda h: _ends(h, "loss")),
        ("temperature, first to last", lambda h: _ends(h, "temperature")),
        ("peak memory", lambda h: size(v) if (v := h.end.get("peak_bytes") or h.memory.get("peak")) else "-"),
        (
            "power, median",
            lambda h: _median(h, "watts", lambda v: f"{v:.1f} W") if _has(h, "watts") else "not measured",
        ),
        ("energy of an epoch", lambda h: _energy(h, "joules_per_epoch", "J")),
        ("mean recall for a watt-hour", lambda h: _energy(h, "recall_per_watt_hour", "points")),
    ]
    return table(
        ["", *[h.name for h in histories]],
        [(name, *[words(h) for h in histories]) for name, words in rows],
        "costs",
    )


def _energy(history: History, name: str, unit: str) -> str:
    """A figure of the end of a run, where there was a meter."""
    value = history.end.get(name)
    return f"{value:,.4g} {unit}" if isinstance(value, int | float) else "not measured"


def against_prior_art(history: History) -> str:
    """Published figures beside ours, for the job that repeats them; empty for another."""
    if not is_prior_art(history.config):
        return ""
    ours = _ours(history)
    rows = [(what, theirs, ours.get(key or "", "-")) for what, theirs, key in FIGURES]
    head = ("figure", "as published", f"{history.name}, measured")
    return f"<p class='note'>Published: {escape(SOURCE)}</p>" + table(head, rows, "figures")


def _ours(history: History) -> dict[str, str]:
    values: dict[str, str] = {"loss": _ends(history, "loss"), "temperature": _ends(history, "temperature")}
    values["step_seconds"] = _median(history, "step_seconds", duration)
    if history.steps.last and "elapsed" in history.steps.last:
        values["seconds"] = clock(history.steps.last["elapsed"])
    if peak := history.end.get("peak_bytes") or history.memory.get("peak"):
        values["peak"] = size(peak)
    name = "in_batch_12/accuracy"
    rows = [row for row in history.evaluations if f"{name}/chance" in row]
    if rows:
        values["in_batch"] = f"{_value(name, rows[-1])} [{_interval(name, rows[-1])}]"
        best = max(rows, key=lambda row: row[name])
        values["in_batch_best"] = f"{_value(name, best)} [{_interval(name, best)}]"
    shares = split_shares(history)
    values |= {f"share/{phase}": percent(share) for phase, share in shares.items()}
    watts = [row["watts"] for row in history.steps if "watts" in row]
    values["joules"] = "not measured"
    if watts and "seconds" in values and history.steps.last:
        epochs = history.recent[-1].get("epoch") if history.recent else None
        if epochs:
            values["joules"] = f"{statistics.mean(watts) * history.steps.last['elapsed'] / epochs:,.0f} J"
    return values


def split_shares(history: History) -> dict[str, float]:
    """Mean share of each phase of a step over the run; empty where it was not measured."""
    sums = {p: sum(row.get(f"seconds/{p}", 0.0) for row in history.steps) for p in PHASES}
    total = sum(sums.values())
    return {phase: value / total for phase, value in sums.items() if value > 0} if total else {}


def _value(name: str, record: dict[str, Any]) -> str:
    return number(record[name]) if _is_rank(name) else percent(record[name])


def _interval(name: str, record: dict[str, Any]) -> str:
    low, high = record[f"{name}/low"], record[f"{name}/high"]
    return f"{low:g} - {high:g}" if _is_rank(name) else f"{100 * low:.1f} - {100 * high:.1f}%"


def _chance(name: str, record: dict[str, Any]) -> str:
    return number(record[f"{name}/chance"]) if _is_rank(name) else chance(record[f"{name}/chance"])


def _is_rank(name: str) -> bool:
    return name.endswith("rank")


def _difference(name: str, first: dict[str, Any], record: dict[str, Any]) -> str:
    if name not in record:
        return "-"
    if record is first or name not in first:
        return _value(name, record)
    change = record[name] - first[name]
    apart = record[f"{name}/low"] > first[f"{name}/high"] or record[f"{name}/high"] < first[f"{name}/low"]
    words = f"{change:+g}" if _is_rank(name) else f"{100 * change:+.1f}"
    return f"{_value(name, record)} ({words}{' *' if apart else ''})"


def _has(history: History, name: str) -> bool:
    return any(name in row for row in history.steps)


def _median(history: History, name: str, words: Callable[[float], str]) -> str:
    values = [row[name] for row in history.steps if name in row]
    return words(statistics.median(values)) if values else "-"


def _ends(history: History, name: str) -> str:
    values = [row[name] for row in history.steps if name in row]
    return f"{number(values[0])} to {number(values[-1])}" if values else "-"
