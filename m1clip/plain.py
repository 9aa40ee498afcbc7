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
