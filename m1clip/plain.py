"""Plain values out of somebody's JSON, checked against the dataclass that they are to become."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from m1clip.errors import UserError

# Larger than any published model: what lies beyond is a mistake, or a file made to fill the memory.
LIMITS: dict[str, float] = {
    "image_size": 4096, "patch_size": 1024, "vision_width": 2**14, "vision_layers": 256, "vision_heads": 1024,
    "text_width": 2**14, "text_layers": 256, "text_heads": 1024, "context_length": 4096, "vocab_size": 2**21,
    "embed_dim": 2**14, "hidden": 2**14, "mlp_ratio": 64, "lora_rank": 2**12,
}  # fmt: skip


def check_limits(values: object, prefix: str) -> None:
    """Refuse a size above LIMITS, before anything is built from it."""
    for name, most in LIMITS.items():
        value = getattr(values, name, None)
        if value is not None and value > most:
            raise UserError(f"{prefix}{name} must be at most {most:,}, not {value:,}")


def checked(cls: type, values: dict[str, Any], what: str) -> dict[str, Any]:
    """The arguments of a dataclass; a missing or unknown key or a wrong type is a UserError that names it."""
    hints = get_type_hints(cls)
    odd = sorted(set(values) ^ set(hints))
    if odd:
        raise UserError(f"{what} has missing or unknown keys: {', '.join(map(ascii, odd))}")
    return {name: _value(hint, values[name], f"{what}: {name}") for name, hint in hints.items()}


def _value(hint: Any, value: Any, where: str) -> Any:
    if get_origin(hint) is Literal:
        # By type too: True == 1, and a list cannot be looked up among strings by hash.
        if any(type(value) is type(choice) and value == choice for choice in get_args(hint)):
            return value
        raise UserError(f"{where} must be one of {', '.join(get_args(hint))}, not {_shown(value)}")
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            raise UserError(f"{where} must be {len(parts)} numbers, not {_shown(value)}")
        return tuple(_value(part, item, where) for part, item in zip(parts, value, strict=True))
    if hint is str and not isinstance(value, str):
        raise UserError(f"{where} must be text, not {_shown(value)}")
    if hint is bool and not isinstance(value, bool):
        raise UserError(f"{where} must be true or false, not {_shown(value)}")
    if hint is int and (not isinstance(value, int) or isinstance(value, bool)):
        raise UserError(f"{where} must be a whole number, not {_shown(value)}")
    if hint is float and not _is_number(value):
        raise UserError(f"{where} must be a number, not {_shown(value)}")
    return value


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of a float
        return False


def _shown(value: Any) -> str:
    """On one line and short, whatever the file holds."""
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


LARGEST, SMALLEST, DEEPEST = 1e100, 1e-100, 16


def sane(value: Any, depth: int = DEEPEST) -> bool:
    """Whether arithmetic and UTF-8 can take every part: no number beyond 1e100, lone surrogate or deep nesting."""
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int | float):  # False for NaN, too
        return value == 0 or SMALLEST <= abs(value) <= LARGEST
    if isinstance(value, str):
        return value.isascii() or value == value.encode("utf-8", "replace").decode("utf-8")
    if depth == 0 or not isinstance(value, dict | list):
        return False
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return all(sane(part, depth - 1) for part in parts)


def fits(value: Any, shape: Any) -> bool:
    """Whether a JSON value has a shape: a type, a predicate, [shape of each item], (shape, shape), or {key: shape}.

    float takes any number, int a whole one from 0 on. {str: shape} takes any keys, other dicts more than the shape has.
    """
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(item, shape[0]) for item in value)
    if isinstance(shape, tuple):
        return (
            isinstance(value, list)
            and len(value) == len(shape)
            and all(fits(item, part) for item, part in zip(value, shape, strict=True))
        )
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if str in shape:
            return all(fits(item, shape[str]) for item in value.values())
        return all(key in value and fits(value[key], part) for key, part in shape.items())
    if not isinstance(shape, type):
        return bool(shape(value))
    if isinstance(value, bool):
        return shape is bool
    if shape is int:
        return isinstance(value, int) and 0 <= value < 2**53
    return isinstance(value, int | float) if shape is float else isinstance(value, shape)
