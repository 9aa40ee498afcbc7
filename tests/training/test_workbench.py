"""Resolving a run: recipes and their stages, options that do not apply, batch sizes, augmentation."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_sets import make_set
from small_run import prepared, small_config, small_options
from tower_run import frozen_config, frozen_options, patch_towers

import m1clip.config
from m1clip import console, time_use
from m1clip.config import OPTIMIZERS, Config, Recipe, TransferConfig, is_clip, load_config
from m1clip.data.augment import render
from m1clip.errors import UserError
from m1clip.training import initial_model, recipe_choice, training_data, transfer, workbench
from m1clip.training import run as runs
from m1clip.training.spec import Settings


def stages(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Config]:
    """The configs of the runs that `train` would start."""
    made: list[Config] = []

    def train_config(settings: Settings, *rest: Any, **more: Any) -> Any:
        made.append(settings.config)
        return runs.Run(Path("runs/x"), None, "test", Path())  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "train_config", train_config)
    monkeypatch.setattr(m1clip.config, "is_clip", lambda model: False)
    runs.train(**options)
    return made


def test_finetune_trains_two_stages_in_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_towers(monkeypatch)
    short = {"train": {"epochs": 1, "batch_size": 16}, "optim": {"optimizer": "adamw", "lr": 1e-3}}
    monkeypatch.setattr(m1clip.config, "read_recipe", lambda name, *variants: Recipe(short, 16))
    options = frozen_options(tmp_path) | {
        "recipe": "finetune",
        "unfreeze_image": 0,
        "unfreeze_text": 1,
        "steps": 2,
    }
    with console.capture() as output:
        assert runs.train(out=tmp_path / "run", **options).path == tmp_path / "run"
    first = tmp_path / "run-frozen"
    assert load_config(first / "config.toml").transfer.recipe == "frozen"
    second = load_config(tmp_path / "run" / "config.toml")
    assert (second.transfer.recipe, second.transfer.init, second.train.steps) == (
        "finetune",
        str(first),
        2,
    )
    text = output.getvalue()
    assert text.index("stage 1") < text.index("stage 2")
    assert (is_clip(first), is_clip(tmp_path)) == (False, True)

    # config.toml tells what was trained, and repeats it.
    again = stages(monkeypatch, config=tmp_path / "run")
    assert again == [second]


def test_finetune_stage_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"threads": 3, "loss": "sigmoid", "batch_size": 64}
    transfer = {"wise_ft": "search", "unfreeze_image": 2, "image_tower": "org/vit"}
    first, second = stages(
        monkeypatch, recipe="finetune", minutes=30, lr=1e-5, **common, **transfer
    )
    assert (first.train.minutes, first.train.epochs, first.train.threads, first.optim.lr) == (
        None,
        8,
        3,
        3e-4,
    )
    assert (first.transfer.recipe, first.transfer.wise_ft) == ("frozen", "off")
    assert (second.train.minutes, second.train.epochs, second.transfer.init) == (
        pytest.approx(30, abs=1),
        None,
        "runs/x",
    )
    assert (second.optim.optimizer, second.optim.layer_decay, second.optim.lr) == (
        "adamw",
        0.8,
        1e-5,
    )
    assert second.transfer.wise_ft == "search"
    assert (first.transfer.image_tower, second.transfer.image_tower) == (
        "org/vit",
        TransferConfig().image_tower,
    )
    for stage in (first, second):
        assert (stage.train.loss, stage.train.batch_size) == ("sigmoid", 64)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_is_used_in_both_stages_and_the_rest_is_reported(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"optimizer": optimizer, "wd": 0.3, "layer_decay": 0.5, "lr": 1e-5, "steps": 9}
    with console.capture() as output:
        first, second = stages(monkeypatch, recipe="finetune", **options)
    for stage in (first, second):
        assert (stage.optim.optimizer, stage.optim.wd) == (optimizer, 0.3)
    assert (first.optim.lr, first.optim.layer_decay, second.optim.layer_decay) == (3e-4, 1.0, 0.5)
    lines = output.getvalue().splitlines()
    stage_1 = f"8 epochs, {optimizer}, lr 0.0003 (--layer-decay, --lr, --steps: for stage 2)"
    assert lines[0] == f"stage 1    training heads on frozen towers: {stage_1}"


def test_minutes_are_those_of_both_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []

    def train_config(
        settings: Settings,
        run: Any,
        name: Any = None,
        on_log: Any = None,
        used_seconds: float = 0.0,
        source: Any = None,
    ) -> Any:
        used.append(used_seconds)
        now[0] += 600
        return runs.Run(Path("runs/x"), None, "test", Path())  # type: ignore[arg-type]

    now = [100.0]
    for module in (runs, time_use):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(runs, "train_config", train_config)
    runs.train(recipe="finetune", minutes=30)
    assert used == [0.0, 600.0], "the first stage has its own duration"


def test_existing_run_is_refused_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match="already contains a run"):
        stages(monkeypatch, recipe="finetune", out=tmp_path)
    with pytest.raises(UserError, match="--recipe finetune has two stages"):
        prepared(small_config({"transfer.recipe": "finetune"}))


FINETUNE = {"wise_ft": "0.5", "unfreeze_image": 0, "unfreeze_text": 2}
TOWERS = {"image_tower": "nope", "text_tower": "nope"}


@pytest.mark.parametrize(("name", "value"), (FINETUNE | TOWERS).items())
def test_options_of_another_recipe_are_refused(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: dict[str, dict[str, Any]] = {"--init": {"init": "runs/x"}}
    starts |= {
        f"--recipe {recipe}": {"recipe": recipe} for recipe in ("scratch", "frozen", "finetune")
    }
    allowed = (
        ("--init", "--recipe finetune")
        if name in FINETUNE
        else ("--recipe frozen", "--recipe finetune")
    )
    for label, start in starts.items():
        if label in allowed:
            assert any(
                getattr(c.transfer, name) == value
                for c in stages(monkeypatch, **start, **{name: value})
            )
        else:
            with pytest.raises(
                UserError, match=rf"^--{name.replace('_', '-')} works with .*, not with {label}$"
            ):
                stages(monkeypatch, **start, **{name: value})
    recipes = [config.transfer.recipe for config in stages(monkeypatch, **{name: value})]
    assert recipes == (["frozen"] if name in TOWERS else ["frozen", "finetune"]), (
        "auto chooses a recipe that it fits"
    )


def test_recipe_auto_applies_recipe_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    (undecided,) = stages(monkeypatch, init="runs/x")
    assert undecided.transfer.recipe == "auto", "decided when the model is read"
    assert stages(monkeypatch, init="runs/x", recipe="finetune")[0].optim.layer_decay == 0.8
    assert stages(monkeypatch)[0].transfer.recipe == "scratch", "synthetic images"
    assert stages(monkeypatch, data="photos", preset="demo")[0].transfer.recipe == "scratch"
    monkeypatch.setattr(recipe_choice, "choose_recipe", lambda *facts: ("frozen", ""))
    (chosen,) = stages(monkeypatch, batch_size=16)
    assert (chosen.transfer.recipe, chosen.train.batch_size, chosen.optim.lr) == (
        "frozen",
        16,
        3e-4,
    )


@pytest.mark.parametrize("batch", [None, "auto"])
@pytest.mark.parametrize("frozen", [True, False])
def test_batch_size_is_reduced_for_few_images(
    tmp_path: Path, batch: str | None, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_towers(monkeypatch)
    changes = {"train.batch_size": batch, "data.synthetic_images": 20, "train.micro_batch": 64}
    config = frozen_config(tmp_path, **changes) if frozen else small_config(changes)
    with console.record_warnings() as warnings:
        inputs = prepared(config)
    assert (inputs.config.train.batch_size, inputs.config.train.micro_batch) == (8, 0)
    assert warnings[0].startswith("only 20 training images")


def test_batch_without_enough_images_is_rejected_before_towers_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_model, "from_towers", lambda *_: pytest.fail("towers were loaded"))
    with pytest.raises(UserError, match="40 training images do not fill one batch of 64"):
        prepared(frozen_config(tmp_path, **{"train.batch_size": 64}))


def test_compiled_text_tower_gets_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench, "check_compile", lambda kind: None)
    configs = [
        small_config({"model.compile": on, "model.context_length": 40}) for on in (True, False)
    ]
    lengths = [prepared(config).training[0].tokens.shape[1] for config in configs]
    assert lengths[0] == 40 > lengths[1]


def test_conv_stem_starts_with_whitening_filters_and_sees_complete_images() -> None:
    inputs = prepared(small_config())
    filters = inputs.model.init.stem_filters
    assert filters is not None
    stem = inputs.build_model().get_submodule("image_tower.patch.convs.0")
    assert torch.equal(stem.weight[: len(filters)], filters)  # type: ignore[index]
    assert len(filters) == len(stem.weight) // 2 * 2  # type: ignore[arg-type]
    pixels = render(
        torch.from_numpy(inputs.splits["train"].images.try_read(np.arange(64))[0]),
        None,
        inputs.model.preprocess,
    )
    deviations = torch.nn.functional.conv2d(pixels, filters).std(dim=(0, 2, 3))
    assert ((deviations > 0.5) & (deviations < 2)).all()
    assert inputs.model.preprocess.resize == "squash"


def test_patch_stem_starts_as_clip_does() -> None:
    inputs = prepared(small_config({"model.stem": "patch"}))
    assert inputs.model.init.stem_filters is None
    assert inputs.model.preprocess.resize == "shortest"


@pytest.mark.parametrize(("image_size", "side"), [(24, 28), (32, 37), (40, 40), (48, 48)])
def test_cached_images_are_larger_for_crops_but_not_than_the_files(
    tmp_path: Path, image_size: int, side: int
) -> None:
    data = make_set(tmp_path / "set")  # 52 x 40
    changes = {"data.source": (str(data),), "data.crop_min": 0.6, "model.image_size": image_size}
    inputs = prepared(small_config(changes))
    assert inputs.training[0].pixels().shape[1:] == (side, side, 3)
    assert inputs.splits["val"].images.try_read(np.arange(1))[0].shape[1:] == (
        image_size,
        image_size,
        3,
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that open data and build models, in the order of their calls."""
    names: list[str] = []

    def count(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            # Counting parameters is free.
            if name != "build_clip" or torch.get_default_device().type != "meta":
                names.append(name)
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    count(training_data, "open_data")
    count(runs, "open_data")
    count(transfer, "build_clip")
    count(runs, "load")
    return names


# The best model is loaded at the end, for the test split.
ONCE = ["open_data", "build_clip", "load"]


def test_data_is_opened_and_the_model_built_once(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the data is read to choose the recipe, and nothing is built to be described."""
    monkeypatch.setattr(runs, "installed", lambda tower: False)  # a small model from random weights
    data = make_set(tmp_path / "set")
    options = small_options(
        {"data.source": (str(data),), "train.steps": 2, "transfer.recipe": None}
    )
    options = {name: value for name, value in options.items() if name not in SHAPE}
    runs.train(out=tmp_path / "run", **options)
    assert calls == ONCE
    calls.clear()
    runs.resume(tmp_path / "run")
    assert calls == ONCE


def test_model_with_frozen_towers_is_built_once(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that computes the features is the one that is trained."""
    patch_towers(monkeypatch)
    runs.train_config(frozen_config(tmp_path, **{"train.steps": 2}), tmp_path / "run")
    assert calls == ONCE


SHAPE = (
    "image_size",
    "patch_size",
    "vision_width",
    "vision_layers",
    "text_width",
    "text_layers",
    "embed_dim",
)
