"""--recipe finetune and auto: which stages there are, with which settings, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import screen
from tower_run import frozen_config, patch_towers

import m1clip
from m1clip.cli.main import layers, preset_for
from m1clip.config import Config, TrainConfig, TransferConfig, load_config
from m1clip.errors import UserError
from m1clip.runlog import read_log
from m1clip.training import run as stages
from m1clip.training import setup as recipe


def test_two_stages_in_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_towers(monkeypatch)
    short = {"train": {"epochs": 1, "batch": 16}, "optim": {"name": "adamw", "lr": 1e-3}}
    monkeypatch.setattr(stages, "read_preset", lambda name: short)
    asked = {"transfer.recipe": "finetune", "transfer.train_image": 0, "transfer.train_text": 1, "train.steps": 2}
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
    asked = Config(train=TrainConfig(minutes=30, threads=3), transfer=TransferConfig(recipe="finetune", wise="0.5"))
    first, second = stages.frozen_stage(asked), stages.unfrozen_stage(asked, "runs/x")
    assert (first.train.minutes, first.train.epochs, first.train.batch, first.train.threads) == (None, 20, None, 3)
    assert (first.transfer.recipe, first.transfer.wise) == ("frozen", "off")
    assert (second.train.minutes, second.train.epochs, second.transfer.init) == (30, None, "runs/x")
    assert (second.optim.name, second.optim.layer_decay, second.transfer.wise) == ("adamw", 0.8, "0.5")


def test_the_loss_is_that_of_both_stages() -> None:
    train = TrainConfig(objective="sigmoid", batch=32)
    asked = Config(train=train, transfer=TransferConfig(recipe="finetune", lora_rank=4, train_image=2, wise="search"))
    first = stages.frozen_stage(asked)
    assert first.train.objective == stages.unfrozen_stage(asked, "runs/x").train.objective == "sigmoid"
    assert recipe.decided(first, print) == first, "what only the second stage knows is not asked of the first"
    smooth = Config(train=TrainConfig(label_smoothing=0.1), transfer=TransferConfig(recipe="finetune"))
    assert stages.frozen_stage(smooth).train.label_smoothing == 0.1


def test_a_folder_in_use_is_refused_before_the_first_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*rest: Any) -> None:
        raise AssertionError("no stage may begin")

    monkeypatch.setattr(stages, "train_once", forbidden)
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match="holds a run already"):
        stages.train(Config(transfer=TransferConfig(recipe="finetune")), tmp_path, screen())


def test_the_settings_of_a_recipe_are_said() -> None:
    said: list[str] = []
    asked = Config(train=TrainConfig(batch=64, patience=1), transfer=TransferConfig(recipe="finetune"))
    recipe.say_settings(asked, stages.unfrozen_stage(asked, "runs/x"), said.append)
    assert "optim.layer_decay 0.8" in said[0]
    assert "patience" not in said[0]
    recipe.say_settings(asked, asked, said.append)
    assert len(said) == 1


def test_what_was_given_wins_over_the_recipe_even_at_its_default() -> None:
    words = ["train", "--recipe", "finetune", "--batch", "64", "--minutes", "30"]
    (settings,) = layers(words)
    assert settings.data["optim.layer_decay"] == 0.8
    assert "train.batch" not in settings.data
    assert "train.epochs" not in settings.data
    given = Config(train=TrainConfig(batch=64), transfer=TransferConfig(recipe="finetune"))
    assert stages.unfrozen_stage(given, "runs/x", settled=True).train.batch == 64
    assert stages.frozen_stage(given).train.batch == 64


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("wise", "0.5", "--wise"),
        ("base", ("set",), "--base"),
        ("lora_rank", 8, "--transfer.lora-rank"),
        ("train_image", 0, "--transfer.train-image"),
        ("train_text", 2, "--transfer.train-text"),
    ],
)
def test_an_option_without_a_meaning_is_refused(name: str, value: Any, option: str) -> None:
    for start in ({"recipe": "scratch"}, {"recipe": "frozen"}):
        with pytest.raises(UserError, match=f"^{option} goes with --init or --recipe finetune"):
            recipe.decided(Config(transfer=TransferConfig(**start, **{name: value})), print)  # type: ignore[arg-type]
    for start in ({"init": "runs/x"}, {"recipe": "finetune"}):
        config = Config(transfer=TransferConfig(**start, **{name: value}))  # type: ignore[arg-type]
        assert recipe.decided(config, print) == config


def test_one_call_cannot_make_two_runs() -> None:
    with pytest.raises(UserError, match="is two runs"):
        recipe.prepare(Config(transfer=TransferConfig(recipe="finetune")), print, lambda facts: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("images", "minutes", "there", "chosen", "words"),
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
    images: int, minutes: float | None, there: bool, chosen: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Source:
        def samples(self, split: str) -> range:
            return range(images)

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
