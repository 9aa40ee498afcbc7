"""Promise 7: images are NaN in random steps. tests/training/test_recovery.py tests the rules themselves."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from small_run import before_each_step, run_small, tensors_of

from m1clip.data.loader import Batch
from m1clip.runlog import read_log
from m1clip.training.compose import TrainStep

STEPS = 30


def run_with_nan(folder: Path, at: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with one NaN image in each of these steps.

    The weights stay finite, and each step is logged.
    """

    def break_image(train_step: TrainStep, batch: Batch, step: int) -> None:
        if step in at:
            batch.views[step % len(batch), 5] = float("nan")

    with monkeypatch.context() as patch:
        before_each_step(break_image, patch)
        run_small(folder, {"train.steps": STEPS, "data.color_jitter": 0.2})
    assert all(bool(tensor.isfinite().all()) for tensor in tensors_of(folder, STEPS).values())
    skipped = [line for line in read_log(folder) if line.get("event") == "update skipped"]
    assert [line["step"] for line in skipped] == sorted(step + 1 for step in at)
    assert all(line["samples"] for line in skipped)


@pytest.mark.long("NaN and spikes")
@pytest.mark.parametrize("seed", range(40))
def test_random_steps_with_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, counts: dict[str, float]
) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    steps = set(draw.sample(range(STEPS), draw.randrange(1, 6)))
    run_with_nan(tmp_path, steps, monkeypatch)
    counts |= {"runs": 1, "steps with NaN": len(steps)}
