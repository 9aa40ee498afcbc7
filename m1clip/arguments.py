"""What stands between the words of a command line and cyclopts: short names, and the layers of a config file."""

from __future__ import annotations

import dataclasses
import json
import platform
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyclopts.config import Dict

from m1clip.config import DURATIONS, Config
from m1clip.configfile import HOW, from_dict, read_preset, read_toml, to_dict
from m1clip.errors import UserError
from m1clip.files import read_small

# --model and --data are also names of sections, which cyclopts would take them for; the rest is what others call it.
SHORT = {"--model": "--model.preset", "--data": "--data.source", "--batch-size": "--batch"}
DEVICE = ("--device", "--train.device")
GPU = [f"{option}=gpu" for option in DEVICE]
LEARNING_RATE = (
    "there are two learning rates: --optim.muon-lr for the matrices of the towers (--optim.name muon, the default) "
    "and --optim.lr for everything else"
)


def layers(words: list[str]) -> tuple[Any, ...]:
    """What --config and --preset say, checked, for the settings that the command line leaves open."""
    if not words or words[0] != "train":
        return ()
    _check_whole_numbers(words)
    if _value_of(words, "--config") and _value_of(words, "--preset"):
        raise UserError("give --config or --preset, not both: each settles every setting of a run")
    if _value_of(words, "--resume"):
        others = [
            word
            for word in words[1:]
            if word.startswith("--") and word.partition("=")[0] not in ("--resume", "--background")
        ]
        if others:
            raise UserError(
                f"--resume takes its settings from the run; leave out {others[0]}, or begin a new run"
            )
        return ()
    readers: list[tuple[str | None, Callable[[str], dict[str, Any]]]] = [
        (_value_of(words, "--config"), lambda value: read_toml(Path(value))),
        (_value_of(words, "--preset"), read_preset),
    ]
    # A recipe brings settings of its own, for what neither the command line nor a file says.
    recipe, init = (_value_of(words, f"--{name}", f"--transfer.{name}") for name in ("recipe", "init"))
    if recipe == "frozen":
        readers.append((recipe, read_preset))
    if init:
        readers.append((init, lambda value: read_preset(preset_for(Path(value)))))
    elif recipe == "finetune" and not any(value for value, _ in readers):
        # Those of its second stage; the first has its own (train/stages.py).
        readers.append((recipe, lambda value: read_preset("unfreeze")))
    found = []
    for value, read in readers:
        if value is None:
            continue
        values = to_dict(from_dict(read(value), value))
        # A duration on the command line takes the place of the file's, of whichever kind that is.
        if any(_value_of(words, f"--{name}", f"--train.{name}") for name in DURATIONS):
            for name in DURATIONS:
                values["train"].pop(name, None)
        # Another size on the command line takes the place of the file's shape, which spells out every number.
        if _value_of(words, "--model.preset"):
            values["model"] = {key: value for key, value in values["model"].items() if key in HOW}
        found.append(Dict(data=_flat(values), source=value, use_commands_as_keys=False))
    return tuple(found)


def preset_for(model: Path) -> str:
    """The settings for a start from a model: those of a model on frozen towers differ, its heads alone were trained."""
    for folder in (model, model / "best", model / "model"):
        try:
            told = json.loads(read_small(folder / "config.json"))
        except (OSError, ValueError, RecursionError):
            continue
        return "unfreeze" if isinstance(told, dict) and "towers" in told else "finetune"
    return "finetune"


def spelled_out(words: list[str]) -> list[str]:
    """The command line in the words that cyclopts knows; `train photos` is `train --data photos`."""
    for option, word in zip(["", *words], words, strict=False):
        if word == "" or (word.startswith("--") and word.endswith("=")):
            name = word.rstrip("=") or option
            raise UserError(
                f"{name}: the value is empty, as of a shell variable that is not set ('.' is this folder)"
            )
    gpu = "mps" if platform.system() == "Darwin" else "cuda"
    words = [
        word.removesuffix("gpu") + gpu if word in GPU or (word == "gpu" and option in DEVICE) else word
        for option, word in zip(["", *words], words, strict=False)
    ]
    if words[:1] != ["train"]:
        return words
    first_option = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    parts = [word.partition("=") for word in words[first_option:]]
    for name, _, _ in parts:
        if name.replace("_", "-") in ("--lr", "--learning-rate"):
            raise UserError(f"{name}: {LEARNING_RATE}")
    options = [SHORT.get(name.replace("_", "-"), name) + equals + value for name, equals, value in parts]
    sources = [word for source in words[1:first_option] for word in ("--data.source", source)]
    return ["train", *sources, *options]


def _check_whole_numbers(words: list[str]) -> None:
    """cyclopts would cut 2.5 steps to 2; a TOML file may not say it either."""
    for section, kind in typing.get_type_hints(Config).items():
        hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        for name in (name for name, hint in hints.items() if hint in (int, int | None)):
            long = f"--{section}.{name}"
            for option in (long, long.replace("_", "-"), f"--{name}"):
                value = _value_of(words, option)
                if value is not None and "." in value:
                    raise UserError(f"{option} must be a whole number, not {value}")


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """train.steps and not {train: {steps}}: cyclopts would take the tables `train` and `data` for the commands."""
    flat = {}
    for key, value in values.items():
        inner = value.items() if isinstance(value, dict) else ()
        flat.update({f"{key}.{name}": item for name, item in inner} if inner else {key: value})
    return flat


def _value_of(words: list[str], *names: str) -> str | None:
    """What stands after an option, by any of its names."""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in names and equals:
            return value
        if option in names and index + 1 < len(words):
            return words[index + 1]
    return None
