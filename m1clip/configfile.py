"""Config to TOML and back. Reading is strict: an unknown key or a wrong type is one clear line."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from m1clip.config import Config, ModelConfig
from m1clip.errors import UserError
from m1clip.files import read_small

# How a model is computed, not what it is: another size keeps these.
HOW = ("attention_image", "attention_text", "recompute", "compile", "graph")
SHAPE_OF_0_1 = {item.name for item in dataclasses.fields(ModelConfig)} - {"preset", "stem", *HOW}


def load_config(path: Path) -> Config:
    """Read a TOML file; what it does not say stays at its default."""
    return from_dict(read_toml(path), str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file as a dict, or one clear error."""
    if path.is_dir():
        path = path / "config.toml"  # a run folder is meant
    try:
        return _as_it_was(tomllib.loads(read_small(path).decode("utf-8")))
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file") from None
    except RecursionError:
        raise UserError(f"{path}: not a TOML file: nested too deeply") from None
    except ValueError as error:  # also of bytes that are no UTF-8, and of a number with thousands of digits
        raise UserError(f"{path}: not a TOML file: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _as_it_was(values: dict[str, Any]) -> dict[str, Any]:
    """A run of version 0.1 spelled out its shape without a stem; settings that came later stay off in it."""
    model = values.get("model")
    if not isinstance(model, dict) or "stem" in model or not model.keys() >= SHAPE_OF_0_1:
        return values
    later = {"model": {"stem": "patch"}, "data": {"word_dropout": 0.0}, "train": {"text_contrast": 0.0}}
    return values | {
        section: settings | values.get(section, {})
        for section, settings in later.items()
        if isinstance(values.get(section, {}), dict)
    }


def preset_names() -> list[str]:
    """Names of the shipped whole-run settings."""
    folder = resources.files("m1clip") / "presets"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_preset(name: str) -> dict[str, Any]:
    """A shipped whole-run setting, such as `demo` or `prior-art`."""
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise UserError(f"--preset {name}: no such preset: did you mean '{near}'? (all: {', '.join(names)})")
    return tomllib.loads((resources.files("m1clip") / "presets" / f"{name}.toml").read_text(encoding="utf-8"))


def from_dict(values: dict[str, Any], where: str) -> Config:
    """Build and check a Config from nested plain values."""
    try:
        return _build(Config, values, where, "")
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values; a None (not given) is left out, so that TOML can hold the result."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item is not None}
        return list(value) if isinstance(value, tuple) else value

    return typing.cast("dict[str, Any]", plain(dataclasses.asdict(config)))


def to_toml(config: Config) -> str:
    """The config as TOML text: top-level values first, then a table a section."""
    values = to_dict(config)
    lines = [f"{key} = {_literal(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for section, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{section}]", *(f"{key} = {_literal(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return repr(value)


def _build(kind: type, values: Any, where: str, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{where}: {prefix.rstrip('.') or 'the file'} must be a table, not {_name(values)}")
    hints = typing.get_type_hints(kind)
    known = [item.name for item in dataclasses.fields(kind)]
    built = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise UserError(f"{where}: unknown key '{prefix}{key}': did you mean '{prefix}{near}'?")
        hint = hints[key]
        nested = dataclasses.is_dataclass(hint)
        built[key] = (
            _build(hint, value, where, f"{prefix}{key}.")
            if nested
            else _convert(hint, value, where, prefix + key)
        )
    return kind(**built)


def _convert(hint: Any, value: Any, where: str, key: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where}: {key} = {value!r}: choose from {', '.join(map(str, args))}")
        return value
    if origin in (Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        return _convert(next((kind for kind in kinds if type(value) is kind), kinds[0]), value, where, key)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise UserError(f"{where}: {key} must be a list, not {_name(value)}")
        return tuple(_convert(args[0], item, where, key) for item in items)
    if type(value) is int and abs(value) >= 2**63:
        raise UserError(f"{where}: {key} is larger than TOML's numbers may be")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise UserError(f"{where}: {key} must be {_PLAIN[hint]}, not {_name(value)}")
    return value


_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


def _name(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    return "a list" if isinstance(value, list) else repr(value)
