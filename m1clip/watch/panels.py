"""The lower half of the terminal's picture: figures, time split, machine, events."""

from __future__ import annotations

import math
from typing import Any

from m1clip.runlog import SELECTION, Record, selection_name
from m1clip.watch.chart import meter, sparks
from m1clip.watch.history import PHASES, History
from m1clip.watch.line import Line
from m1clip.watch.words import duration, number, percent, size, when

SHOWN_CORES = 8  # with a bar each; more are one letter each


def titled(words: str, width: int, unicode: bool) -> Line:
    """A rule with a name in it."""
    dash = "─" if unicode else "-"
    return [(f"{dash} ", "dim"), (words, "bold"), (f" {dash * max(0, width - len(words) - 3)}", "dim")]


def figures(history: History, width: int) -> list[Line]:
    """The newest numbers: in one line where it is wide, else in two."""
    last: Record = history.recent[-1] if history.recent else (history.steps.last or {})
    evaluation = history.evaluations.last or {}
    best = history.best()
    speed = _figure("speed", last.get("pairs_per_second"), lambda value: f"{value:,.0f} pairs/s")
    first: Line = [*_figure("loss", last.get("loss"), number), *_score(history.metric, evaluation)]
    if best is not None and best.get("step") != evaluation.get("step"):
        first += _figure(f"best so far (step {best['step']:,})", best.get(history.metric), percent)
    first += speed
    second = [
        *_figure("learning rate", last.get("lr"), number),
        *_figure("temperature", last.get("temperature"), number),
        *_figure("gradient", last.get("grad_norm"), number),
        *_figure("epoch", last.get("epoch"), lambda value: f"{value:.1f}"),
    ]
    return [[*first, *second]] if width >= 150 else [first, second]


def _figure(name: str, value: Any, words: Any) -> Line:
    if value is None:
        return []
    shown = words(value) if isinstance(value, int | float) else str(value)
    return [(f" {name} ", "dim"), (shown, "bold"), (" ", "")]


def _score(name: str, row: dict[str, Any]) -> Line:
    if not isinstance(row.get(name), int | float):
        return []
    low, high = row.get(f"{name}/low"), row.get(f"{name}/high")
    span = f" [{100 * low:.1f}, {100 * high:.1f}]" if low is not None and high is not None else ""
    return [(f" {SELECTION[name]} ", "dim"), (percent(row[name]), "bold"), (f"{span} ", "dim")]


def split(history: History, width: int, solid: bool) -> list[Line]:
    """Where the time of a step goes: a bar in which each part is as wide as its share, and the shares.

    `solid` needs colours to tell the parts apart; without them each is drawn with its first letter.
    """
    rows = [
        record["seconds"] for record in list(history.recent)[-10:] if isinstance(record.get("seconds"), dict)
    ]
    mean = {
        name: sum(row.get(name, 0.0) for row in rows) / len(rows)
        for name in PHASES
        if any(name in row for row in rows)
    } if rows else {}  # fmt: skip
    total = sum(mean.values())
    if total <= 0:
        return []
    words: Line = [(f" {duration(total)} ", "bold")]
    for name, value in mean.items():
        words += [(f" {name} ", name), (percent(value / total, 0), "")]
    bar: Line = [(" ", "")]
    done = 0
    begin = 0.0
    for name, value in mean.items():
        begin += value
        cells = round(begin / total * (width - 2)) - done
        bar.append((("█" if solid else name[0].upper()) * cells, name))
        done += cells
    return [words, bar]


def machine(history: History, width: int, unicode: bool) -> list[Line]:
    """Memory, cores, power and heat; what has no meter is said to have none."""
    last: Record = history.recent[-1] if history.recent else {}
    line: Line = []
    used = last.get("memory_bytes")
    facts = history.environment.get("facts")
    total = facts.get("memory_bytes") if isinstance(facts, dict) else None
    if isinstance(used, int | float):
        line += [(" memory ", "dim"), (size(used), "bold")]
        if isinstance(total, int | float) and history.setting("train", "device", str) == "cpu":
            line.append((f" of {size(total)}", "dim"))
    cores = [value for value in last.get("cores") or [] if isinstance(value, int | float)]
    if cores:
        line.append(("  cores ", "dim"))
        if len(cores) <= SHOWN_CORES and width >= 60 + 11 * len(cores):
            for value in cores:
                line += [(meter(value / 100, 5, unicode), ""), (f" {value:.0f}% ", "dim")]
        else:
            line += [(sparks([value / 100 for value in cores], unicode=unicode), ""),
                     (f" {sum(cores) / len(cores):.0f}% ", "dim")]  # fmt: skip
    watts, celsius = last.get("watts"), last.get("celsius")
    if isinstance(watts, int | float):
        line += [("  power ", "dim"), (f"{watts:.1f} W", "bold")]
    if isinstance(celsius, int | float):
        line += [("  heat ", "dim"), (f"{celsius:.0f} °C", "bold")]
    missing = [
        name for name, value in (("power", watts), ("heat", celsius)) if not isinstance(value, int | float)
    ]
    if last and missing:
        line.append((f"  {' and '.join(missing)} not measured", "dim"))
    return [line] if line else []


def events(history: History, most: int, width: int) -> list[Line]:
    """What happened last, the newest at the top."""
    lines: list[Line] = []
    rows = [*history.events, *list(history.evaluations)[-most:], *([history.end] if history.end else [])]
    rows.sort(key=lambda record: record.get("time") or 0.0, reverse=True)
    for record in rows[:most]:
        moment = record.get("time")
        stamp = when(moment) if isinstance(moment, int | float) and math.isfinite(moment) else "?"
        lines.append(
            [
                (f" {stamp:>5} ", "dim"),
                (told(record), "note" if record["kind"] in ("warning", "skipped") else ""),
            ]
        )
    return lines + [[] for _ in range(most - len(lines))]


def told(record: Record) -> str:
    """An event in words."""
    kind, step = record["kind"], record.get("step")
    at = f" at step {step:,}" if isinstance(step, int) else ""
    if kind == "eval":
        return f"evaluated{at}" + _told_score(record, ": ")
    if kind == "start":
        return f"started{at if step else ''}, {record.get('steps', '?'):,} steps in all" if isinstance(
            record.get("steps"), int) else f"started{at}"  # fmt: skip
    if kind == "checkpoint":
        return f"checkpoint saved{at}"
    if kind == "end":
        where = f": {record.get('split')} "
        return f"finished{at}{_told_score(record, where)}"
    if kind == "event":
        reason = f": {record['reason']}" if "reason" in record else ""
        return f"{record.get('event', 'event')}{at}{reason}"
    if kind == "warning":
        return f"warning: {record.get('text', '')}"
    if kind == "skipped":
        return f"could not read {record.get('where', 'a picture')}"
    if kind == "parity":
        difference = record.get("gradient_difference")
        return (
            f"gradients differ from the CPU's by {difference}" if difference is not None else "parity checked"
        )
    return kind


def _told_score(record: Record, before: str) -> str:
    name = selection_name(record)
    value = record.get(name)
    return f"{before}{SELECTION[name]} {percent(value)}" if isinstance(value, int | float) else ""
