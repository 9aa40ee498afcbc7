"""Tensors out of a file of others: safetensors, one or in shards, and torch's format read as data alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m1clip.errors import UserError
from m1clip.files import read_small
from m1clip.model.weights import read_tensors as read_safetensors

INDEX = "model.safetensors.index.json"
SAFETENSORS = (".safetensors",)
TORCH = (".pt", ".pth", ".bin", ".ckpt")
STATE = ("state_dict", "model", "model_state_dict")  # where a training checkpoint keeps the weights


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of the shards that an index names."""
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    if path.suffix in SAFETENSORS:
        return read_safetensors(path)
    if path.suffix in TORCH:
        return _read_torch(path)
    raise UserError(f"{path}: weights are read from {', '.join(SAFETENSORS + TORCH)}, not '{path.suffix}'")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; anything else is an error that names the file."""
    try:
        value = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable JSON file ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


def _read_shards(path: Path) -> dict[str, Tensor]:
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise UserError(f"{path}: has no weight_map from tensors to files")
    weights: dict[str, Tensor] = {}
    for name in sorted(set(table.values())):
        # A file beside the index, whatever the index says: it may come from anyone.
        own = Path(name).name
        if own in ("", "..") or not own.isprintable():
            raise UserError(f"{path}: {name!a} is no name of a file")
        shard = path.with_name(own)
        if not shard.is_file():
            raise UserError(f"{shard}: missing; {path.name} names it")
        weights |= read_safetensors(shard)
    for name in sorted(set(table) ^ set(weights)):
        raise UserError(
            f"{path}: '{name}' is {'not in its file' if name in table else 'in a file but not named'}"
        )
    return weights


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        if not path.is_file():
            raise OSError("not a plain file")
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    # Bytes of a stranger make torch's reader raise nearly anything: KeyError, IndexError, AssertionError, ...
    except Exception as error:  # noqa: BLE001
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{path}: cannot be read as plain tensors ({reason}); only those are read, since anything else in such "
            f"a file could run code: convert it to safetensors where it was made"
        ) from None
    for key in STATE:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{path}: holds no table of tensors")
    # OpenAI's own files hold a few numbers beside the tensors.
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
