"""Deciding a run: the recipe, batch sizes, augmentation.

A pure function of settings, data and machine.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import H200, M1, M4, TURING, XEON
from small_run import small_config

from m1clip import console
from m1clip.config import NAMES, Config, DataConfig, TrainConfig, from_dict, recipe_defaults
from m1clip.data.augment import Augmentation
from m1clip.errors import UserError
from m1clip.hardware.machine_info import MachineInfo
from m1clip.losses.registry import LOSSES
from m1clip.model.presets import (
    CLIPConfig,
    HeadConfig,
    PretrainedImageConfig,
    PretrainedTextConfig,
    VisionTowerConfig,
    preset,
)
from m1clip.model.residual import ResidualKind
from m1clip.optimizers import OPTIMIZERS
from m1clip.training.batch_choice import default_batch, fit_memory
from m1clip.training.budget import MILD, Strength, augmentation_strength, best_members, max_epochs
from m1clip.training.decision import (
    Dataset,
    InitialModel,
    Length,
    Machine,
    Measurements,
    MemoryFacts,
    TuningFacts,
)
from m1clip.training.device_choice import Candidate, Choice, candidates
from m1clip.training.duration import step_plan
from m1clip.training.head_trial import (
    HeadCandidate,
    HeadStart,
    HeadTrial,
    Scores,
    choose_heads,
    head_candidates,
)
from m1clip.training.memory import MemoryEstimate
from m1clip.training.recipe_choice import choose_recipe
from m1clip.training.resolve import augmentation_for, resolve
from m1clip.training.run import first_stage, second_stage
from m1clip.training.spec import (
    DECIDED,
    DecidedConfig,
    DecidedSettings,
    RunSpec,
    Settings,
    read_origins,
    read_spec,
    setting,
    undecided,
)
from m1clip.training.transfer import Trainable
from m1clip.training.tuning import ModelSize


@pytest.mark.parametrize(
    ("images", "minutes", "installed", "recipe", "reason"),
    [
        (500, None, True, "frozen", "500 images are too few"),
        (500, 60, True, "frozen", "500 images are too few"),
        (5_000, 5, True, "frozen", "5,000 images are too few"),
        (5_000, 30, True, "finetune", "30 minutes and 5,000 images are enough"),
        (
            5_000,
            30,
            False,
            "scratch",
            "pip install 'm1clip[towers]' would give about twice the recall",
        ),
        (2_000_000, 30, True, "scratch", "2,000,000 images are enough"),
    ],
)
def test_recipe_auto_choice(
    images: int, minutes: float | None, installed: bool, recipe: str, reason: str
) -> None:
    settings = Settings({"data": ("photos",), "minutes": minutes})
    chosen_recipe, why = choose_recipe(settings, lambda: Dataset(images), lambda tower: installed)
    assert chosen_recipe == recipe
    assert reason in why


@pytest.mark.parametrize(
    ("option", "recipe"),
    [
        ({"model": "original"}, "scratch"),
        ({"vision_width": 64}, "scratch"),
        ({"tokenizer": "char"}, "scratch"),
        ({"unfreeze_text": 2}, "finetune"),
        ({"text_tower": "x"}, "frozen"),
        ({}, "scratch"),  # synthetic images
    ],
)
def test_options_decide_the_recipe_before_the_data_is_opened(
    option: dict[str, Any], recipe: str
) -> None:
    opened: Any = lambda: pytest.fail("the data was opened")  # noqa: E731
    assert choose_recipe(Settings(option), opened, lambda tower: True)[0] == recipe


BOTH, TEXT, IMAGE = Trainable(), Trainable(image=False), Trainable(text=False)
PRETRAINED = CLIPConfig(
    image_tower=PretrainedImageConfig(),
    text_tower=PretrainedTextConfig(),
    image_head=HeadConfig(kind="adapter", hidden=8),
)
VIT = dataclasses.replace(PRETRAINED, image_tower=VisionTowerConfig())
CONV = dataclasses.replace(PRETRAINED, image_tower=VisionTowerConfig(stem="conv"))
OWN_TEXT = dataclasses.replace(PRETRAINED, text_tower=CLIPConfig().text_tower)


def augmented(
    trainable: Trainable, config: CLIPConfig, letters: bool = False, **options: Any
) -> Augmentation:
    model = InitialModel(config, trainable, new_heads=True, char_tokens=letters)
    settings = Config(data=DataConfig(source=("photos",), **options))
    return augmentation_for(settings, False, model)


@pytest.mark.parametrize(
    ("augmentation", "patches", "words"),
    [
        (augmented(BOTH, PRETRAINED), 0.0, 0.0),
        (augmented(BOTH, VIT), 0.5, 0.0),
        (augmented(BOTH, CONV), 0.0, 0.0),
        (augmented(BOTH, CONV, patch_dropout=0.4), 0.4, 0.0),
        (augmented(BOTH, OWN_TEXT), 0.0, 0.3),
        (augmented(BOTH, OWN_TEXT, letters=True), 0.0, 0.0),
        (augmented(BOTH, PRETRAINED, word_dropout=0.2), 0.0, 0.2),
        (augmented(IMAGE, OWN_TEXT), 0.0, 0.0),
    ],
)
def test_augmentation_by_tower(augmentation: Augmentation, patches: float, words: float) -> None:
    assert (augmentation.patch_dropout, augmentation.word_dropout) == (patches, words)
    assert (augmentation.crop_min, augmentation.flip) == (0.6, 0.5)


def test_augmentation_with_a_frozen_image_tower() -> None:
    assert augmented(TEXT, PRETRAINED, word_dropout=0.2, crop_min=0.5) == Augmentation(
        word_dropout=0.2
    )
    assert augmented(TEXT, OWN_TEXT) == Augmentation(word_dropout=0.3)


class Estimate:
    """Bytes that are linear in the batch size."""

    largest: Any = MemoryEstimate.largest

    def peak(self, batch: int, checkpointing: bool) -> float:
        return 1e9 + batch * (4e6 if checkpointing else 1e7)


@pytest.mark.parametrize(
    ("batch", "micro", "limit", "expected"),
    [
        (128, 0, 3e9, "batch 128 fits"),
        (0, 0, 3e9, "batch 128 fits"),
        (0, 0, 1e12, "batch 1024 fits"),
        (128, 0, 2e9, "batch 128 fits with gradient checkpointing"),
        (128, 0, 1.4e9, "batch 128 fits in micro-batches of 32"),
        (128, 0, 1.015e9, "batch 128 fits in micro-batches of 2 with gradient checkpointing"),
        (128, 16, 1.2e9, "batch 128 fits in micro-batches of 16"),
        (128, 0, 0.9e9, "None"),
        (0, 0, 0.9e9, "None"),
    ],
)
def test_settings_for_a_memory_limit(batch: int, micro: int, limit: float, expected: str) -> None:
    config = small_config({"train.batch_size": batch or "auto", "train.micro_batch": micro})
    assert str(fit_memory(config, 1024, limit, Estimate())) == expected


OWN = InitialModel(CLIPConfig())
ADAPTERS = CLIPConfig(image_head=HeadConfig(kind="adapter", hidden=8))
HEADS = InitialModel(ADAPTERS, new_heads=True)
MODELS = {
    "scratch": OWN,
    "frozen": HEADS,
    "finetune": InitialModel(ADAPTERS, is_pretrained=True),
    "--init": InitialModel(CLIPConfig(), is_pretrained=True),
}


@pytest.mark.parametrize(
    ("images", "model", "batch"),
    [(3, OWN, 3), (20, HEADS, 8), (274, HEADS, 32), (5_000, HEADS, 512), (5_000, OWN, 64)],
)
def test_default_batch_fits_the_images(images: int, model: InitialModel, batch: int) -> None:
    assert default_batch(model, images) == batch


@pytest.mark.parametrize(
    ("images", "options", "limit", "facts", "batch"),
    [
        (24_000, {}, 1e12, H200, 512),
        (10**6, {}, 1e12, H200, 1024),
        (3_000, {}, 1e12, H200, 64),  # as on other devices
        (500, {}, 1e12, H200, 32),  # few images: an epoch has several steps
        (24_000, {}, 6e9, H200, 128),  # half of the memory is 1 GB and 200 images
        (24_000, {"batch_size": 64}, 1e12, H200, 64),
        (24_000, {"micro_batch": 16}, 1e12, H200, 64),
        (24_000, {"device": "cpu"}, 1e12, H200, 64),
        (24_000, {"init": "runs/x"}, 1e12, H200, 64),
        (24_000, {}, 1e12, M4, 64),
    ],
)
def test_default_batch_of_a_card_uses_its_memory_and_the_number_of_images(
    images: int, options: dict[str, Any], limit: float, facts: MachineInfo, batch: int
) -> None:
    recipe = {} if "init" in options else {"recipe": "scratch"}
    settings = Settings({"data": ("photos",), "epochs": 10.0, **recipe, **options})
    spec = resolve(settings, Dataset(images), machine(facts, images=images, limit=limit))
    assert spec.config.train.batch_size == batch
    again = resolve(spec.as_settings(), Dataset(images), machine(facts, images=images))
    assert again.config.train.batch_size == batch, "a decided run stays as it is"


def test_default_batch_is_that_of_the_recipe() -> None:
    assert {
        recipe: default_batch(model, 10**6) for recipe, model in MODELS.items()
    } == recipe_defaults("batch_size")


def machine(
    facts: MachineInfo = XEON,
    ranks: int = 1,
    unreadable: int = 0,
    images: int = 1000,
    limit: float = 8e9,
) -> Machine:
    """A machine that answers without measuring: the first device is the fastest."""

    def initial_model(config: Config) -> InitialModel:
        if config.transfer.recipe == "frozen":
            new = config.transfer.init is None
            return InitialModel(
                PRETRAINED, Trainable(False, False), is_pretrained=True, new_heads=new
            )
        is_pretrained = config.transfer.init is not None
        trainable = Trainable(
            config.transfer.unfreeze_image != 0, config.transfer.unfreeze_text != 0
        )
        members = config.model.members or 1
        shape = CLIPConfig()
        if members > 1:  # of a run that is resumed or repeated
            shape = dataclasses.replace(
                shape, members=members, embed_dim=config.model.embed_dim or 512
            )
        char_tokens = config.model.tokenizer == "char"
        return InitialModel(shape, trainable, is_pretrained, char_tokens=char_tokens)

    def fastest(config: Config) -> Choice:
        options = candidates(config.train.device, config.train.precision, facts)
        if not options:
            raise UserError("no such device")
        measured = tuple(Candidate(*option, seconds=(1.0,)) for option in options)
        return Choice(*options[0], candidates=measured if len(options) > 1 else ())

    def heads(config: Config, lr: float | None) -> HeadTrial:
        adapters: tuple[ResidualKind, ...] = ()
        starts: tuple[HeadStart, ...] = ("cca", "general")
        if config.transfer.init is not None:
            adapters, starts = ("embeddings", "features"), ()
        candidates = head_candidates(adapters, starts, lr)

        def trial(candidate: HeadCandidate) -> Scores:
            yield np.array([2.0])
            yield np.array([1.0 - candidate.lr])

        return choose_heads(candidates, images, trial)

    measurements = Measurements(
        initial_model=initial_model,
        fastest=fastest,
        memory=lambda config: MemoryFacts(limit, Estimate()),
        fits_one_gpu=lambda config, rows: rows < 100,
        readable_images=lambda config: images - unreadable,
        steps_in_time=lambda config: Length(int(100 * (config.train.minutes or 0)) + 1, 3),
        heads=heads,
        tuning=lambda config: TuningFacts(limit, 1e13, ModelSize(150_000_000, 1e11, True)),
    )
    return Machine(facts, measurements, ranks, is_installed=lambda tower: True)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "data": st.sampled_from([("synthetic",), ("photos",)]),
        "recipe": st.sampled_from(["auto", "scratch", "frozen", "finetune"]),
        "init": st.sampled_from([None, "runs/x"]),
        "unfreeze_image": st.sampled_from([-1, 0, 1]),
        "batch_size": st.sampled_from([None, "auto", 2, 7, 64, 4096]),
        "micro_batch": st.sampled_from([0, 2, 16]),
        "memory": st.sampled_from([None, "1MB", "2GB", "64GB"]),
        "captions_per_step": st.sampled_from([None, 1, 3]),
        "text_contrast": st.sampled_from([None, 0.0, 0.3]),
        "device": st.sampled_from(["auto", "cpu", "mps", "cuda"]),
        "precision": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
        "fsdp": st.sampled_from(["auto", "on", "off"]),
        "loss": st.sampled_from([*LOSSES]),
        "optimizer": st.sampled_from([*OPTIMIZERS]),
        "duration": st.sampled_from(
            [("minutes", 0.01), ("minutes", 30.0), ("epochs", 0.001), ("steps", 500)]
        ),
        "often": st.sampled_from([("eval_every", 0), ("eval_every", 10), ("evaluations", 2)]),
        "warmup": st.sampled_from([0.1, 100.0]),
        "flip": st.sampled_from([None, 0.0, 0.5]),
        "tokenizer": st.sampled_from(["char", "bpe"]),
        "patience": st.sampled_from([0, 3]),
        "seed": st.integers(0, 9),
    },
).map(
    lambda options: dict(options.pop(name, ("seed", 3)) for name in ("duration", "often")) | options
)
DATASETS = st.builds(
    Dataset,
    images=st.sampled_from([2, 20, 1000, 5_000, 2_000_000]),
    streamed=st.booleans(),
    median_captions=st.integers(1, 9),
    fewest_captions=st.integers(1, 3),
    mentions_sides=st.booleans(),
)
MACHINES = st.tuples(
    st.sampled_from([XEON, M1, M4, TURING, H200]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([0, 1]),
)


def decide(
    options: dict[str, Any], dataset: Dataset, where: tuple[MachineInfo, int, int]
) -> RunSpec | str:
    """The spec, or the error line."""
    facts, ranks, unreadable = where
    try:
        return resolve(
            Settings(options), dataset, machine(facts, ranks, unreadable, dataset.images)
        )
    except UserError as error:
        return str(error)


@given(options=OPTIONS, dataset=DATASETS, where=MACHINES)
def test_any_settings_give_a_final_spec_or_one_line(
    options: dict[str, Any], dataset: Dataset, where: tuple[MachineInfo, int, int]
) -> None:
    spec = decide(options, dataset, where)
    assert decide(options, dataset, where) == spec, "the same input gives the same spec"
    if isinstance(spec, str):
        assert spec
        assert "\n" not in spec
        return
    assert undecided(spec.config) == []
    train = spec.config.train
    assert 2 <= train.batch_size <= dataset.images
    assert train.micro_batch <= train.batch_size
    assert train.fsdp in ("on", "off")
    assert spec.config.transfer.recipe != "auto"
    for name, value in options.items():
        if value is not None and spec.chosen_by.get(name) == "user":
            assert setting(spec.config, name) == value
    for name in NAMES:
        if setting(spec.config, name) != setting(Config(), name):
            assert name in spec.chosen_by, f"nobody chose {name}"


@given(options=OPTIONS, dataset=DATASETS, where=MACHINES)
def test_spec_is_read_back_from_toml_and_resolves_to_itself(
    options: dict[str, Any], dataset: Dataset, where: tuple[MachineInfo, int, int]
) -> None:
    spec = decide(options, dataset, where)
    if isinstance(spec, str):
        return
    values = tomllib.loads(spec.to_toml())
    config = DecidedConfig.of(from_dict(values, "config.toml"))
    assert RunSpec(config, read_origins(values, "config.toml")) == spec
    facts, ranks, unreadable = where
    again = resolve(spec.as_settings(), dataset, machine(facts, ranks, unreadable, dataset.images))
    assert again == spec


def test_origin_of_values(tmp_path: Path) -> None:
    options = {"data": ("photos",), "recipe": "frozen", "epochs": 2, "learning_rate": 1e-5}
    spec = resolve(Settings(options), Dataset(5_000, median_captions=3), machine(images=5_000))
    chosen = spec.chosen_by
    expected = {
        "data": "user",
        "recipe": "user",
        "lr": "user",
        "optimizer": "recipe",
        "batch_size": "rule",
        "captions_per_step": "rule",
        "steps": "rule",
        "device": "measurement",
    }
    assert {name: chosen.get(name) for name in expected} == expected
    assert "epochs" not in chosen
    assert "workers" not in chosen, "a default"
    assert (spec.config.train.batch_size, spec.config.train.steps) == (512, 2 * 9)

    (tmp_path / "config.toml").write_text(spec.to_toml())
    assert read_spec(tmp_path) == spec


def repeated(
    tmp_path: Path, spec: RunSpec, where: MachineInfo = XEON, **options: Any
) -> tuple[RunSpec, set[str]]:
    """A run of another run's config.toml with more options, and the settings that it reports as changed."""
    path = tmp_path / "config.toml"
    path.write_text(spec.to_toml())
    data = Dataset(5_000, median_captions=3)
    with console.capture() as output:
        again = resolve(Settings(options, path), data, machine(where, images=5_000))
    lines = output.getvalue().splitlines()
    different = {n for n in NAMES if setting(again.config, n) != setting(spec.config, n)}
    last = lines[-1].removeprefix("changed    ").split(", ") if different else []
    assert {change.split()[0] for change in last} == different
    return again, different


