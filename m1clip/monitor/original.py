"""The figures that the original project reported, beside those of a run with its settings.

Everything measured is read from the run's log; docs/findings.md discusses the differences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m1clip.formatting import duration, percent, size, table
from m1clip.io import read_small, write_json
from m1clip.runlog import Record, read_log

ORIGINAL_PRESET = "original"  # of `m1clip train --preset`
COMPARISON_FILE = "original.json"
COMPARISON_HEAD = ("figure", "original (M1)", "this run")
NOT_MEASURED = "not measured"
STAGE_FIELDS = {
    "load and preprocess": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}


@dataclass(frozen=True)
class Measured:
    """What the log of a run says about the original's figures; None where it says nothing."""

    first_loss: float | None = None  # mean of the first epoch
    last_loss: float | None = None
    first_accuracy: float | None = None  # within the training batches of the first epoch
    last_accuracy: float | None = None
    val_accuracy: float | None = None  # within batches of the validation split, at the end
    best_val_accuracy: float | None = None
    first_temperature: float | None = None
    last_temperature: float | None = None
    step_seconds: float | None = None
    epoch_seconds: float | None = None
    total_seconds: float | None = None
    peak_bytes: float | None = None
    weight_bytes: float | None = None
    checkpoint_bytes: float | None = None
    joules_per_epoch: float | None = None
    mean_recall: float | None = None  # of the best model on the test split
    stage_fractions: dict[str, float] | None = None


def measure(records: Iterable[Record]) -> Measured:
    """Reduce the records of a run's log to the figures that the original project reported."""
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
    steps = [line for line in by_kind.get("step", []) if "epoch" in line]
    if not steps:
        return Measured()
    last_epoch = math.ceil(steps[-1]["epoch"])
    first = [line for line in steps if math.ceil(line["epoch"]) <= 1]
    last = [line for line in steps if math.ceil(line["epoch"]) == last_epoch]
    validation = [
        _number(line.get("analysis", {}).get("batch_accuracy", {}).get("val", {}), "value")
        for line in by_kind.get("eval", [])
    ]
    val_accuracies = [value for value in validation if value is not None]
    memory = _newest(by_kind, "memory")
    end = _newest(by_kind, "end")
    elapsed = _number(steps[-1], "elapsed")
    return Measured(
        first_loss=_mean(first, "loss"),
        last_loss=_mean(last, "loss"),
        first_accuracy=_mean(first, "batch_accuracy"),
        last_accuracy=_mean(last, "batch_accuracy"),
        val_accuracy=val_accuracies[-1] if val_accuracies else None,
        best_val_accuracy=max(val_accuracies, default=None),
        first_temperature=_number(steps[0], "temperature"),
        last_temperature=_number(steps[-1], "temperature"),
        step_seconds=_mean(steps, "step_seconds"),
        epoch_seconds=None if elapsed is None else elapsed / steps[-1]["epoch"],
        total_seconds=elapsed,
        peak_bytes=_number(end, "peak_bytes") or _number(memory, "peak"),
        weight_bytes=_number(memory, "weights"),
        checkpoint_bytes=_number(_newest(by_kind, "checkpoint"), "bytes"),
        joules_per_epoch=_number(end, "joules_per_epoch"),
        mean_recall=_number(end, "mean_recall"),
        stage_fractions=_stage_fractions(steps),
    )


def _newest(by_kind: dict[str, list[Record]], kind: str) -> Record:
    return by_kind[kind][-1] if kind in by_kind else {}


def _number(record: Any, name: str) -> float | None:
    """A finite number of a record; None if it has none under this name."""
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None


def _mean(lines: Sequence[Record], name: str) -> float | None:
    values = [value for line in lines if (value := _number(line, name)) is not None]
    return sum(values) / len(values) if values else None


def _stage_fractions(steps: Sequence[Record]) -> dict[str, float] | None:
    """The mean fraction of a step that each stage takes."""
    means = {
        stage: _mean([line.get("seconds", {}) for line in steps], name)
        for stage, name in STAGE_FIELDS.items()
    }
    total = _mean(steps, "step_seconds")
    if not total:
        return None
    return {stage: seconds / total for stage, seconds in means.items() if seconds is not None}


def comparison_rows(found: Measured) -> list[tuple[str, str, str]]:
    """(figure, what the original reported, what was measured), as text."""
    stages = found.stage_fractions or {}
    return [
        ("loss, first and last epoch", "3.25 -> 1.89",
         _change(found.first_loss, found.last_loss, _decimals(2))),
        ("training accuracy within a batch (chance 8.3%)", "7.9% -> 22.7%",
         _change(found.first_accuracy, found.last_accuracy, percent)),
        ("validation accuracy within a batch, last (best)", "12.5% (14.6%)",
         _with_best(found.val_accuracy, found.best_val_accuracy)),
        ("temperature", "0.07 -> 0.18",
         _change(found.first_temperature, found.last_temperature, _decimals(3))),
        ("time of a batch", "7 to 9 s", _text(found.step_seconds, duration)),
        ("time of an epoch", "156 to 162 s", _text(found.epoch_seconds, duration)),
        ("time in all", "39 min", _text(found.total_seconds, duration)),
        ("load and preprocess", "4.4%", _text(stages.get("load and preprocess"), percent)),
        ("forward", "40.0%", _text(stages.get("forward"), percent)),
        ("backward", "51.3%", _text(stages.get("backward"), percent)),
        ("optimizer", "4.3%", _text(stages.get("optimizer"), percent)),
        ("peak memory", "3 GB", _text(found.peak_bytes, size)),
        ("weights in fp32", "2.5 GB", _text(found.weight_bytes, size)),
        ("checkpoint", "920 MB", _text(found.checkpoint_bytes, size)),
        ("energy of an epoch", "5,460 J (35 W assumed)",
         _text(found.joules_per_epoch, lambda joules: f"{joules:,.0f} J")),
        ("mean recall, test split", NOT_MEASURED, _text(found.mean_recall, percent)),
    ]  # fmt: skip


def write_comparison(run: Path) -> str:
    """Write original.json into a run, for docs/results; returns the table of both sides."""
    found = measure(read_log(run))
    rows = comparison_rows(found)
    record = {
        "rows": [dict(zip(COMPARISON_HEAD, row, strict=True)) for row in rows],
        "measured": asdict(found),
        "machine": _machine_of(run),
    }
    write_json(run / COMPARISON_FILE, record)
    return table(COMPARISON_HEAD, rows)


def _machine_of(run: Path) -> Any:
    """What the run wrote about its machine; None if that file is damaged."""
    try:
        return json.loads(read_small(run / "environment.json")).get("facts")
    except (OSError, ValueError, AttributeError):
        return None


def _decimals(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _text(value: float | None, write: Callable[[float], str]) -> str:
    return NOT_MEASURED if value is None else write(value)


def _change(first: float | None, last: float | None, write: Callable[[float], str]) -> str:
    if first is None or last is None:
        return NOT_MEASURED
    return f"{write(first)} -> {write(last)}"


def _with_best(last: float | None, best: float | None) -> str:
    if last is None or best is None:
        return NOT_MEASURED
    return f"{percent(last)} ({percent(best)})"
