"""Validation of values from files: JSON against schemas, settings against types, size limits."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from m1clip.errors import UserError
from m1clip.formatting import did_you_mean


def format_version(record: Any) -> int:
    """The "format" field of a file that m1clip wrote.

    KeyError, TypeError or ValueError if it is missing or invalid.
    """
    version = record["format"]
    if type(version) is not int or version < 1:
        raise ValueError(f"format must be an integer of at least 1, not {str(version)[:40]}")
    return version


# Larger than any published model: anything above is a mistake, or a malicious file.
LIMITS: dict[str, float] = {
    **{
        "image_size": 4096,
        "patch_size": 1024,
        "context_length": 4096,
        "vocab_size": 2**21,
        "mlp_ratio": 64,
    },
    **dict.fromkeys(("width", "vision_width", "text_width", "embed_dim", "hidden"), 2**14),
    **dict.fromkeys(("layers", "vision_layers", "text_layers"), 256),
    **dict.fromkeys(("heads",), 1024),
    **dict.fromkeys(("members",), 16),
}


def check_limits(values: object, prefix: str) -> None:
    """Raise UserError for a size above LIMITS, before anything is built from it."""
    for name, limit in LIMITS.items():
        value = getattr(values, name, None)
        if value is not None and value > limit:
            raise UserError(f"{prefix}{name} must be at most {limit:,}, not {value:,}")


def validate(cls: type, values: dict[str, Any], label: str) -> dict[str, Any]:
    """Return the arguments of a dataclass; UserError names a missing, unknown or invalid key."""
    hints = get_type_hints(cls)
    odd = sorted(set(values) ^ set(hints))
    if odd:
        raise UserError(f"{label} has missing or unknown keys: {', '.join(map(ascii, odd))}")
    return {name: convert(hint, values[name], f"{label}: {name}") for name, hint in hints.items()}


DESCRIPTIONS = {
    str: "text in quotes",
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    dict: "a table",
}


def convert(hint: Any, value: Any, where: str, words: Sequence[str] = ()) -> Any:
    """Convert a value to its type annotation, or raise UserError; also accept `words` such as auto.

    Lists become tuples, integers floats and paths text.
    """
    if type(value) is str and value in words:
        return value
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin is Annotated:
        return convert(parts[0], value, where)
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        kinds = [part for part in parts if part is not NoneType]
        chosen = next((kind for kind in kinds if type(value) is kind), kinds[0])
        others = [
            word for kind in kinds[1:] if get_origin(kind) is Literal for word in get_args(kind)
        ]
        return convert(chosen, value, where, others)
    expected = DESCRIPTIONS.get(hint, "")
    kind = type(value)
    hint_at_typo = ""
    if origin is tuple:
        items = (value,) if kind is str else value
        item_hints = (
            parts[:1] * len(items)
            if isinstance(items, list | tuple) and parts[-1] is ...
            else parts
        )
        if isinstance(items, list | tuple) and len(items) == len(item_hints):
            return tuple(
                convert(part, item, where) for part, item in zip(item_hints, items, strict=True)
            )
        expected = "a list" if parts[-1] is ... else f"{len(parts)} numbers"
    elif origin is Literal:
        if any(kind is type(part) and value == part for part in parts):  # True == 1
            return value
        expected = f"one of {', '.join(map(str, parts))}"
        if kind is str:
            hint_at_typo = did_you_mean(value, [part for part in parts if isinstance(part, str)])
    elif hint is float and kind in (int, float) and abs(value) <= MAX_FLOAT:  # NaN is not
        return float(value)
    elif hint is str and isinstance(value, Path):
        return str(value)
    elif hint is int and kind is int and abs(value) >= 2**63:
        expected = "a smaller integer"
    elif not expected or (kind is hint and hint is not float):
        return value
    text = ascii(value)
    if len(text) > MAX_VALUE_SHOWN:
        text = text[:MAX_VALUE_SHOWN] + "..."
    expected = " or ".join((expected, *words))
    raise UserError(f"{where} must be {expected}, not {text}{hint_at_typo}")


MAX_VALUE_SHOWN = 40  # characters of a value in an error


MAX_FLOAT = sys.float_info.max
LARGEST_NUMBER = 1e100
SMALLEST_NUMBER = 1e-100
DEEPEST = 16  # levels of nesting


def is_well_formed(value: Any, depth: int = DEEPEST) -> bool:
    """Whether a value has no number beyond 1e100, no lone surrogate and no deep nesting."""
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int | float):  # False for NaN, too
        return value == 0 or SMALLEST_NUMBER <= abs(value) <= LARGEST_NUMBER
    if isinstance(value, str):
        return value.isascii() or value == value.encode("utf-8", "replace").decode("utf-8")
    if depth == 0 or not isinstance(value, dict | list):
        return False
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return all(is_well_formed(part, depth - 1) for part in parts)


def matches_schema(value: Any, schema: Any) -> bool:
    """Whether a JSON value matches a schema.

    A schema is a type, a predicate, [schema of each item], (schema, schema) or {key: schema}. float
    accepts any number, int a non-negative integer. {str: schema} accepts any keys; other dicts may
    have more keys than the schema.
    """
    if isinstance(schema, list):
        return isinstance(value, list) and all(matches_schema(item, schema[0]) for item in value)
    if isinstance(schema, tuple):
        return (
            isinstance(value, list)
            and len(value) == len(schema)
            and all(map(matches_schema, value, schema))
        )
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return False
        if str in schema:
            return all(matches_schema(item, schema[str]) for item in value.values())
        return all(
            key in value and matches_schema(value[key], part) for key, part in schema.items()
        )
    if not isinstance(schema, type):
        return bool(schema(value))
    if isinstance(value, bool):
        return schema is bool
    if schema is int:
        return isinstance(value, int) and 0 <= value < 2**53
    return isinstance(value, int | float) if schema is float else isinstance(value, schema)