def test_config_of_a_run_repeats_it_on_any_machine(tmp_path: Path) -> None:
    options = {"data": ("photos",), "recipe": "frozen", "epochs": 2, "flip": 0.1}
    data = Dataset(5_000, median_captions=3)
    spec = resolve(Settings(options), data, machine(images=5_000))
    assert repeated(tmp_path, spec, H200) == (spec, set())
    assert repeated(tmp_path, spec, H200, data=["photos"]) == (spec, set())
    again, changed = repeated(tmp_path, spec, H200, wd=spec.config.optim.wd)
    assert changed == set()
    assert again.chosen_by == {**spec.chosen_by, "wd": "user"}


def test_changed_options_redecide_what_rules_and_measurements_chose(tmp_path: Path) -> None:
    data = Dataset(5_000, median_captions=3)
    options = {"data": ("photos",), "recipe": "frozen", "lr": 1e-5, "seed": 3}
    frozen = resolve(Settings(options), data, machine(images=5_000))
    assert (frozen.chosen_by["steps"], frozen.chosen_by["optimizer"]) == ("recipe", "recipe")

    again, changed = repeated(tmp_path, frozen, recipe="scratch")
    fresh = resolve(Settings({**options, "recipe": "scratch"}), data, machine(images=5_000))
    assert again == fresh, "as if the user had typed all options of the first run"
    assert {"optimizer", "batch_size", "steps", "text_contrast", "patch_dropout"} <= changed
    assert (again.config.optim.lr, again.config.seed) == (1e-5, 3)

    again, changed = repeated(tmp_path, frozen, H200, optimizer="muon")
    assert changed == {"optimizer", "device", "precision"}
    assert again.chosen_by["optimizer"] == "user"


