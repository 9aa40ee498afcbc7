"""The door: words in, exit code out; a person's mistake is one line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import signal
import sys
import threading
import traceback
import typing
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cyclopts import CycloptsError, UnusedCliTokensError
from cyclopts.config import Dict

from m1clip.cli import data as datasets
from m1clip.cli import machine, models
from m1clip.cli import runs as checkpoints
from m1clip.cli import runs as watching
from m1clip.cli import train as training
from m1clip.cli.app import app
from m1clip.config import DURATIONS, HOW, Config, from_dict, read_preset, read_toml, to_dict
from m1clip.errors import UserError
from m1clip.io import read_small

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
            raise UserError(f"--resume takes its settings from the run; leave out {others[0]}, or begin a new run")
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
            raise UserError(f"{name}: the value is empty, as of a shell variable that is not set ('.' is this folder)")
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


FAMILIES = (
    training,
    checkpoints,
    datasets,
    models,
    watching,
    machine,
)  # importing a family puts its commands into the table
INTERRUPTED = 130  # the shell's code for Ctrl-C
_leaving = threading.Event()  # set once the process is about to end


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command; a person's mistake is one line and exit code 2, never a traceback (unless --debug)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _open_standard_streams()
        signal.signal(signal.SIGINT, _on_interrupt)
    debug = "--debug" in words
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # in an ASCII locale, "?" for what it cannot show
    try:
        words = spelled_out([word for word in words if word != "--debug"])
        if not {"--help", "-h", "--version"} & set(words):
            _set_environment()
        app.config = layers(words)
        app(words, exit_on_error=False, print_error=False)
    except (UserError, CycloptsError) as error:
        if debug:
            traceback.print_exc()
        hint = ""
        if isinstance(error, UnusedCliTokensError) and words[0] == "train":
            hint = " Name your images right after train, or with --data."
        print(f"m1clip: {_one_line(error)}{hint}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of a pipe, such as head, has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        if debug:
            traceback.print_exc()
        where = f"{error.filename}: " if error.filename else ""
        print(f"m1clip: {_one_line(where + (error.strerror or str(error)))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("m1clip: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        _leaving.set()
    sys.exit(0)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once; a later Ctrl-C, while that is handled, ends the process without a traceback."""
    if _leaving.is_set():
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # show the cursor, which a progress bar hides
        os._exit(INTERRUPTED)
    _leaving.set()
    raise KeyboardInterrupt


def _open_standard_streams() -> None:
    """Where the shell closed one (>&-), /dev/null takes its place; else the next file opened would get its number."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _set_environment() -> None:
    """torch reads these once, when it is imported; no command has imported it yet."""
    from m1clip.hardware.device import environment

    os.environ.update(environment(platform.system(), os.environ))


def _one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())
