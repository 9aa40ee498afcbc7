"""`m1clip report`: one HTML file that holds everything, opens without a network and prints well."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import json
import math
import shlex
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from m1clip.errors import UserError
from m1clip.formatting import clock, duration, number, percent, size
from m1clip.io import read_small, write_bytes
from m1clip.monitor.diagnostics import verdicts
from m1clip.monitor.history import PHASES, History, decline, read_snapshot, read_thumbnail, snapshot_steps
from m1clip.monitor.status import status_of
from m1clip.runlog import SELECTION

SOURCE = (
    'the public project "M1 CLIP training" (September 2025), run on an M1 MacBook Pro with 8 GB; figures as published. '
    "Its accuracy is inside batches of 12, where chance is 8.3%, and its validation had 24 images."
)
PRESET = "prior-art"
# (what, its figure, where ours comes from: a key of `ours` in report_tables, or None where there is no like)
FIGURES: tuple[tuple[str, str, str | None], ...] = (
    ("time of 15 epochs", "39 min", "seconds"),
    ("one step, batch 12", "7 to 9 s", "step_seconds"),
    ("loss, first to last", "3.25 to 1.89", "loss"),
    ("accuracy inside batches of 12, validation, last", "12.5%", "in_batch"),
    ("accuracy inside batches of 12, validation, best", "14.6%", "in_batch_best"),
    ("peak memory", "3 GB", "peak"),
    ("temperature, first to last", "0.07 to 0.18", "temperature"),
    ("share of a step: data", "4.4%", "share/data"),
    ("share of a step: forward", "40%", "share/forward"),
    ("share of a step: backward", "51.3%", "share/backward"),
    ("share of a step: optimizer", "4.3%", "share/optimizer"),
    ("energy an epoch", "5,460 J (35 W)", "joules"),
)


def is_prior_art(config: dict[str, object]) -> bool:
    """A run of that job: its model, batch and images, whatever was named on the command line."""
    model, data, train = (config.get(name) for name in ("model", "data", "train"))
    if not (isinstance(model, dict) and isinstance(data, dict) and isinstance(train, dict)):
        return False
    return (model.get("preset"), train.get("batch"), data.get("train_count")) == ("small", 12, 216)


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
        cells = [SELECTION.get(name, name), next((_chance(name, record) for _, record in found if name in record), "-")]
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
        ("time of training", lambda h: clock(v) if (v := (h.steps.last or {}).get("elapsed")) is not None else "-"),
        ("samples a second, median", lambda h: _median(h, "images_per_second", lambda v: f"{v:,.0f}")),
        ("a step, median", lambda h: _median(h, "step_seconds", duration)),
        ("share spent on data, median", lambda h: _median(h, "data_fraction", percent)),
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
        ["", *[h.name for h in histories]], [(name, *[words(h) for h in histories]) for name, words in rows], "costs"
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
    return number(record[f"{name}/chance"]) if _is_rank(name) else percent(record[f"{name}/chance"])


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


COLOURS = ("#0b7285", "#d9480f", "#7048e8", "#2b8a3e", "#c2255c", "#b58100", "#1971c2", "#495057")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 28
MOST = 600  # points of a curve; more cannot be seen


@dataclass(frozen=True)
class Curve:
    """One line of a plot; `band` is (low, high) for each point."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False
    dots: bool = False
    band: Sequence[tuple[float, float]] | None = None