def test_changed_options_keep_the_length_that_the_user_asked_for(tmp_path: Path) -> None:
    data = Dataset(5_000, median_captions=3)
    photos: dict[str, Any] = {"data": ("photos",), "recipe": "scratch"}
    for length in ({"epochs": 2.0}, {"minutes": 2.0}, {"steps": 156}):
        spec = resolve(Settings(photos | length), data, machine(images=5_000))
        again, changed = repeated(tmp_path, spec, batch_size=16)
        assert changed == {"batch_size"}, length
        again, changed = repeated(tmp_path, spec, steps=5)
        assert (again.config.train.steps, again.config.train.evaluations) == (5, 5)
        again, changed = repeated(tmp_path, spec, eval_every=50)
        assert changed == {"eval_every", "evaluations"}
        assert "evaluations" not in again.chosen_by


def test_edited_value_of_a_config_is_the_users(tmp_path: Path) -> None:
    spec = resolve(Settings({"data": ("photos",), "recipe": "scratch"}), Dataset(5_000), machine())
    edited = dataclasses.replace(spec, config=spec.config.with_values(max_unreadable=0.5))
    again = repeated(tmp_path, edited, seed=1)[0]
    assert again.config.data.max_unreadable == 0.5
    assert again.chosen_by["max_unreadable"] == "user"


