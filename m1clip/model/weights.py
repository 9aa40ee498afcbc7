"""Tensor files: safe reading, writing, validation against a model, and resizing."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.io import open_regular, read_small
from m1clip.model.presets import CLIPConfig
from m1clip.model.towers import resize_positions

Tensors = dict[str, Tensor]
POSITIONS = "image_tower.positions"
TOKENS = "text_tower.tokens.weight"
MAX_HEADER_BYTES = 2**24  # that of a model with 100,000 tensors
TYPE_NAMES = {  # of safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Where a training checkpoint keeps the weights.
STATE_KEYS = ("state_dict", "model", "model_state_dict")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> str:
    """Write a safetensors file; returns its sha256.

    Tensor by tensor, hashed meanwhile: the library's function needs all of them in main memory, and
    the file would be read again for its hash.
    """
    # Types of more bytes come first, so that all tensors are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    digest = hashlib.sha256()
    path.unlink(missing_ok=True)  # tensors may be mapped from it: a mapped file is never truncated
    with path.open("wb") as file, ThreadPoolExecutor(1, "sha256") as hashing:
        header = _tensor_header(ordered, metadata)
        hashed = hashing.submit(digest.update, header)
        file.write(header)
        for _, tensor in ordered:
            data = _host_bytes(tensor)
            hashed.result()  # at most two tensors are in main memory
            hashed = hashing.submit(digest.update, data)
            file.write(data)
        hashed.result()
    return digest.hexdigest()


def _tensor_header(tensors: Sequence[tuple[str, Tensor]], metadata: dict[str, str] | None) -> bytes:
    """The beginning of a safetensors file: its length, then types, shapes and places as JSON."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in main memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read_tensors(path: Path, device: str = "cpu") -> Tensors:
    """All tensors of a safetensors file; anything else is a UserError."""
    try:
        with open_regular(path) as file:  # the library would wait forever for a pipe
            header = int.from_bytes(file.read(8), "little")
        if header > min(MAX_HEADER_BYTES, path.stat().st_size):
            raise OSError(f"its header claims {header:,} bytes")
        return load_file(path, device=device)
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: not a readable safetensors file ({reason})") from None


def read_checkpoint(path: Path) -> Tensors:
    """All tensors of a third-party file: safetensors, or what torch.save writes."""
    return read_tensors(path) if path.suffix == ".safetensors" else _read_torch(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; anything else is an error that names the file."""
    try:
        value = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable JSON file ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


def _read_torch(path: Path) -> Tensors:
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        contents: Any = torch.load(path, map_location="cpu", weights_only=True)
    # Damaged or malicious files make torch raise almost anything: KeyError, IndexError,
    # AssertionError, ...
    except Exception as error:  # noqa: BLE001
        reason = (
            str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        )
        raise UserError(
            f"{path}: cannot be loaded as plain tensors ({reason}), and anything else in such a"
            " file could run code: convert it to safetensors"
        ) from None
    for key in STATE_KEYS:
        if isinstance(contents, dict) and isinstance(contents.get(key), dict):
            contents = contents[key]
            break
    if not isinstance(contents, dict) or not all(isinstance(name, str) for name in contents):
        raise UserError(f"{path}: contains no table of tensors")
    # OpenAI's own files contain a few numbers besides the tensors.
    return {name: value for name, value in contents.items() if isinstance(value, Tensor)}


def check_weights(model: nn.Module, weights: Tensors, where: str) -> None:
    """Raise UserError for missing, unknown or misshapen tensors.

    The model may be on the meta device.
    """
    own = model.state_dict()
    for odd in sorted(set(own) ^ set(weights)):
        raise UserError(f"{where}: {'missing' if odd in own else 'unknown'} tensor '{odd}'")
    for name, tensor in weights.items():
        if own[name].shape != tensor.shape:
            raise UserError(
                f"{where}: '{name}' is {tuple(tensor.shape)}, the model expects"
                f" {tuple(own[name].shape)}"
            )
        if own[name].is_floating_point() and not tensor.is_floating_point():
            raise UserError(
                f"{where}: '{name}' is {tensor.dtype}, the model expects floating-point numbers"
            )


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # NaN passes through aminmax, which needs no second tensor of this size; it is missing for
    # float8.
    lowest, highest = (tensor if tensor.element_size() > 1 else tensor.float()).aminmax()
    # Float64 holds more than the model can.
    return bool(lowest.float().isfinite() & highest.float().isfinite())


def assign_weights(model: nn.Module, weights: Tensors, where: str) -> None:
    """Check tensors and copy them into the model; UserError also for NaN and infinity."""
    check_weights(model, weights, where)
    check_finite(weights, where)
    model.load_state_dict(weights)


def check_finite(weights: Tensors, where: str) -> None:
    for name in (name for name, tensor in weights.items() if not _is_finite(tensor)):
        raise UserError(
            f"{where}: '{name}' contains NaN or infinity; the training diverged or the file is"
            " damaged: use another model or an earlier checkpoint"
        )


def fit_positions(weights: Tensors, trained: CLIPConfig, config: CLIPConfig) -> Tensors:
    """The weights with learned positions interpolated to the image size of `config`.

    Sincos ones are not saved.
    """
    old = trained.image_tower
    new = config.image_tower
    positions = weights.get(POSITIONS)
    if old.kind != "vit" or new.kind != "vit" or old.grid == new.grid or positions is None:
        return weights
    if positions.shape != (old.tokens, old.width):
        return weights  # `check_weights` reports it
    return {**weights, POSITIONS: resize_positions(positions.float(), new.grid).to(positions.dtype)}


def replace_tokens(weights: Tensors, sources: Sequence[Sequence[int]]) -> Tensors:
    """The weights with another token table: row i is the mean of the old rows `sources[i]`."""
    table = weights[TOKENS]
    flat = torch.tensor([old for group in sources for old in group], device=table.device)
    starts = torch.tensor([0, *(len(group) for group in sources[:-1])], device=table.device).cumsum(
        0
    )
    rows = torch.nn.functional.embedding_bag(flat, table.float(), starts, mode="mean")
    return {**weights, TOKENS: rows.to(table.dtype)}


def weights_hash(weights: Tensors) -> str:
    """A hash of tensors and their names, for the key of a cache."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
