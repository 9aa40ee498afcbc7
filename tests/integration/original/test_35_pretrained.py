"""35: fine-tuning of pretrained towers."""

from pathlib import Path

import pytest
from tower_run import frozen_config, patch_towers

import m1clip
from m1clip import console
from m1clip.training.run import train_config


def test_heads_on_pretrained_towers_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_towers(monkeypatch)
    runs = []
    with console.quiet():
        for name, steps in (("short", 1), ("long", 4)):
            config = frozen_config(tmp_path, **{"train.steps": steps})
            runs.append(train_config(config, tmp_path / name))
    last_models = [m1clip.load(run.path / "model") for run in runs]
    first, second = (model.encode_text(["a red ball"]) for model in last_models)
    assert (first != second).any()