def test_clock_corrects_the_steps_of_a_spec() -> None:
    spec = resolve(Settings({"minutes": 2.0}), Dataset(1000), machine())
    assert (spec.config.train.steps, spec.config.train.minutes, spec.chosen_by["steps"]) == (
        201,
        None,
        "measurement",
    )
    corrected = spec.with_plan(spec.plan.corrected(50, 120))
    assert (corrected.plan.total_steps, corrected.config.train.plan) == (120, ((0, 201), (50, 120)))
    assert corrected.chosen_by["plan"] == "measurement"


@pytest.mark.parametrize(("images", "recipe"), [(200, "frozen"), (1000, "finetune")])
def test_trained_model_is_adapted_by_the_rule_and_config_tells_it(images: int, recipe: str) -> None:
    for typed in ({}, {"recipe": "auto"}):
        settings = Settings({"init": "runs/x", "steps": 5, **typed})
        with console.capture() as output:
            spec = resolve(settings, Dataset(images), machine(images=images))
        assert (spec.config.transfer.recipe, spec.config.transfer.init) == (recipe, "runs/x")
        assert (spec.chosen_by["recipe"], spec.chosen_by["init"]) == ("rule", "user")
        assert f"recipe     {recipe}, " in output.getvalue()
        assert spec.config.transfer.unfreeze_image == -1  # all blocks
        assert (spec.config.transfer.adapter == "embeddings") == (recipe == "frozen")
    explicit = resolve(
        DecidedSettings(
            complete=small_config({"transfer.init": "runs/x", "transfer.recipe": "auto"})
        ),
        Dataset(images),
        machine(images=images),
    )
    assert explicit.config.transfer.recipe == recipe


