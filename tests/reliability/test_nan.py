"""Promise 7 with counts: images become NaN at random steps. The guard itself: tests/training/test_recovery.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability_results import recorded
from small_run import run_small, tensors_of

from m1clip.data.loader import Batch
from m1clip.runlog import read_log
from m1clip.training.step import TrainStep

STEPS = 30


def poisoned_run(folder: Path, at: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with one NaN image in each of these steps; the weights stay finite, and each step is named."""
    usual = TrainStep.__call__

    def call(self: TrainStep, batch: Batch, step: int, *rest: Any, **named: Any) -> Any:
        if step in at:
            batch.views.gains[step % len(batch), 0] = float("nan")
        return usual(self, batch, step, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", call)
        run_small(folder, {"train.steps": STEPS, "data.color_jitter": 0.2, "optim.ema": 0.9})
    assert all(bool(tensor.isfinite().all()) for tensor in tensors_of(folder, STEPS).values())
    told = [line for line in read_log(folder) if line.get("event") == "update skipped"]
    assert [line["step"] for line in told] == sorted(step + 1 for step in at)
    assert all(line["samples"] for line in told), "the samples are named"


def test_poisoned_steps_are_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_run(tmp_path / "run", {3, 4, 17, 29}, monkeypatch)


PARTS = 4


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_many_poisoned_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    with recorded("nan and spikes", part, PARTS) as counts:
        draw = random.Random(part)
        poisoned = 0
        for number in range(10):
            torch.manual_seed(10 * part + number)
            at = set(draw.sample(range(STEPS), draw.randrange(1, 6)))
            poisoned_run(tmp_path / str(number), at, monkeypatch)
            poisoned += len(at)
        counts |= {"runs": 10, "poisoned steps": poisoned}