def plot(title: str, curves: Sequence[Curve], unit: str = "", log: bool = False, across: str = "step") -> str:
    """A figure with its title, or one that says that nothing was measured."""
    curves = [_clean(curve, log) for curve in curves]
    curves = [curve for curve in curves if curve.points]
    head = f"<figure class='plot'><figcaption>{escape(title)}</figcaption>"
    if not curves:
        return f"{head}<p class='none'>not measured in this run</p></figure>"
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    ys += [edge for curve in curves for sample in curve.band or () for edge in sample]
    scale = _Scale(min(xs), max(xs), *_padded(min(ys), max(ys), log), log)
    body = [_grid(scale, unit, across)]
    body += [_draw(curve, scale) for curve in curves]
    words = "; ".join(f"{c.name}: from {number(c.points[0][1])} to {number(c.points[-1][1])}" for c in curves)
    legend = "".join(_key(curve) for curve in curves) if len(curves) > 1 else ""
    return (
        f"{head}<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(f'{title}. {words}', quote=True)}'>"
        f"{''.join(body)}</svg><div class='key'>{legend}</div></figure>"
    )


@dataclass(frozen=True)
class _Scale:
    left: float
    right: float
    low: float
    high: float
    log: bool

    def x(self, value: float) -> float:
        width = self.right - self.left
        share = (value - self.left) / width if width else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values inside a range."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside a range; where there are few, also twice and five times."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tens = [10.0**power for power in powers if low <= 10.0**power <= high]
    if len(tens) >= 3:
        return tens
    finer = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [value for value in finer if low <= value <= high] or [low, high]


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return (low * 0.9, high * 1.1) if high > low else (low / 2, high * 2)
    room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _grid(scale: _Scale, unit: str, across: str) -> str:
    parts = []
    values = log_ticks(scale.low, scale.high) if scale.log else ticks(scale.low, scale.high)
    for value in values:
        y = scale.y(value)
        parts.append(f"<path class='g' d='M{LEFT} {y:.1f}H{WIDTH - RIGHT}'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 3.5:.1f}' text-anchor='end'>{number(value)}{escape(unit)}</text>")
    for value in ticks(scale.left, scale.right, 4):
        parts.append(
            f"<text x='{scale.x(value):.1f}' y='{HEIGHT - BOTTOM + 15}' text-anchor='middle'>{number(value)}</text>"
        )
    parts.append(f"<text x='{WIDTH - RIGHT}' y='{HEIGHT - 2}' text-anchor='end' class='a'>{escape(across)}</text>")
    parts.append(f"<path class='x' d='M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}'/>")
    return "".join(parts)


def _draw(curve: Curve, scale: _Scale) -> str:
    colour = COLOURS[curve.colour % len(COLOURS)]
    dash = "4 4" if curve.dashed else DASHES[curve.colour // len(COLOURS) % len(DASHES)]
    places = [(scale.x(x), scale.y(y)) for x, y in curve.points]
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    out = ""
    if curve.band:
        upper = [f"{x:.1f} {scale.y(high):.1f}" for (x, _), (_, high) in zip(places, curve.band, strict=True)]
        lower = [f"{x:.1f} {scale.y(low):.1f}" for (x, _), (low, _) in zip(places, curve.band, strict=True)]
        out += f"<path d='M{'L'.join([*upper, *reversed(lower)])}Z' fill='{colour}' fill-opacity='.14'/>"
    out += f"<path d='{line}' fill='none' stroke='{colour}' stroke-width='1.7'{_dash(dash)}/>"
    if curve.dots or len(places) == 1:
        out += "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' fill='{colour}'/>" for x, y in places)
    return out


def _dash(pattern: str) -> str:
    return f" stroke-dasharray='{pattern}'" if pattern else ""


