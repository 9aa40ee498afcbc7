"""--recipe finetune and auto: which stages there are, with which settings, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import screen
from tower_run import frozen_options, patch_towers

import m1clip.config
from m1clip.config import Config, TrainConfig, TransferConfig, init_preset, load_config
from m1clip.errors import UserError
from m1clip.runlog import read_log
from m1clip.training import run as runs
from m1clip.training import setup


def test_two_stages_in_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_towers(monkeypatch)
    short = {"train": {"epochs": 1, "batch_size": 16}, "optim": {"optimizer": "adamw", "lr": 1e-3}}
    monkeypatch.setattr(m1clip.config, "read_preset", lambda name: short)
    options = frozen_options(tmp_path) | {"recipe": "finetune", "unfreeze_image": 0, "unfreeze_text": 1, "steps": 2}
    said = screen()
    result = runs.train(run=tmp_path / "run", screen=said, **options)
    assert result.path == tmp_path / "run"
    first = tmp_path / "run-frozen"
    assert load_config(first / "config.toml").transfer.recipe == "frozen"
    second = load_config(tmp_path / "run" / "config.toml")
    assert (second.transfer.init, second.train.steps) == (str(first), 2)
    words = said.console.file.getvalue()  # type: ignore[attr-defined]
    assert words.index("stage 1") < words.index("stage 2")
    assert [r["steps"] for r in read_log(tmp_path / "run") if r["kind"] == "start"] == [2]
    assert init_preset(first) == "unfreeze"
    assert init_preset(tmp_path) == "finetune"


def stages(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Config]:
    """The configs of the runs that `train` would make."""
    made: list[Config] = []

    def train_config(config: Config, *rest: Any) -> Any:
        made.append(config)
        return runs.Run(Path("runs/x"), None, "test", Path())  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "train_config", train_config)
    monkeypatch.setattr(m1clip.config, "init_preset", lambda model: "unfreeze")
    runs.train(screen=screen(), **options)
    return made


def test_settings_of_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"threads": 3, "loss": "sigmoid", "batch_size": 64}
    transfer = {"wise_ft": "search", "lora_rank": 4, "unfreeze_image": 2}
    first, second = stages(monkeypatch, recipe="finetune", minutes=30, lr=1e-5, **common, **transfer)
    assert (first.train.minutes, first.train.epochs, first.train.threads, first.optim.lr) == (None, 20, 3, 1e-3)
    assert (first.transfer.recipe, first.transfer.wise_ft, first.transfer.lora_rank) == ("frozen", "off", 0)
    assert (second.train.minutes, second.train.epochs, second.transfer.init) == (30, None, "runs/x")
    assert (second.optim.optimizer, second.optim.layer_decay, second.optim.lr) == ("adamw", 0.8, 1e-5)
    assert (second.transfer.wise_ft, second.transfer.lora_rank) == ("search", 4)
    for stage in (first, second):
        assert (stage.train.loss, stage.train.batch_size) == ("sigmoid", 64)


def test_a_folder_in_use_is_refused_before_the_first_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match="already contains a run"):
        stages(monkeypatch, recipe="finetune", run=tmp_path)


FINETUNE = {"wise_ft": "0.5", "retention_data": ("set",), "lora_rank": 8, "unfreeze_image": 0, "unfreeze_text": 2}


@pytest.mark.parametrize(("name", "value"), FINETUNE.items())
def test_an_option_without_a_meaning_is_refused(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    option = "--" + name.replace("_", "-")
    for recipe in ("scratch", "frozen"):
        with pytest.raises(UserError, match=f"^{option} works with --init or --recipe finetune"):
            stages(monkeypatch, recipe=recipe, **{name: value})
    for start in ({"init": "runs/x"}, {"recipe": "finetune"}):
        assert getattr(stages(monkeypatch, **start, **{name: value})[-1].transfer, name) == value


def test_one_call_cannot_make_two_runs() -> None:
    with pytest.raises(UserError, match="consists of two runs"):
        setup.prepare(Config(transfer=TransferConfig(recipe="finetune")), print, lambda facts: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("images", "minutes", "there", "chosen", "words"),
    [
        (500, None, True, "frozen", "too few to train from scratch"),
        (500, 60, True, "frozen", "too few to train from scratch"),
        (5_000, 5, True, "frozen", "too few to train from scratch"),
        (5_000, 30, True, "finetune", "30 minutes are enough"),
        (5_000, 30, False, "scratch", "is not installed"),
        (200_000, 30, True, "scratch", "enough to train from scratch"),
    ],
)
def test_auto(
    images: int, minutes: float | None, there: bool, chosen: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Source:
        def samples(self, split: str) -> range:
            return range(images)

    monkeypatch.setattr(setup, "is_synthetic", lambda data: False)
    monkeypatch.setattr(setup, "open_data", lambda *rest: Source())
    monkeypatch.setattr(setup, "installed", lambda tower: there)
    found, reason = setup.choose_recipe(Config(train=TrainConfig(minutes=minutes)))
    assert found == chosen
    assert words in reason


def test_auto_with_the_settings_of_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages(monkeypatch, recipe="auto", init="runs/x")[0].transfer.recipe == "scratch"
    assert stages(monkeypatch, recipe="auto")[0].transfer.recipe == "scratch", "synthetic images"
    monkeypatch.setattr(runs, "choose_recipe", lambda config: ("frozen", ""))
    (chosen,) = stages(monkeypatch, recipe="auto", batch_size=16)
    assert (chosen.transfer.recipe, chosen.train.batch_size, chosen.optim.lr) == ("frozen", 16, 1e-3)
