"""Options of m1clip train: what --help shows, and what the command gets."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError
from rich.console import Console

from m1clip.cli import main as cli
from m1clip.cli.app import DATA, MACHINE, MODELS, PHOTOS, RUNS, START_HERE, app
from m1clip.cli.options import command_words
from m1clip.cli.train import COMMON_OPTIONS
from m1clip.config import NAMES, Config, make_config, recipe_defaults
from m1clip.formatting import number
from m1clip.optimizers import MUON_WEIGHT_DECAY, OPTIMIZERS

COMMAND_GROUPS = (START_HERE, PHOTOS, RUNS, MODELS, DATA, MACHINE)
BY_RECIPE = {
    "optimizer",
    "lr",
    "warmup",
    "layer_decay",
    "epochs",
    "patience",
    "unfreeze_image",
    "batch_size",
}


def shown_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """Setting -> its line of `m1clip train --help-all`."""
    # Cyclopts keeps the console of the first --help.
    monkeypatch.setattr(app, "_console", Console(width=2000))
    with pytest.raises(SystemExit):
        cli.main(["train", "--help-all"])
    lines = re.findall(r"^│ .*--.*$", capsys.readouterr().out, re.MULTILINE)
    names = {f"--{name.replace('_', '-')}": name for name in NAMES}
    return {names[word]: line for line in lines for word in line.split()[:2] if word in names}


def shown_values(line: str) -> dict[str, str]:
    """The default of each recipe, as the help of train explains it."""
    (text,) = re.findall(r"\[default: (.*?)\]", line)
    usual, *others = text.split("; ")
    listed = dict(other.split(": ") for other in others)
    finetune = listed.get("finetune", usual)
    return {
        "scratch": usual,
        "frozen": listed.get("frozen", usual),
        "finetune": finetune,
        "--init": listed.get("--init", finetune),
    }


def as_text(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def test_help_shows_the_default_that_each_recipe_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = shown_options(monkeypatch, capsys)
    used = {recipe: make_config({"recipe": recipe}) for recipe in ("scratch", "frozen", "finetune")}
    used["--init"] = make_config({"recipe": "finetune", "init": str(tmp_path)})
    by_recipe = set()
    for name, (section, key) in NAMES.items():
        if name in ("plan", "data", "recipe", "init"):
            continue
        values = {
            label: getattr(getattr(config, section, config), key) for label, config in used.items()
        }
        # Decided with the data: tests/training/test_autotune.py compares these.
        if name == "batch_size":
            values = recipe_defaults(name)
        if all(value in (None, ()) for value in values.values()):
            assert "[default: " not in shown[name]
            continue
        assert shown_values(shown[name]) == {
            label: as_text(value) for label, value in values.items()
        }, name
        if len(set(values.values())) > 1:
            by_recipe.add(name)
    assert by_recipe == BY_RECIPE


def test_help_describes_every_optimizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = shown_options(monkeypatch, capsys)["optimizer"]
    for name, entry in OPTIMIZERS.items():
        assert f"{name}: {entry.help_text}" in line
    assert f"always {MUON_WEIGHT_DECAY}" in shown_options(monkeypatch, capsys)["muon_lr"]


def parse_options(words: list[str]) -> dict[str, Any]:
    """The arguments that the command is called with."""
    _, bound, _ = app.parse_args(["train", *words], exit_on_error=False, print_error=False)
    return dict(bound.arguments)


def test_command_gets_what_was_typed_and_nothing_else() -> None:
    assert parse_options([]) == {}
    words = [
        "photos",
        "more",
        "--batch_size=auto",
        "--no-cuda-graph",
        "--lr",
        "5e-4",
        "--steps",
        "2.5",
        "--seed=-1",
    ]
    expected = {
        "data": ["photos", "more"],
        "batch_size": "auto",
        "cuda_graph": False,
        "lr": 5e-4,
        "steps": 2.5,
    }
    assert parse_options(words) == {**expected, "seed": -1}, (
        "defaults too; the settings check the values"
    )
    assert parse_options(["--wise-ft", "0.5", "--save-every", "30s"]) == {
        "wise_ft": "0.5",
        "save_every": "30s",
    }
    assert parse_options(["--weight-decay", "1", "--data", "a", "--data", "b"]) == {
        "wd": 1,
        "data": ["a", "b"],
    }


def test_words_of_a_background_run_give_the_same_arguments() -> None:
    options = parse_options(
        [
            "photos",
            "x.jpg",
            "--compile",
            "--no-cuda-graph",
            "--lr=1e-3",
            "--model",
            "tiny",
            "--seed=-1",
        ]
    )
    assert parse_options(command_words(options)) == options
    assert command_words({"preset": None, "out": Path("a b")}) == ["--out=a b"]


def test_torchrun_passes_every_option_on() -> None:
    from torch.distributed.run import parse_args

    names = [*NAMES, "out", "resume", "config", "preset", "background"]
    words = [f"--{name.replace('_', '-')}" for name in names]
    parsed = parse_args(["--nproc-per-node", "2", "-m", "m1clip", "train", "photos", *words])
    assert parsed.training_script_args == ["train", "photos", *words]
    with pytest.raises(SystemExit):
        # Ambiguous: an option of torchrun begins like it.
        parse_args(["-m", "m1clip", "train", "--run", "x"])


def test_config_has_the_defaults_of_scratch() -> None:
    scratch = make_config({"recipe": "scratch"})
    assert scratch == Config().with_values(recipe="scratch", epochs=scratch.train.epochs)


def test_help_of_train_shows_ten_common_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "_console", Console(width=200))
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = re.findall(r"^│ (?:DATA )?--([a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(shown) == 11
    assert {name.replace("-", "_") for name in shown} == set(COMMON_OPTIONS)


def commands() -> list[tuple[str, ...]]:
    """The words of each command, such as ("search",) and ("data", "make")."""
    words: list[tuple[str, ...]] = []
    for name in [name for name in app if not name.startswith("-")]:
        subcommands = [sub for sub in app[name] if not sub.startswith("-")]
        words += [(name, sub) for sub in subcommands] or [(name,)]
    return words


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_in_a_group_and_its_examples_can_be_run(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each example has a line of its own, of at most 80 columns, with options that exist."""
    assert all(group in COMMAND_GROUPS for group in app[words[0]].group)
    monkeypatch.setattr(app, "_console", Console(width=80))
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    shown = capsys.readouterr().out
    assert f"Usage: m1clip {' '.join(words)}" in shown
    options = shown.find("╭")
    description = shown[shown.index("\n") : options if options >= 0 else None]
    examples = re.findall(r"^ +((?:torchrun .*)?m1clip .*)$", description, re.MULTILINE)
    assert any(f"m1clip {' '.join(words)}" in example for example in examples)
    for example in examples:
        _, *arguments = shlex.split(example[example.index("m1clip ") :])
        assert "m1clip" not in arguments, "two examples on a line"
        app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_example_with_an_unknown_option_cannot_be_run() -> None:
    for words in (["train", "photos", "--nonsense", "3"], ["eval", "runs/demo", "--split", "x"]):
        with pytest.raises(CycloptsError):
            app.parse_args(words, exit_on_error=False, print_error=False)
