"""Config: validation, TOML round trip, one-line errors."""

import ast
import dataclasses
import itertools
import json
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from cyclopts import Parameter
from hypothesis import given, settings
from hypothesis import strategies as st

import m1clip.config
from m1clip.config import (
    NAMES,
    RECIPES,
    SECTIONS,
    Config,
    TransferConfig,
    from_dict,
    load_config,
    make_config,
    read_preset,
    read_recipe,
    to_toml,
)
from m1clip.errors import UserError
from m1clip.model.presets import clip_config

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type may hold."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return st.sampled_from(args)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        literals = [values_of(arg) for arg in args[1:] if typing.get_origin(arg) is Literal]
        return st.one_of(st.none(), values_of(args[0]), *literals)
    if typing.get_origin(hint) is tuple:
        return st.lists(TEXT, min_size=1, max_size=3).map(tuple) if args[0] is str else st.just(())
    numbers = st.floats(1e-9, 0.999)
    return {bool: st.booleans(), str: TEXT, int: st.integers(2, 256), float: numbers}[hint]


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A config that is allowed, with any value in each field."""
    built = {}
    for section, kind in SECTIONS.items():
        hints = typing.get_type_hints(kind)
        values = {item.name: draw(values_of(hints[item.name])) for item in dataclasses.fields(kind)}
        if section == "train":
            for name in draw(st.permutations(["minutes", "epochs", "steps"]))[1:]:
                values[name] = None
            if isinstance(values["batch_size"], int):
                values["micro_batch"] = min(values["micro_batch"], values["batch_size"])
            values["save_every"] = draw(
                st.none() | st.integers(1, 99) | st.sampled_from(["30s", "1.5h"])
            )
            values[draw(st.sampled_from(["eval_every", "evaluations"]))] = None
            steps = values["steps"]
            values["plan"] = ((0, 9), (5, steps)) if steps is not None and steps > 5 else ()
            values["memory"] = draw(st.none() | st.sampled_from(["8GB", "1.5 GiB", "900MB"]))
            values["precision"] = "bf16" if values["device"] == "cpu" else values["precision"]
        if section == "model" and values["members"] is not None:
            values["members"] = 1 + values["members"] % 16  # at most 16
        if section == "transfer":
            values |= {
                "wise_ft": "0.5",
                "recipe": "scratch" if values["init"] is None else "finetune",
            }
        built[section] = kind(**values)
    return Config(seed=draw(st.integers(0, 2**31 - 1)), **built)


@settings(max_examples=40)
@given(configs())
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_text(to_toml(config), encoding="utf-8", newline="")
    assert load_config(path) == config
    assert to_toml(load_config(path)) == to_toml(config)


def test_missing_settings_have_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 7\n[train]\nepochs = 2\n[data]\nsource = 'photos'\n")
    config = load_config(path)
    assert config.seed == 7
    assert config.train.epochs == 2.0
    assert isinstance(config.train.epochs, float)
    assert config.data.source == ("photos",)
    assert config.optim == m1clip.config.OptimConfig()
    assert load_config(path.rename(tmp_path / "config.toml").parent) == config, "a run folder"


def test_settings_of_older_runs_that_changed_nothing_are_ignored() -> None:
    assert from_dict({"transfer": {"lora_rank": 0}}, "config.toml") == Config()


MISTAKES = [
    (
        {"data": {"patch_dropout": 1.0}},
        ["--patch-dropout must be a finite number at least 0 and below 1"],
    ),
    ({"modle": {}}, ["unknown key 'modle'", "'model'"]),
    ({"train": {"bacth_size": 4}}, ["unknown key 'train.bacth_size'", "'train.batch_size'"]),
    ({"transfer": {"lora_rank": 8}}, ["unknown key 'transfer.lora_rank'"]),  # removed
    (
        {"optim": {"learning_rate": 1.0}},
        ["unknown key 'optim.learning_rate'", "did you mean 'optim."],
    ),
    ({"train": {"batch_size": "12"}}, ["train.batch_size", "an integer", "'12'"]),
    ({"train": {"batch_size": 12.0}}, ["train.batch_size", "an integer"]),
    ({"train": {"batch_size": True}}, ["train.batch_size", "an integer"]),
    ({"optim": {"lr": "fast"}}, ["optim.lr", "a finite number"]),
    ({"model": {"grad_checkpointing": 1}}, ["model.grad_checkpointing", "true or false"]),
    ({"model": {"name": 5}}, ["model.name", "text in quotes"]),
    ({"model": {"stem": "max"}}, ["model.stem", "patch, conv"]),
    ({"data": {"source": 3}}, ["data.source", "a list"]),
    ({"data": {"source": [3]}}, ["data.source", "text in quotes"]),
    ({"data": {"source": []}}, ["--data is empty"]),
    ({"train": 3}, ["train must be a table"]),
    ({"train": {"minutes": 1, "epochs": 1}}, ["--minutes and --epochs"]),
    ({"train": {"steps": 0}}, ["--steps must be a finite number above 0"]),
    ({"train": {"batch_size": 1}}, ["--batch-size must be at least 2"]),
    (
        {"train": {"batch_size": 8, "micro_batch": 9}},
        ["--micro-batch 9 is more than --batch-size 8"],
    ),
    ({"train": {"save_total_limit": 0}}, ["--save-total-limit must be a finite number at least 1"]),
    ({"train": {"minutes": float("inf")}}, ["minutes must be a finite number"]),
    ({"optim": {"warmup": float("inf")}}, ["warmup must be a finite number"]),
    ({"optim": {"lr": float("nan")}}, ["lr must be a finite number"]),
    ({"optim": {"warmup": 2.5}}, ["--warmup", "integer number of steps"]),
    ({"optim": {"lr": 0.0}}, ["--lr must be a finite number above 0"]),
    ({"data": {"crop_min": 0.0}}, ["--crop-min must be a finite number above 0"]),
    ({"data": {"flip": 1.5}}, ["--flip must be", "at most 1"]),
    ({"data": {"workers": -1}}, ["--workers"]),
    ({"model": {"image_size": 10**6}}, ["--image-size", "at most 4,096"]),
    ({"transfer": {"wise_ft": "2"}}, ["--wise-ft is off, search, or a number from 0 to 1"]),
    (
        {"transfer": {"init": "x", "recipe": "scratch"}},
        ["--init cannot be combined with --recipe scratch"],
    ),
    (
        {"transfer": {"init": "x", "recipe": "scratch"}},
        ["--init cannot be combined with --recipe scratch"],
    ),
    ({"optim": {"optimizer": "sgd"}}, ["optim.optimizer", "one of muon, adamw"]),
    ({"train": {"batch_size": 0}}, ["--batch-size must be at least 2"]),
    ({"train": {"batch_size": "all"}}, ["train.batch_size must be an integer or auto, not 'all'"]),
    ({"seed": -1}, ["--seed must be"]),
]


@pytest.mark.parametrize(
    ("values", "words"), MISTAKES, ids=[repr(values)[:60] for values, _ in MISTAKES]
)
def test_invalid_values_are_one_line_errors(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        from_dict(values, "my.toml")
    message = str(caught.value)
    assert message.startswith("my.toml: ")
    assert "\n" not in message
    for word in words:
        assert word in message


SHAPE_MISTAKES = [
    ({"image_size": 100}, "image_size 100 is not a multiple of patch_size 16: try 96"),
    ({"image_size": 8}, "try 16"),
    ({"vision_width": 200}, "a width of 200 cannot be split into 3 heads"),
    ({"text_width": 0}, "--text-width must be a finite number at least 1"),
    ({"context_length": 2}, "context_length must be at least 3"),
    ({"vision_width": 6}, "multiple of 4"),
    ({"name": "VIT-B-32"}, "did you mean 'ViT-B-32'?"),
]


@pytest.mark.parametrize(("values", "words"), SHAPE_MISTAKES)
def test_impossible_model_shapes(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        clip_config(m1clip.config.ModelConfig(**values))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flat_names_are_unique() -> None:
    settings = [
        (section, item.name)
        for section, kind in SECTIONS.items()
        for item in dataclasses.fields(kind)
    ]
    assert len(NAMES) == len(settings) + 1  # + seed
    assert set(NAMES.values()) == {*settings, ("", "seed")}


def test_options_override_the_file_and_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(
        "[train]\nepochs = 4\nbatch_size = 32\n[model]\nname = 'tiny'\nvision_width = 64\ncompile = true\n"
    )
    config = make_config({"minutes": 2, "batch_size": "auto", "data": "photos"}, file)
    assert (config.train.minutes, config.train.epochs, config.train.batch_size) == (
        2.0,
        None,
        "auto",
    )
    assert (config.data.source, config.model.vision_width) == (("photos",), 64)
    other = make_config({"model": "original"}, file)
    assert (other.model.vision_width, other.model.compile, other.train.epochs) == (None, True, 4.0)
    frozen = make_config({"recipe": "frozen", "weight_decay": 0.2})
    assert (frozen.train.epochs, frozen.optim.optimizer, frozen.optim.wd) == (8, "adamw", 0.2)
    (tmp_path / "config.json").write_text('{"model": {"image_head": {"kind": "adapter"}}}')
    tuned = {"recipe": "finetune", "init": str(tmp_path)}
    assert make_config(tuned).optim.layer_decay == 0.8
    assert make_config({**tuned, "init": str(tmp_path / "none")}).optim.lr == 2e-5
    with pytest.raises(UserError, match="unknown option 'bacth_size': did you mean 'batch_size'"):
        make_config({"bacth_size": 3})
    with pytest.raises(UserError, match="not both"):
        make_config({}, file, "demo")


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = = 3")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.toml").write_text("\n")  # all settings by default is not what was meant
    for name, words in (
        ("none.toml", "no such config file"),
        ("broken.toml", "not a TOML"),
        ("binary.toml", "not a TOML"),
        ("empty.toml", "is empty; remove it"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            load_config(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def parameter_help(section: type, name: str) -> str:
    """The help text that the Parameter of a setting has; "" for none."""
    hint = typing.get_type_hints(section, include_extras=True)[name]
    help_texts = [
        part.help for part in getattr(hint, "__metadata__", ()) if isinstance(part, Parameter)
    ]
    return next(filter(None, help_texts), "")


def test_every_setting_has_a_help_text() -> None:
    tree = ast.parse(Path(m1clip.config.__file__).read_text(encoding="utf-8"))
    sections = {kind.__name__: kind for kind in SECTIONS.values()}
    texts = []
    for kind in (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in sections
    ):
        for field, text in itertools.pairwise(kind.body):
            if isinstance(field, ast.AnnAssign):
                below = ast.literal_eval(text.value) if isinstance(text, ast.Expr) else ""
                texts.append(
                    below or parameter_help(sections[kind.name], ast.unparse(field.target))
                )
    assert len(texts) == sum(len(dataclasses.fields(kind)) for kind in SECTIONS.values())
    assert all(text.endswith(".") for text in texts)


def test_shipped_presets_load() -> None:
    names = m1clip.config.preset_names()
    assert set(names) == {"demo", "original"}
    for name in names:
        config = from_dict(read_preset(name), name)
        clip_config(config.model)
        assert from_dict(m1clip.config.to_dict(config), name) == config
    original = from_dict(read_preset("original"), "original")
    assert (original.model.name, original.train.batch_size, original.train.epochs) == (
        "original",
        12,
        15.0,
    )
    assert original.data.synthetic_images == 216
    with pytest.raises(UserError, match="did you mean 'original'"):
        read_preset("orginal")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_files_of_that_name_but_no_presets(name: str) -> None:
    assert from_dict(read_recipe(name).settings, name).train.epochs
    assert make_config({"recipe": name}).transfer.recipe == name
    with pytest.raises(UserError, match=rf"--recipe {name}.*demo, original"):
        make_config({}, preset=name)


def test_recipes_are_the_choices_of_the_option() -> None:
    files = {item.stem for item in (Path(m1clip.config.__file__).parent / "recipes").glob("*.toml")}
    hint = typing.get_type_hints(TransferConfig)["recipe"]
    assert files == set(RECIPES) == set(typing.get_args(hint)) - {"auto"}


@pytest.mark.parametrize("clip", [True, False])
def test_finetuning_by_kind_of_model(clip: bool, tmp_path: Path) -> None:
    kind = "projection" if clip else "adapter"
    (tmp_path / "config.json").write_text(json.dumps({"model": {"image_head": {"kind": kind}}}))
    assert make_config({"init": str(tmp_path)}).transfer.recipe == "auto"
    config = make_config({"init": str(tmp_path), "recipe": "finetune"})
    decided = (config.optim.lr, config.train.epochs, config.transfer.unfreeze_image)
    assert decided == ((2e-5, 10, -1) if clip else (4e-4, 5, 3))
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert make_config({}, path) == config, "repeated by its own config.toml"


def test_patience_of_a_recipe_yields_to_a_run_without_evaluations() -> None:
    """An error about an option that nobody typed would be the alternative."""
    options = {"recipe": "finetune", "init": "runs/x"}
    assert make_config(options).train.patience == 3
    assert make_config({**options, "eval_every": 0}).train.patience == 0
    with pytest.raises(UserError, match="--patience counts evaluations"):
        make_config({**options, "eval_every": 0, "patience": 2})


def test_suggestions_are_similar_names_or_none() -> None:
    cases = {
        "background": "only the command m1clip train",
        "resume": "use m1clip.resume(run)",
        "bacth_sze": "did you mean 'batch_size'?",
        "ou": "did you mean 'out'?",
        "run": "did you mean 'out'?",
        "zebra": "m1clip train --help lists all options",
    }
    for name, words in cases.items():
        with pytest.raises(UserError, match=f"unknown option '{name}'.*{re.escape(words)}"):
            make_config({name: 1})
    with pytest.raises(
        UserError, match=r"unknown key 'train.zebra' \(known: minutes, epochs, "
    ) as caught:
        from_dict({"train": {"zebra": 1}}, "config.toml")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(("system", "device"), [("Darwin", "mps"), ("Linux", "cuda")])
def test_gpu_is_the_gpu_of_the_system(
    system: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    assert make_config({"device": "gpu"}).train.device == device
    assert make_config({"device": "cpu"}).train.device == "cpu"