def _key(curve: Curve) -> str:
    colour = COLOURS[curve.colour % len(COLOURS)]
    dash = "4 4" if curve.dashed else DASHES[curve.colour // len(COLOURS) % len(DASHES)]
    line = f"<path d='M0 3H22' stroke='{colour}' stroke-width='2.4'{_dash(dash)}/>"
    return f"<span><svg viewBox='0 0 22 6' class='k'>{line}</svg>{escape(curve.name)}</span>"


def _clean(curve: Curve, log: bool) -> Curve:
    """Finite points alone, no more than can be seen."""
    keep = [
        index for index, (x, y) in enumerate(curve.points)
        if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log)
    ]  # fmt: skip
    if len(keep) > MOST:
        keep = [keep[index * (len(keep) - 1) // (MOST - 1)] for index in range(MOST)]
    points = [curve.points[index] for index in keep]
    band = [curve.band[index] for index in keep] if curve.band and not log else None
    return Curve(curve.name, points, curve.colour, curve.dashed, curve.dots, band)


def bars(title: str, rows: Sequence[tuple[str, float, str]], top: float | None = None) -> str:
    """Horizontal bars: name, value, words."""
    if not rows:
        return ""
    most = top or max(value for _, value, _ in rows) or 1.0
    lines = []
    for name, value, words in rows:
        width = 100 * min(1.0, max(0.0, value / most))
        drawn = f"<rect width='100' height='8' class='t'/><rect width='{width:.1f}' height='8' fill='{COLOURS[0]}'/>"
        lines.append(_strip(name, "0 0 100 8", drawn, words))
    return _listed(title, lines)


def _strip(name: str, box: str, drawn: str, words: str) -> str:
    svg = f"<svg viewBox='{box}' preserveAspectRatio='none' aria-hidden='true'>{drawn}</svg>"
    return f"<tr><th scope='row'>{escape(name)}</th><td class='bar'>{svg}</td><td class='n'>{escape(words)}</td></tr>"


def _listed(title: str, lines: Sequence[str]) -> str:
    rows = "".join(lines)
    return f"<figure class='plot'><figcaption>{escape(title)}</figcaption><table class='bars'>{rows}</table></figure>"


def heat(title: str, rows: Sequence[tuple[str, Sequence[float], str]]) -> str:
    """One strip of colours a row, on a common logarithmic scale; the words stand at its end."""
    logs = [math.log10(v) for _, values, _ in rows for v in values if v > 0 and math.isfinite(v)]
    if not logs:
        return ""
    low, high = min(logs), max(logs)
    lines = []
    for name, values, words in rows:
        cells = []
        for index, value in enumerate(values):
            share = (math.log10(value) - low) / (high - low) if value > 0 and high > low else 0.0
            cells.append(f"<rect x='{index}' width='1.02' height='1' fill='{ramp(share)}'/>")
        lines.append(_strip(name, f"0 0 {max(1, len(values))} 1", "".join(cells), words))
    return _listed(title, lines)


RAMP = ((48, 18, 59), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))


def ramp(share: float) -> str:
    """A colour from dark blue to yellow, even to the eye."""
    place = min(0.9999, max(0.0, share)) * (len(RAMP) - 1)
    low = int(place)
    mix = (round(a + (b - a) * (place - low)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mix)


RECALL, BACK = "text_to_image/recall@1", "image_to_text/recall@1"


def step_curve(history: History, name: str, colour: int, factor: float = 1.0) -> Curve:
    """A figure of the steps over the run."""
    return Curve(history.name, [(row["step"], factor * row[name]) for row in history.steps if name in row], colour)


def eval_curve(
    history: History, name: str, label: str, colour: int, band: bool = False, factor: float = 100.0
) -> Curve:
    """A figure of the evaluations, with its interval where asked."""
    rows = [row for row in history.evaluations if isinstance(_deep(row, name), int | float)]
    edges = None
    if band and rows and all(f"{name}/low" in row for row in rows):
        edges = [(factor * row[f"{name}/low"], factor * row[f"{name}/high"]) for row in rows]
    points = [(row["step"], factor * float(_deep(row, name))) for row in rows]
    return Curve(label, points, colour, dots=len(points) < 60, band=edges)


def curves(histories: Sequence[History]) -> str:
    """Loss, recall, temperature, rate, gradients, speed."""
    many = list(enumerate(histories))
    recall = [eval_curve(h, RECALL, h.name, i, band=True) for i, h in many]
    if len(histories) == 1:
        (history,) = histories
        recall = [
            eval_curve(history, RECALL, "text to image", 0, True),
            eval_curve(history, BACK, "image to text", 1, True),
        ]
        level = eval_curve(history, f"{RECALL}/chance", "chance", 7)
        recall.append(Curve("chance", level.points, 7, dashed=True))
    base = [eval_curve(h, "base", h.name, i) for i, h in many]
    for i, h in many:
        base.append(Curve(f"{h.name}, before", eval_curve(h, "base_before", "", i).points, i, dashed=True))
    kept = [curve for curve in base if curve.points]
    return "".join((
        plot("Loss", [step_curve(h, "loss", i) for i, h in many], log=True),
        plot(f"{best_title(histories)} on the validation split, with 95% interval: chooses the best model",
             [eval_curve(h, h.metric, h.name, i, band=True) for i, h in many], unit="%"),
        plot("Recall@1 on the validation split, with 95% interval", recall, unit="%"),
        plot("On the set that must not be forgotten (--retention-data)", kept, unit="%") if kept else "",
        plot("Temperature", [step_curve(h, "temperature", i) for i, h in many]),
        plot("Learning rate", [step_curve(h, "lr", i) for i, h in many]),
        plot("Gradient norm", [step_curve(h, "grad_norm", i) for i, h in many], log=True),
        plot("Pairs a second", [step_curve(h, "images_per_second", i) for i, h in many]),
    ))  # fmt: skip


def best_title(histories: Sequence[History]) -> str:
    """The names of the figures that choose the best models."""
    return " or ".join(dict.fromkeys(SELECTION[h.metric] for h in histories)).capitalize()


def learned(history: History) -> str:
    """What one run learned: difficulty, geometry, groups, length, decline."""
    last = history.evaluations.last or {}
    analysis: dict[str, Any] = last.get("analysis") or {}
    three = ("easy", "medium", "hard")
    out = [
        plot("Accuracy by similarity of the wrong caption",
             [eval_curve(history, f"analysis/difficulty/{name}", name, i) for i, name in enumerate(three)], "%"),
        plot("Accuracy against made-up negatives (a sample)",
             [eval_curve(history, f"analysis/negatives/{name}", name, i) for i, name in enumerate(three)], "%"),
        plot("Alignment, uniformity, gap between images and captions",
             [eval_curve(history, f"analysis/{key}", key.replace("_", " "), i, factor=1.0)
              for i, key in enumerate(("alignment", "uniformity_image", "uniformity_text", "modality_gap"))]),
        bars("Recall@1 by length of the caption", _shares(analysis.get("length")), 1.0),
        bars("Where the loss fell", [
            (p.name, max(0.0, p.share), f"{number(p.before)} to {number(p.after)}, {percent(p.share, 0)}")
            for p in decline([(r["step"], r["loss"]) for r in history.steps if "loss" in r], warmup_of(history))
        ], 1.0),
    ]  # fmt: skip
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for name, value, words in _shares(analysis.get("groups")):
        head, _, word = name.partition("/")
        groups.setdefault(head, []).append((word, value, words))
    for head, rows in groups.items():
        out.append(bars(f"Recall@1 by {head}", sorted(rows, key=lambda row: row[1]), 1.0))
    return "".join(out)


def layers(history: History) -> str:
    """Gradient flow: a strip of colours a layer, and the size of the last updates."""
    rows = [row["layers"] for row in history.layers if isinstance(row.get("layers"), dict)]
    if not rows:
        return "<p class='note'>no look at the layers in this run (--analysis-every 0)</p>"
    names = sorted(rows[-1], key=_by_number)
    return heat("Gradient norm by layer over the run (dark: small, bright: large), and the last", [
        (name, [float(row[name][0]) for row in rows if name in row], number(float(rows[-1][name][0]))) for name in names
    ]) + heat("Update against weight by layer, and the middle one of the run", [
        (name, [float(row[name][1]) for row in rows if name in row],
         number(float(rows[len(rows) // 2].get(name, [0, 0])[1])))
        for name in names
    ])  # fmt: skip


def machine(histories: Sequence[History]) -> str:
    """Time split, memory, energy, heat."""
    many = list(enumerate(histories))
    out = []
    for history in histories:
        mark = f", {history.name}" if len(histories) > 1 else ""
        shares = split_shares(history)
        out.append(
            bars(
                f"Where the time of a step goes{mark}",
                [(p, shares[p], percent(shares[p])) for p in PHASES if p in shares],
                1.0,
            )
        )
        parts = [(k, float(v), size(v)) for k, v in history.memory.items()
                 if k not in ("v", "time", "peak") and isinstance(v, int | float) and v > 0]  # fmt: skip
        out.append(bars(f"Memory by component, of a peak of {size(history.memory.get('peak', 0))}{mark}", parts))
    out.append(plot("Memory, GB", [step_curve(h, "memory_bytes", i, 1e-9) for i, h in many]))
    out.append(plot("Power, watts", [step_curve(h, "watts", i) for i, h in many]))
    out.append(plot("Heat, °C", [step_curve(h, "celsius", i) for i, h in many]))
    return "".join(out)


def warmup_of(history: History) -> int:
    """Steps of the warm-up, as the config says it: a share or a number."""
    warmup = history.setting("optim", "warmup", float) or 0
    return round(warmup * history.total) if warmup < 1 else round(warmup)


def _shares(values: Any) -> list[tuple[str, float, str]]:
    if not isinstance(values, dict):
        return []
    return [(name, value, f"{percent(value)} of {n:,}") for name, (value, n) in values.items()]


def _by_number(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition(" ")
    return (
        (head, int(tail))
        if tail.isdecimal() and len(tail) < 10
        else (name.replace("stem", "a").replace("head", "z"), 0)
    )


def _deep(row: dict[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    return value[0] if isinstance(value, list) and value else value


IMAGE_BYTES = 900_000  # of a retrieval grid; a larger one is made smaller
LARGEST = 5_000_000
GRIDS = 6  # runs whose images fit


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Read the runs and write the page."""
    histories = [History(run).poll_all() for run in runs]
    for history in histories:
        if not history.start:
            raise UserError(f"{history.run}: has not begun yet: its log is empty")
    page = _page(histories)
    if len(page) > LARGEST:
        page = _page(histories, images=False)
    write_bytes(out, page)
    return out


def _page(histories: Sequence[History], images: bool = True) -> bytes:
    style = (resources.files("m1clip.web") / "page" / "report.css").read_text(encoding="utf-8")
    names = ", ".join(history.name for history in histories)
    one = len(histories) == 1
    parts = [
        f"<header><h1>{escape(names)}</h1><p class='note'>m1clip {escape(str(histories[0].start.get('version', '')))}, "
        f"{time.strftime('%d %B %Y, %H:%M')}</p></header>",
        _section("Summary", _said(histories) + summary(histories) + "<h3>Cost</h3>" + costs(histories)),
    ]
    prior = "".join(against_prior_art(history) for history in histories)
    if prior:
        parts.append(_section("Against the published figures", prior))
    parts.append(_section("Curves", f"<div class='grid'>{curves(histories)}</div>"))
    for history in histories:
        mark = "" if one else f": {history.name}"
        parts.append(_section(f"What it learned{mark}", f"<div class='grid'>{learned(history)}</div>"))
        parts.append(_section(f"Gradient flow{mark}", f"<div class='grid'>{layers(history)}</div>"))
        if images and history in list(histories)[:GRIDS]:
            parts.append(_section(f"What it finds{mark}", _retrieval_grid(history) + _snapshot(history)))
    parts.append(_section("Time, memory, energy", f"<div class='grid'>{machine(histories)}</div>"))
    parts += [_section("Settings" + ("" if one else f": {h.name}"), _settings(h)) for h in histories]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
        "content='width=device-width, initial-scale=1'><meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>m1clip: {escape(names)}</title><style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
    ).encode("utf-8", "replace")  # the name of a folder may be no valid text


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _said(histories: Sequence[History]) -> str:
    lines = []
    for history in histories:
        mark = f"{history.name}: " if len(histories) > 1 else ""
        lines += [f"<li class='{v.level}'>{escape(mark + v.words)}</li>" for v in verdicts(history, 0.0, "finished")]
    return f"<ul class='verdicts'>{''.join(lines)}</ul>" if lines else ""


def _retrieval_grid(history: History) -> str:
    try:
        image = _embedded(read_small(history.run / "retrieval.png", inside=history.run))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"<p class='note'>retrieval.png left out: {escape(getattr(error, 'strerror', None) or str(error))}</p>"
    words = "Captions and the images they retrieve, right and wrong marked"
    return f"<img class='wide' alt='{words}' src='{image}'>"


def _embedded(data: bytes) -> str:
    """An image as a data address; a large one as JPEG, smaller until it fits."""
    image = _decoded(data)
    if len(data) <= IMAGE_BYTES and data.startswith((b"\x89PNG", b"\xff\xd8")):
        kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    for width in (1200, 900, 700, 500):
        small = image.copy()
        small.thumbnail((width, 4 * width))
        buffer = io.BytesIO()
        small.save(buffer, format="JPEG", quality=80)
        if buffer.tell() <= IMAGE_BYTES:
            break
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _decoded(data: bytes) -> Image.Image:
    """RGB; a ValueError for what is damaged, or so large that it would take a browser's memory."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as opened:
                return opened.convert("RGB")
    except Exception as error:  # the decoders raise many kinds
        raise ValueError(f"cannot be decoded: {error}") from error


def _snapshot(history: History) -> str:
    """Confusions and similarity matrix of the last evaluation."""
    last = read_snapshot(history.run, max(snapshot_steps(history.run), default=0))
    if last is None:
        return ""
    matrix = _matrix(last["matrix"]["values"], last["matrix"]["captions"])
    rows = [_confusion(history.run, each) for each in last["confusions"]]
    step = f"validation, step {last['step']:,}"
    confused = "".join(rows) or "<p class='note'>none: every caption finds its own image first</p>"
    return (
        f"<div class='grid'><figure class='plot'><figcaption>Similarity of images (rows) and captions (columns), "
        f"{step}</figcaption>{matrix}</figure><figure class='plot'><figcaption>Nearest confusions, {step}</figcaption>"
        f"{confused}</figure></div>"
    )


def _matrix(values: list[list[float]], captions: list[str]) -> str:
    low, high = min(map(min, values)), max(map(max, values))
    span = high - low or 1.0
    cells = "".join(
        f"<rect x='{j}' y='{i}' width='1.02' height='1.02' fill='{ramp((v - low) / span)}'/>"
        for i, row in enumerate(values)
        for j, v in enumerate(row)
    )
    n = len(values)
    right = sum(captions[row.index(max(row))] == captions[i] for i, row in enumerate(values))
    words = f"{right} of {n} images are closest to their own caption; {low:.2f} dark, {high:.2f} bright"
    drawn = f"<svg class='matrix' viewBox='0 0 {n} {n}' role='img' aria-label='{words}'>{cells}</svg>"
    return f"{drawn}<p class='note'>{words}</p>"


def _confusion(run: Path, each: dict[str, Any]) -> str:
    images = ""
    for kind, index in (("right", each["right"]), ("found", each["found"])):
        data = read_thumbnail(run, index)
        with contextlib.suppress(ValueError):
            image = f"<img alt='{kind}' src='{_embedded(data or b'')}'>"
            images += f"<figure class='thumb {kind}'>{image}<figcaption>{kind}</figcaption></figure>"
    words = f"“{escape(str(each['caption']))}” <span class='note'>found instead: “{escape(str(each['truth']))}”</span>"
    return f"<div class='confusion'>{images}<p>{words}</p></div>"


def _settings(history: History) -> str:
    try:
        config = read_small(history.run / "config.toml", inside=history.run).decode("utf-8", "replace")
    except OSError as error:
        config = f"no config.toml: {error.strerror}"
    environment = json.dumps(history.environment, indent=2, ensure_ascii=False)
    again = f"m1clip train --config {shlex.quote(str(history.run / 'config.toml'))} --run runs/again"
    words = history.environment.get("command")
    first = shlex.join(["m1clip", *map(str, words[1:])]) if isinstance(words, list) and words else "unknown"
    return (
        f"<p>Repeat it: <code>{escape(again)}</code><br>It was started by: <code>{escape(first)}</code></p>"
        f"<div class='grid'><div><h3>config.toml</h3><pre>{escape(config)}</pre></div>"
        f"<div><h3>environment.json</h3><pre>{escape(environment)}</pre></div></div>"
    )


SIZE, DPI = (7.2, 4.0), 140


def write_images(runs: Sequence[Path], folder: Path) -> list[Path]:
    """One file a plot; what was not measured has none."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--png: matplotlib is not installed; pip install 'm1clip[plot]', or leave out --png")
    histories = [History(run).poll_all() for run in runs]
    folder.mkdir(parents=True, exist_ok=True)
    many = list(enumerate(histories))
    wanted: list[tuple[str, str, list[Curve], bool]] = [
        (name, title, [step_curve(h, name, i) for i, h in many], log)
        for name, title, log in (
            ("loss", "Loss", True), ("temperature", "Temperature", False), ("lr", "Learning rate", False),
            ("grad_norm", "Gradient norm", True), ("images_per_second", "Pairs a second", False),
            ("watts", "Power, watts", False),
        )
    ]  # fmt: skip
    best = [eval_curve(h, h.metric, h.name, i, band=True) for i, h in many]
    wanted.append(("best", f"{best_title(histories)} on the validation split, % (95% interval)", best, False))
    recall = [eval_curve(h, RECALL, f"{h.name}, text to image", 2 * i, band=True) for i, h in many]
    recall += [eval_curve(h, BACK, f"{h.name}, image to text", 2 * i + 1, band=True) for i, h in many]
    wanted.append(("recall", "Recall@1 on the validation split, % (95% interval)", recall, False))
    files = [_lines(folder / f"{name}.png", title, curves, log) for name, title, curves, log in wanted if _any(curves)]
    files += [_split(folder / f"time-split-{h.name}.png", h) for h in histories if split_shares(h)]
    return files


def _any(curves: Sequence[Curve]) -> bool:
    return any(curve.points for curve in curves)


def _lines(path: Path, title: str, curves: Sequence[Curve], log: bool) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for curve in (curve for curve in curves if curve.points):
        x, y = zip(*curve.points, strict=True)
        colour = COLOURS[curve.colour % len(COLOURS)]
        axes.plot(x, y, color=colour, label=curve.name, marker="o" if curve.dots else None, markersize=3)
        if curve.band:
            low, high = zip(*curve.band, strict=True)
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    if log:
        axes.set_yscale("log")
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)
    return path


def _split(path: Path, history: History) -> Path:
    from matplotlib.figure import Figure

    shares = split_shares(history)
    names = [name for name in PHASES if name in shares]
    figure = Figure(figsize=(SIZE[0], 2.2), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    left = 0.0
    for place, name in enumerate(names):
        axes.barh([0], [100 * shares[name]], left=left, color=COLOURS[place], label=f"{name} {100 * shares[name]:.1f}%")
        left += 100 * shares[name]
    axes.set_yticks([])
    axes.set_xlabel("% of a step")
    axes.set_title(f"Where the time of a step goes: {history.name}")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    figure.savefig(path)
    return path
