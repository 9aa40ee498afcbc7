"""The plots of a report, several runs over each other where that can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from m1clip.runlog import SELECTION
from m1clip.watch.decline import decline
from m1clip.watch.history import PHASES, History
from m1clip.watch.report_tables import split_shares
from m1clip.watch.svg import Curve, bars, heat, plot
from m1clip.watch.words import number, percent, size

RECALL, BACK = "text_to_image/recall@1", "image_to_text/recall@1"


def step_curve(history: History, name: str, colour: int, factor: float = 1.0) -> Curve:
    """A figure of the steps over the run."""
    return Curve(
        history.name, [(row["step"], factor * row[name]) for row in history.steps if name in row], colour
    )


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
        plot("On the set that must not be forgotten (--base)", kept, unit="%") if kept else "",
        plot("Temperature", [step_curve(h, "temperature", i) for i, h in many]),
        plot("Learning rate", [step_curve(h, "lr", i) for i, h in many]),
        plot("Gradient norm", [step_curve(h, "grad_norm", i) for i, h in many], log=True),
        plot("Pairs a second", [step_curve(h, "pairs_per_second", i) for i, h in many]),
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
        plot("Alignment, uniformity, gap between pictures and captions",
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
        return "<p class='note'>no look at the layers in this run (--train.analysis-every 0)</p>"
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
        out.append(
            bars(f"Memory by component, of a peak of {size(history.memory.get('peak', 0))}{mark}", parts)
        )
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
