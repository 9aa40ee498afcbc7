"""--minutes become steps: a short budget trains a short run, and little of it goes into the calibration."""

from __future__ import annotations

from typing import Any

import pytest
from small_run import screen, small_config

from m1clip.training import run as duration
from m1clip.training.run import decode_plan
from m1clip.training.setup import prepare

PAIR, IMAGE = 0.02, 0.004  # seconds that a sample takes in a step, and an image in an evaluation


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class TrainStep:
    """Steps whose time is known."""

    model, keeps_memory, clock = None, False, Clock()

    def __init__(self, *rest: Any) -> None:
        pass

    def __call__(self, batch: Any, *rest: Any) -> None:
        self.clock.now += PAIR * len(batch)

    def reset_graph(self) -> None:
        pass


@pytest.mark.parametrize("seconds", [0.1, 10.0, 60.0])
def test_the_calibration_takes_at_most_a_tenth_of_the_minutes(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def encode(job: Any, model: Any, split: str, images: int = 12) -> None:
        clock.now += IMAGE * images

    monkeypatch.setattr(TrainStep, "clock", clock)
    for name, value in {"TrainStep": TrainStep, "encode": encode, "evaluate": encode, "time": clock}.items():
        monkeypatch.setattr(duration, name, value)
    changes = {"train.steps": None, "train.minutes": seconds / 60, "train.eval_every": None}
    job = prepare(small_config(changes), lambda line: None, decode_plan(screen()))
    warnings: list[str] = []
    length = duration.run_length(job, warnings.append)
    if seconds < 1:
        assert length == (1, 1)
        assert "too few to learn much" in warnings[0]
        return
    assert clock.now <= 0.1 * seconds
    total = clock.now + length.steps * 16 * PAIR + (length.evaluations + 1) * 12 * IMAGE
    assert 0.95 * seconds < total <= seconds
    assert not warnings