def test_model_to_start_from_is_adapted_without_evaluations() -> None:
    settings = Settings({"init": "runs/x", "steps": 5, "eval_every": 0})
    assert resolve(settings, Dataset(200), machine(images=200)).config.train.eval_every == 0


def test_options_of_fine_tuning_decide_what_is_trained() -> None:
    spec = resolve(Settings({"init": "runs/x", "lora": 8, "steps": 5}), Dataset(200), machine())
    assert (spec.config.transfer.recipe, spec.config.transfer.lora) == ("finetune", 8)


def test_learning_rate_of_heads_follows_from_held_out_images() -> None:
    frozen = {"recipe": "frozen", "data": ("photos",)}
    few = resolve(Settings(frozen), Dataset(30), machine(images=30))
    assert few.config.optim.lr == pytest.approx(1e-5)
    assert (few.config.transfer.heads, few.chosen_by["lr"]) == ("general", "rule")
    spec = resolve(Settings(frozen), Dataset(1000), machine())
    assert (spec.config.optim.lr, spec.chosen_by["lr"]) == (3e-4, "measurement")
    assert (spec.config.transfer.heads, spec.chosen_by["heads"]) == ("cca", "measurement")
    chosen_lr = resolve(Settings({**frozen, "lr": 0.5}), Dataset(1000), machine())
    assert chosen_lr.config.optim.lr == 0.5


def test_batch_is_for_the_readable_images_unless_given() -> None:
    few = machine(images=600, unreadable=100)
    assert resolve(Settings({}), Dataset(600), few).config.train.batch_size == 32
    assert resolve(Settings({"batch_size": 64}), Dataset(600), few).config.train.batch_size == 64
    with pytest.raises(UserError, match="5 training images do not fill one batch of 64"):
        resolve(Settings({"batch_size": 64}), Dataset(600), machine(images=600, unreadable=595))


