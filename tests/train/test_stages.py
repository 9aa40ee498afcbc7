"""--recipe finetune and auto: which stages there are, with which settings, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import screen
from tower_run import frozen_config, patch_towers

import m1clip
from m1clip.arguments import preset_for
from m1clip.config import Config, TrainConfig
from m1clip.config_transfer import TransferConfig
from m1clip.configfile import load_config
from m1clip.errors import UserError
from m1clip.runlog import read_log
from m1clip.train import recipe, stages


def test_two_stages_in_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_towers(monkeypatch)
    short = {"train": {"epochs": 1, "batch": 16}, "optim": {"name": "adamw", "lr": 1e-3}}
    monkeypatch.setattr(stages, "read_preset", lambda name: short)
    asked = {
        "transfer.recipe": "finetune",
        "transfer.train_image": 0,
        "transfer.train_text": 1,
        "train.steps": 2,
    }
    said = screen()
    result = stages.train(frozen_config(tmp_path, **asked), tmp_path / "run", said)
    assert result.run == tmp_path / "run"
    first = tmp_path / "run-frozen"
    assert load_config(first / "config.toml").transfer.recipe == "frozen"
    second = load_config(tmp_path / "run" / "config.toml")
    assert (second.transfer.init, second.train.steps) == (str(first), 2)
    words = said.console.file.getvalue()  # type: ignore[attr-defined]
    assert words.index("stage 1") < words.index("stage 2")
    assert [r["steps"] for r in read_log(tmp_path / "run") if r["kind"] == "start"] == [2]
    assert m1clip.load(tmp_path / "run").model.shape.embed_dim == 16
    assert preset_for(first) == "unfreeze"
    assert preset_for(tmp_path) == "finetune"


def test_settings_of_the_stages() -> None:
    asked = Config(
        train=TrainConfig(minutes=30, threads=3), transfer=TransferConfig(recipe="finetune", wise="0.5")
    )
    first, second = stages.frozen_stage(asked), stages.unfrozen_stage(asked, "runs/x")
    assert (first.train.minutes, first.train.epochs, first.train.batch, first.train.threads) == (
        None,
        20,
        512,
        3,
    )
    assert (first.transfer.recipe, first.transfer.wise) == ("frozen", "off")
    assert (second.train.minutes, second.train.epochs, second.transfer.init) == (30, None, "runs/x")
    assert (second.optim.name, second.optim.layer_decay, second.transfer.wise) == ("adamw", 0.8, "0.5")


def test_one_call_cannot_make_two_runs() -> None:
    with pytest.raises(UserError, match="is two runs"):
        recipe.prepare(Config(transfer=TransferConfig(recipe="finetune")), print, lambda facts: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("pictures", "minutes", "there", "chosen", "words"),
    [
        (500, None, True, "frozen", "too few for random weights"),
        (500, 60, True, "frozen", "too few for random weights"),
        (5_000, 5, True, "frozen", "too few for random weights"),
        (5_000, 30, True, "finetune", "30 minutes are enough"),
        (5_000, 30, False, "scratch", "is not installed"),
        (200_000, 30, True, "scratch", "enough to learn from random weights"),
    ],
)
def test_auto(
    pictures: int,
    minutes: float | None,
    there: bool,
    chosen: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Source:
        def pairs(self, split: str) -> range:
            return range(pictures)

    monkeypatch.setattr(recipe, "is_synthetic", lambda data: False)
    monkeypatch.setattr(recipe, "open_data", lambda *rest: Source())
    monkeypatch.setattr(recipe, "installed", lambda tower: there)
    said: list[str] = []
    config = Config(train=TrainConfig(minutes=minutes), transfer=TransferConfig(recipe="auto"))
    assert recipe.decided(config, said.append).transfer.recipe == chosen
    assert words in said[0]


def test_auto_with_a_model_to_start_from_is_a_fine_tuning() -> None:
    said: list[str] = []
    config: Any = Config(transfer=TransferConfig(recipe="auto", init="runs/x"))
    assert recipe.decided(config, said.append).transfer.recipe == "scratch"
    assert "starts from runs/x" in said[0]
