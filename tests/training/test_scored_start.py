"""A run that starts from a model scores it first: training on it never ends with something worse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_run import assert_same_bits, run_small

from m1clip.evaluation.statistics import selection_metric
from m1clip.runlog import read_log


def evaluated(run: Path) -> list[int]:
    return [line["step"] for line in read_log(run) if line["kind"] == "eval"]


def test_a_start_that_nothing_beats_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_small(tmp_path / "first", {"train.steps": 2})
    assert evaluated(tmp_path / "first") == [2], "random weights are not worth a look"
    recalls = iter([0.5, 0.4, 0.3])
    monkeypatch.setattr(
        "m1clip.training.validation.selection_metric",
        lambda scores: replace(selection_metric(scores), value=next(recalls)),
    )
    run = tmp_path / "tuned"
    run_small(run, {"transfer.init": str(tmp_path / "first"), "train.steps": 4, "train.eval_every": 2})
    assert evaluated(run) == [0, 2, 4]
    start, best = (load_file(path / "best" / "model.safetensors") for path in (tmp_path / "first", run))
    assert_same_bits(best, start)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    state = json.loads((run / "checkpoints/step-000004/state.json").read_text())
    assert (state["best_step"], state["stale"]) == (0, 2)