def test_weights_are_sharded_if_a_step_does_not_fit_one_gpu() -> None:
    data = Dataset(10_000)
    for batch, ranks, expected in ((512, 8, "off"), (512, 4, "on"), (512, 1, "off")):
        spec = resolve(Settings({"batch_size": batch}), data, machine(H200, ranks, images=10_000))
        assert spec.config.train.fsdp == expected
    with pytest.raises(
        UserError, match="--batch-size 4 is less than one image for each of 8 ranks"
    ):
        resolve(Settings({"batch_size": 4}), data, machine(H200, 8, images=10_000))
    with pytest.raises(UserError, match="--fsdp on does not support --compile"):
        resolve(Settings({"fsdp": "on", "compile": True}), data, machine(H200, 2, images=10_000))
    with pytest.raises(UserError, match="--fsdp on does not support --precision fp16"):
        resolve(
            Settings({"fsdp": "on", "precision": "fp16", "device": "cuda"}),
            data,
            machine(H200, 2, images=10_000),
        )


@pytest.mark.parametrize("recipe", ["scratch", "frozen"])
def test_optimizer_has_its_own_default_learning_rate(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = dataclasses.replace(OPTIMIZERS["adamw"], lr_factor=0.5, wd_factor=4.0)
    monkeypatch.setitem(OPTIMIZERS, "adamw", entry)
    options = {"data": ("photos",), "recipe": recipe, "optimizer": "adamw"}
    with console.capture() as output:
        spec = resolve(Settings(options), Dataset(1000), machine())
    lr = recipe_defaults("lr")[recipe] * 0.5
    wd = recipe_defaults("wd")[recipe] * 4
    assert (spec.config.optim.lr, spec.config.optim.wd) == (lr, wd)
    assert spec.chosen_by["lr"] == spec.chosen_by["wd"] == "rule"
    assert (
        f"optimizer  adamw: --lr {lr:g}, --wd {wd:g} by default" in output.getvalue().splitlines()
    )
    assert resolve(spec.as_settings(), Dataset(1000), machine()) == spec, "not applied again"
    chosen_lr = resolve(Settings({**options, "lr": 0.1}), Dataset(1000), machine())
    assert (chosen_lr.config.optim.lr, chosen_lr.config.optim.wd) == (0.1, wd)
    other = resolve(Settings({**options, "optimizer": "muon"}), Dataset(1000), machine())
    assert other.config.optim.lr == recipe_defaults("lr")[recipe]


def test_reasons_are_told_in_the_order_of_the_decisions() -> None:
    photos = Settings({"data": ("photos",), "batch_size": "auto"})
    with console.capture() as output:
        resolve(photos, Dataset(1000), machine(limit=2.3e9))
    lines = output.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["recipe", "towers", "device", "memory", "heads"]
    assert "1,000 images are too few" in lines[0]
    assert lines[3] == "memory     batch 64 fits, within 2.3 GB"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = 5\n", "has no final value, so m1clip did not write this file"),
        ("chosen_by = 3\n", "chosen_by must be a table"),
        ("[chosen_by]\nnope = 'user'\n", "unknown setting 'nope'"),
        ("[chosen_by]\nlr = 'magic'\n", "chosen_by.lr must be one of user, preset"),
    ],
)
def test_damaged_spec_is_rejected_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    spec = resolve(Settings({}), Dataset(1000), machine())
    path = tmp_path / "config.toml"
    path.write_text(text if "steps" in text else text + spec.to_toml().partition("[chosen_by]")[0])
    if "[chosen_by]" in text:
        path.write_text(spec.to_toml().partition("[chosen_by]")[0] + text)
    with pytest.raises(UserError, match=message):
        read_spec(tmp_path)


def test_decided_config_has_only_final_values() -> None:
    spec = resolve(Settings({"minutes": 2.0}), Dataset(1000), machine())
    assert set(DECIDED) >= {item.name for item in dataclasses.fields(Augmentation)}
    for name in DECIDED.keys() - {"minutes", "epochs"}:  # which exclude steps
        open_value = setting(Config(), name)
        with pytest.raises(AssertionError, match=f"not decided: .*{NAMES[name][1]}"):
            spec.config.with_values(**{name: open_value})
        assert name in undecided(spec.config.as_config().with_values(**{name: open_value}))
    with pytest.raises(UserError, match="--flip must be a finite number"):
        spec.config.with_values(flip=2.0)
    assert DecidedConfig.of(spec.config.as_config()) == spec.config


def limited(minutes: float, recipe: str = "scratch", **options: Any) -> tuple[RunSpec, str]:
    """A run of 1,000 images with a time, and what it prints."""
    settings = Settings({"data": ("photos",), "recipe": recipe, "minutes": minutes, **options})
    with console.capture() as output:
        spec = resolve(settings, Dataset(1_000, median_captions=5), machine(images=1_000))
    return spec, output.getvalue()


