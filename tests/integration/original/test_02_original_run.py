"""2: the original run as one command, with its settings, and its figures beside the measured ones."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from small_run import exit_code, finished_run

from m1clip.config import from_dict, read_preset
from m1clip.evaluation.statistics import wilson
from m1clip.monitor.original import Measured, comparison_rows, measure, write_comparison
from m1clip.runlog import read_log

TOWERS = (
    "--vision-width",
    "32",
    "--vision-layers",
    "1",
    "--text-width",
    "32",
    "--text-layers",
    "1",
)


def test_preset_has_the_settings_of_the_original() -> None:
    config = from_dict(read_preset("original"), "original")
    assert (config.model.name, config.model.tokenizer) == ("original", "char")
    assert (config.data.synthetic_images, config.data.workers) == (216, 4)
    optim = config.optim
    assert (optim.optimizer, optim.lr, optim.wd, optim.warmup) == ("adamw", 3e-4, 0.01, 0.0)
    train = config.train
    assert (train.batch_size, train.epochs, train.loss) == (12, 15.0, "infonce")
    assert (train.device, train.precision) == ("cpu", "fp32")


def test_run_prints_the_figures_of_the_original_beside_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--image-size", "32", "--patch-size", "16", "--embed-dim", "16", *TOWERS)
    short = ("--steps", "2", "--synthetic-images", "24", "--workers", "0", "--threads", "1")
    short = (*short, "--eval-every", "1")
    out = tmp_path / "run"
    assert exit_code("train", "--preset", "original", *sizes, *short, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "original (M1)" in printed
    assert "3.25 -> 1.89" in printed
    record = json.loads((out / "original.json").read_text())
    measured = record["measured"]
    assert measured["step_seconds"]["median"] > 0
    assert 0.0 <= measured["val_accuracy"]["low"] < measured["val_accuracy"]["high"] <= 1.0
    assert measured["mean_recall"]["n"] == measured["val_accuracy"]["n"]
    rows = {row["figure"]: row["this run"] for row in record["rows"]}
    unmeasured = {name for name, value in rows.items() if value == "not measured"}
    assert unmeasured <= {"energy of an epoch"}
    assert record["machine"]["cores"] >= 1


def step(epoch: float, loss: float, seconds: float, **others: Any) -> dict[str, Any]:
    stages = {
        "data": 0.1 * seconds,
        "preprocess": 0.05 * seconds,
        "forward": 0.25 * seconds,
        "backward": 0.6 * seconds,
    }
    return {
        "kind": "step",
        "step": round(18 * epoch),
        "epoch": epoch,
        "loss": loss,
        "temperature": 0.07 * epoch,
        "step_seconds": seconds,
        "elapsed": 18 * epoch * seconds,
        "seconds": stages,
        **others,
    }


def evaluation(value: float) -> dict[str, Any]:
    """An evaluation of 24 images, with the interval of Wilson for a rate of them."""
    low, high = wilson(value, 24)
    rates = {"val": {"value": value, "low": low, "high": high, "chance": 1 / 12, "n": 24}}
    return {"kind": "eval", "split": "val", "analysis": {"held_out_batch_accuracy": rates}}


def test_figures_are_those_of_the_log() -> None:
    log = [
        step(1.0, 3.0, 2.0, batch_accuracy=0.1),
        evaluation(0.25),
        evaluation(0.125),
        step(2.0, 2.0, 4.0),
        {"kind": "end", "mean_recall": 0.5, "mean_recall/low": 0.3, "mean_recall/high": 0.7},
    ]
    figures = measure(log)
    assert (figures.first_loss, figures.last_loss) == (3.0, 2.0)
    assert (figures.first_accuracy, figures.last_accuracy) == (0.1, None)
    assert figures.step_seconds is not None
    assert (figures.step_seconds.median, figures.step_seconds.n, figures.epoch_seconds) == (
        3.0,
        2,
        72.0,
    )
    assert figures.steps == 36
    assert figures.stage_fractions is not None
    assert math.isclose(figures.stage_fractions["backward"], 0.6)
    assert math.isclose(figures.stage_fractions["load and preprocess"], 0.15)
    other = measure([step(1.0, 5.0, 1.0)])
    assert other.step_seconds is not None
    assert (other.first_loss, other.step_seconds.median) == (5.0, 1.0)
    rows = {name: measured for name, _, measured in comparison_rows(figures)}
    assert rows["loss, first and last epoch"] == "3.00 -> 2.00"
    assert rows["training accuracy within a batch (chance 8.3%)"] == "not measured"
    validation = rows["validation accuracy within a batch, last (best)"]
    assert validation == "12.5% [4.3, 31.0] (25.0% [12.0, 44.9])"
    assert rows["time of a batch"] == "3 s [2.5 s, 3.5 s], n=2 log lines"
    assert rows["mean recall, test split"] == "50.0% [30.0, 70.0]"
    assert rows["energy of an epoch"] == "not measured"


def test_log_without_steps_or_with_odd_values_measures_nothing() -> None:
    assert measure([]) == Measured()
    odd = step(1.0, float("nan"), 1.0, batch_accuracy=True)
    figures = measure([odd, {"kind": "eval", "analysis": {}}])
    assert (figures.first_loss, figures.first_accuracy, figures.val_accuracy) == (None, None, None)


def test_damaged_environment_does_not_stop_the_comparison(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes((finished_run() / "run.jsonl").read_bytes())
    (tmp_path / "environment.json").write_text("[")
    assert "this run" in write_comparison(tmp_path)
    record = json.loads((tmp_path / "original.json").read_text())
    assert record["machine"] is None
    losses = [line["loss"] for line in read_log(tmp_path) if line["kind"] == "step"]
    assert min(losses) <= record["measured"]["first_loss"] <= max(losses)
