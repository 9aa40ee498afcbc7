"""The figures that the original project reported, beside those of a run with its settings.

Everything measured is read from the run's log; docs/findings.md discusses the differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m1clip.epochs import val_batch_accuracy
from m1clip.formatting import duration, percent, size, table
from m1clip.io import parse_json, read_small, write_json
from m1clip.runlog import Record, read_log

ORIGINAL_PRESET = "original"  # of `m1clip train --preset`
COMPARISON_FILE = "original.json"
COMPARISON_HEAD = ("figure", "original (M1)", "this run")
NOT_MEASURED = "not measured"
STAGE_FIELDS = {  # stages of the log
    "load and preprocess": ("data", "copy", "preprocess"),
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("optimizer",),
}


@dataclass(frozen=True)
class StepSeconds:
    """Median and quartiles of the seconds of a step, over the lines of the log."""

    median: float
    low: float
    high: float
    n: int  # lines, which average a few steps each


@dataclass(frozen=True)
class Measured:
    """What the log of a run says about the original's figures; None where it says nothing."""

    first_loss: float | None = None  # mean of the first epoch
    last_loss: float | None = None
    first_accuracy: float | None = None  # within the training batches of the first epoch
    last_accuracy: float | None = None
    val_accuracy: Record | None = None  # within batches of the validation split: rates
    best_val_accuracy: Record | None = None
    first_temperature: float | None = None
    last_temperature: float | None = None
    steps: int | None = None
    step_seconds: StepSeconds | None = None
    epoch_seconds: float | None = None
    total_seconds: float | None = None
    peak_bytes: float | None = None
    weight_bytes: float | None = None
    checkpoint_bytes: float | None = None
    joules_per_epoch: float | None = None
    mean_recall: Record | None = None  # of the best model on the test split: a rate
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
        rate
        for rate in map(val_batch_accuracy, by_kind.get("eval", []))
        if _number(rate, "value") is not None
    ]
    memory = _newest(by_kind, "memory")
    end = _newest(by_kind, "end")
    elapsed = _number(steps[-1], "elapsed")
    return Measured(
        first_loss=_mean(first, "loss"),
        last_loss=_mean(last, "loss"),
        first_accuracy=_mean(first, "batch_accuracy"),
        last_accuracy=_mean(last, "batch_accuracy"),
        val_accuracy=validation[-1] if validation else None,
        best_val_accuracy=max(validation, key=lambda rate: rate["value"], default=None),
        first_temperature=_number(steps[0], "temperature"),
        last_temperature=_number(steps[-1], "temperature"),
        steps=steps[-1].get("step"),
        step_seconds=_step_seconds(_values(steps, "step_seconds")),
        epoch_seconds=None if elapsed is None else elapsed / steps[-1]["epoch"],
        total_seconds=elapsed,
        peak_bytes=_number(end, "peak_bytes") or _number(memory, "peak"),
        weight_bytes=_number(memory, "weights"),
        checkpoint_bytes=_number(_newest(by_kind, "checkpoint"), "bytes"),
        joules_per_epoch=_number(end, "joules_per_epoch"),
        mean_recall=_rate(end, "mean_recall"),
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


def _values(lines: Sequence[Record], name: str) -> list[float]:
    return [value for line in lines if (value := _number(line, name)) is not None]


def _step_seconds(seconds: Sequence[float]) -> StepSeconds | None:
    if len(seconds) < 2:
        return StepSeconds(seconds[0], seconds[0], seconds[0], 1) if seconds else None
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return StepSeconds(median, low, high, len(seconds))


def _mean(lines: Sequence[Record], name: str) -> float | None:
    values = _values(lines, name)
    return sum(values) / len(values) if values else None


def _rate(record: Record, metric: str) -> Record | None:
    """A metric of a record with its interval, its chance level and its n."""
    value = _number(record, metric)
    if value is None:
        return None
    parts = ("low", "high", "chance", "n")
    return {"value": value, **{part: _number(record, f"{metric}/{part}") for part in parts}}


def _stage_fractions(steps: Sequence[Record]) -> dict[str, float] | None:
    """The mean fraction of a step that each stage takes."""
    seconds = [line.get("seconds", {}) for line in steps]
    means = {
        stage: [mean for name in names if (mean := _mean(seconds, name)) is not None]
        for stage, names in STAGE_FIELDS.items()
    }
    total = _mean(steps, "step_seconds")
    if not total:
        return None
    return {stage: sum(parts) / total for stage, parts in means.items() if parts}


def comparison_rows(measured: Measured) -> list[tuple[str, str, str]]:
    """(figure, what the original reported, what was measured), as text."""
    stages = measured.stage_fractions or {}
    return [
        ("loss, first and last epoch", "3.25 -> 1.89",
         _change(measured.first_loss, measured.last_loss, _decimals(2))),
        ("training accuracy within a batch (chance 8.3%)", "7.9% -> 22.7%",
         _change(measured.first_accuracy, measured.last_accuracy, percent)),
        ("validation accuracy within a batch, last (best)", "12.5% (14.6%)",
         _text(measured.val_accuracy, lambda rate: _with_best(rate, measured.best_val_accuracy))),
        ("temperature", "0.07 -> 0.18",
         _change(measured.first_temperature, measured.last_temperature, _decimals(3))),
        ("time of a batch", "7 to 9 s", _text(measured.step_seconds, _step_time)),
        ("time of an epoch", "156 to 162 s", _text(measured.epoch_seconds, duration)),
        ("time in all", "39 min", _text(measured.total_seconds, duration)),
        ("load and preprocess", "4.4%", _text(stages.get("load and preprocess"), percent)),
        ("forward", "40.0%", _text(stages.get("forward"), percent)),
        ("backward", "51.3%", _text(stages.get("backward"), percent)),
        ("optimizer", "4.3%", _text(stages.get("optimizer"), percent)),
        ("peak memory", "3 GB", _text(measured.peak_bytes, size)),
        ("weights in fp32", "2.5 GB", _text(measured.weight_bytes, size)),
        ("checkpoint", "920 MB", _text(measured.checkpoint_bytes, size)),
        ("energy of an epoch", "5,460 J (35 W assumed)",
         _text(measured.joules_per_epoch, lambda joules: f"{joules:,.0f} J")),
        ("mean recall, test split", NOT_MEASURED, _text(measured.mean_recall, _rate_text)),
    ]  # fmt: skip


def write_comparison(run: Path) -> str:
    """Write original.json into a run, for docs/results; returns the table of both sides."""
    measured = measure(read_log(run))
    rows = comparison_rows(measured)
    record = {
        "rows": [dict(zip(COMPARISON_HEAD, row, strict=True)) for row in rows],
        "measured": asdict(measured),
        "machine": _machine_of(run),
    }
    write_json(run / COMPARISON_FILE, record)
    return table(COMPARISON_HEAD, rows)


def _machine_of(run: Path) -> Any:
    """What the run wrote about its machine; None if that file is damaged."""
    try:
        return parse_json(read_small(run / "environment.json")).get("facts")
    except (OSError, ValueError, AttributeError):
        return None


def _decimals(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _text(value: Any, write: Callable[[Any], str]) -> str:
    return NOT_MEASURED if value is None else write(value)


def _change(first: float | None, last: float | None, write: Callable[[float], str]) -> str:
    if first is None or last is None:
        return NOT_MEASURED
    return f"{write(first)} -> {write(last)}"


def _step_time(seconds: StepSeconds) -> str:
    low, high = duration(seconds.low), duration(seconds.high)
    return f"{duration(seconds.median)} [{low}, {high}], n={seconds.n} log lines"


def _with_best(rate: Record, best: Record | None) -> str:
    """A rate and the best one, each with its interval: 12.5% [4.3, 31.0] (20.8% [9.2, 40.5])."""
    best = rate if best is None else best
    return f"{_interval(rate)} ({_interval(best)})"


def _rate_text(rate: Record) -> str:
    chance = rate.get("chance")
    return _interval(rate) + ("" if chance is None else f", chance {percent(chance)}")


def _interval(rate: Record) -> str:
    low, high = _number(rate, "low"), _number(rate, "high")
    if low is None or high is None:
        return percent(rate["value"])
    return f"{percent(rate['value'])} [{100 * low:.1f}, {100 * high:.1f}]"