def test_time_that_would_not_help_is_given_back() -> None:
    steps_per_epoch = 1_000 // 64
    epochs = max_epochs("scratch", steps_per_epoch)
    max_steps = round(epochs * steps_per_epoch)
    short, printed = limited(2)
    assert (short.config.train.steps, "budget" in printed) == (201, False)
    long, printed = limited(1_000)
    assert (long.config.train.steps, long.config.train.max_epochs) == (max_steps, epochs)
    assert "1000 minutes are enough for" in printed
    assert "the run will end early" in printed
    chosen, printed = limited(1_000, max_epochs=1_000.0)
    assert chosen.config.train.steps == 1_000 * steps_per_epoch
    unlimited, printed = limited(1_000, data=("synthetic",))
    assert unlimited.config.train.steps == 100_001, "not measured on synthetic images"
    by_steps = resolve(
        Settings({"data": ("photos",), "recipe": "scratch", "steps": 10**6}),
        Dataset(1_000),
        machine(images=1_000),
    )
    assert by_steps.config.train.steps == 10**6, "the user's own number is never limited"


def test_demo_makes_all_its_steps_where_they_fit_and_fewer_elsewhere() -> None:
    """The machine of these tests makes 100 steps a minute."""
    data = Dataset(10_000, median_captions=5)

    def decided(**options: Any) -> tuple[TrainConfig, str]:
        with console.capture() as output:
            spec = resolve(Settings(options, preset="demo"), data, machine(images=10_000))
        return spec.config.train, output.getvalue()

    fast, printed = decided()
    plan = step_plan(fast)
    assert fast.steps == 156
    assert [step for step in range(1, 157) if plan.evaluates(step)] == [52, 104, 156]
    assert "the limit is 2, so the run will end early" in printed
    slow, printed = decided(minutes=1.2)
    assert slow.steps == 121
    assert "1.2 minutes are enough for 121 of 156 steps at the current speed" in printed
    chosen, printed = decided(steps=200)
    assert (chosen.steps, "budget" in printed) == (200, False)


@pytest.mark.parametrize("minutes", [2, 20, 1_000])
def test_members_share_a_time_that_is_too_long_for_one_model(minutes: float) -> None:
    """The machine of these tests makes 100 steps a minute, and an epoch has 15."""
    spec, printed = limited(minutes)
    count = best_members(round(100 * minutes) + 1, 1_000 // 64)
    assert spec.config.model.members == count
    assert spec.config.model.embed_dim == count * CLIPConfig().embed_dim
    assert (f"{count} models side by side" in printed) == (count > 1)
    for options in (
        {"members": 1},
        {"max_epochs": 50.0},
        {"embed_dim": 64},
        {"model": "ViT-B-32"},
        {"data": ("synthetic",)},
        {"recipe": "frozen"},
    ):
        other, printed = limited(minutes, **options)
        assert (other.config.model.members or 1) == 1, options
        assert "side by side" not in printed


@pytest.mark.parametrize(
    ("options", "mentions_sides", "mirror"),
    [
        ({}, False, True),
        ({"data": ("synthetic",)}, False, False),
        ({}, True, False),
        ({"flip": 0.0}, False, False),
        ({"mirror": False}, False, False),
        ({"mirror": True, "flip": 0.0}, False, True),
        ({"init": "runs/x"}, False, True),
        ({"init": "runs/x", "unfreeze_image": 0}, False, False),
    ],
)
def test_images_have_mirror_images_where_training_flips_them(
    options: dict[str, Any], mentions_sides: bool, mirror: bool
) -> None:
    usual = machine()

    def initial_model(config: Config) -> InitialModel:
        model = usual.measure.initial_model(config)
        return dataclasses.replace(model, shape=preset("tiny"))

    measure = dataclasses.replace(usual.measure, initial_model=initial_model)
    recipe = "finetune" if "init" in options else "scratch"
    settings = Settings({"data": ("photos",), "recipe": recipe, "steps": 100, **options})
    dataset = Dataset(1_000, mentions_sides=mentions_sides)
    spec = resolve(settings, dataset, dataclasses.replace(usual, measure=measure))
    assert spec.config.model.mirror == mirror


@pytest.mark.parametrize(
    ("options", "mild_after", "smoothing"),
    [
        ({}, 400, 0.09),
        ({"steps": 100}, 80, 0.0),
        ({"mild_after": 7, "label_smoothing": 0.3}, 7, 0.3),
        ({"mild_after": 0, "label_smoothing": 0.0}, 0, 0.0),
        ({"data": ("synthetic",)}, 0, 0.0),
        ({"loss": "sigmoid"}, 400, 0.0),
        ({"crop_min": 0.9, "word_dropout": 0.0, "cutmix": 0.0}, 0, 0.09),
        ({"recipe": "frozen"}, 0, 0.0),
        ({"init": "runs/x", "recipe": "finetune"}, 0, 0.0),
    ],
)
def test_runs_from_random_weights_are_smoothed_and_end_with_less_augmentation(
    options: dict[str, Any], mild_after: int, smoothing: float
) -> None:
    settings = Settings({"data": ("photos",), "recipe": "scratch", "steps": 500, **options})
    with console.quiet():
        config = resolve(settings, Dataset(1_000, median_captions=5), machine()).config
    assert config.data.mild_after == mild_after
    assert config.train.label_smoothing == smoothing


def test_label_smoothing_of_another_loss_is_rejected() -> None:
    with pytest.raises(UserError, match="--label-smoothing does not work with --loss sigmoid"):
        limited(1, loss="sigmoid", label_smoothing=0.1)


@pytest.mark.parametrize(
    ("options", "mirror"),
    [
        ({}, True),
        ({"unfreeze_image": 0}, False),
        ({"flip": 0.0}, False),
        ({"mirror": False}, False),
        ({"recipe": "frozen"}, False),
    ],
)
def test_fine_tuned_towers_have_mirror_images(options: dict[str, Any], mirror: bool) -> None:
    shape = CLIPConfig(
        image_tower=PretrainedImageConfig(),
        text_tower=PretrainedTextConfig(),
        image_head=HeadConfig(kind="adapter", hidden=8),
        text_head=HeadConfig(kind="adapter", hidden=8),
    )
    usual = machine()

    def initial_model(config: Config) -> InitialModel:
        transfer = config.transfer
        trains_images = transfer.recipe != "frozen" and transfer.unfreeze_image != 0
        trainable = Trainable(trains_images, transfer.recipe != "frozen")
        return InitialModel(shape, trainable, is_pretrained=True)

    measure = dataclasses.replace(usual.measure, initial_model=initial_model)
    values = {"data": ("photos",), "recipe": "finetune", "steps": 100, "init": "runs/x", **options}
    one_machine = dataclasses.replace(usual, measure=measure)
    spec = resolve(Settings(values), Dataset(1_000), one_machine)
    assert spec.config.model.mirror == mirror


def test_option_of_trained_towers_is_for_the_second_stage() -> None:
    settings = Settings({"data": ("photos",), "recipe": "finetune", "mirror": True})
    assert first_stage(settings).config.model.mirror is None
    assert second_stage(settings, Path("runs/heads")).config.model.mirror is True


def test_mirror_images_of_a_frozen_tower_are_rejected() -> None:
    with pytest.raises(UserError, match="--mirror does not work with a frozen image tower"):
        limited(1, recipe="frozen", mirror=True)


def strength_of(spec: RunSpec) -> Strength:
    return Strength(*(setting(spec.config, name) for name in Strength._fields))


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"loss": "sigmoid"}, "--loss sigmoid"),
        ({"teacher": "a"}, "--teacher"),
        ({"recipe": "frozen"}, "a frozen image tower"),
    ],
)
def test_what_cannot_have_cutmix_is_rejected_or_does_without(
    options: dict[str, Any], obstacle: str
) -> None:
    spec, printed = limited(1_000, **options)
    assert spec.config.data.cutmix == 0
    assert "--cutmix" not in printed
    if "recipe" not in options:
        assert spec.config.train.max_epochs == max_epochs("scratch", 1_000 // 64, can_mix=False)
    with pytest.raises(UserError, match=f"--cutmix does not work with {obstacle}"):
        limited(1_000, cutmix=0.5, **options)


def test_cutmix_of_the_user_stays() -> None:
    chosen, _ = limited(1, cutmix=0.7)
    assert chosen.config.data.cutmix == 0.7
    without, _ = limited(1_000, cutmix=0.0)
    assert without.config.data.cutmix == 0
    assert without.config.train.max_epochs == max_epochs("scratch", 1_000 // 64, can_mix=False)


def test_long_runs_from_random_weights_are_augmented_more() -> None:
    short, printed = limited(1)
    assert strength_of(short) == MILD
    assert "augment" not in printed
    long, printed = limited(1_000)
    strength = augmentation_strength(max_epochs("scratch", 1_000 // 64))
    assert strength_of(long) == strength
    assert "--cutmix 0.5" in printed
    assert "because each image is seen" in printed
    assert long.chosen_by["crop_min"] == "rule"

    chosen, _ = limited(1_000, crop_min=0.9)
    assert (chosen.config.data.crop_min, chosen.config.data.word_dropout) == (
        0.9,
        strength.word_dropout,
    )
    frozen, _ = limited(1_000, recipe="frozen")
    assert frozen.config.data.crop_min == 1.0, "frozen towers see complete images"
    synthetic, _ = limited(1_000, data=("synthetic",))
    assert synthetic.config.data.crop_min == 1.0
    sides = resolve(
        Settings({"data": ("photos",), "recipe": "scratch", "minutes": 1_000.0}),
        Dataset(1_000, mentions_sides=True),
        machine(images=1_000),
    )
    assert sides.config.data.crop_min == 1.0, "off stays off"
