"""Weights into a model: strictly, with the positions fitted to another image size and the tokens to another table."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.model.clip import Clip
from m1clip.model.positions import resize_positions
from m1clip.model.shape import ClipShape

POSITIONS = "image.positions"
TOKENS = "text.tokens.weight"
MAX_HEADER_BYTES = 2**24  # that of a model with 100,000 tensors
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; a full disk is an OSError, as everywhere, and not the library's own kind of error."""
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:
        number = SYSTEM_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def read_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """All tensors of a safetensors file; what is no such file, whoever wrote it, is one clear line."""
    try:
        # Looked at before it is opened: a pipe in its place would be waited for without end.
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise OSError("not a plain file")
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > min(MAX_HEADER_BYTES, facts.st_size):
            raise OSError(f"its header claims {header:,} bytes")
        return load_file(path, device=device)
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None


def empty_clip(shape: ClipShape, eot_id: int, device: torch.device) -> Clip:
    """A Clip whose weights are about to be loaded: memory is taken, no random start is drawn."""
    with torch.device("meta"):
        model = Clip(shape, eot_id)
    model.to_empty(device=device)
    model.image.reset_positions(shape)
    return model


def check_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """A tensor that is missing, unknown, misshapen or not finite is an error; the model may be on the meta device."""
    own = model.state_dict()
    for odd in sorted(set(own) ^ set(weights)):
        raise UserError(f"{where}: {'missing' if odd in own else 'unknown'} tensor '{odd}'")
    for name, tensor in weights.items():
        if own[name].shape != tensor.shape:
            raise UserError(
                f"{where}: '{name}' is {tuple(tensor.shape)}, the model wants {tuple(own[name].shape)}"
            )
        if not _is_finite(tensor):
            raise UserError(
                f"{where}: '{name}' holds NaN or infinity; the training diverged or the file is damaged: use another "
                f"model or an earlier checkpoint"
            )


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # NaN passes through aminmax, which needs no second tensor of this size; it is missing for float8.
    lowest, highest = (tensor if tensor.element_size() > 1 else tensor.float()).aminmax()
    return bool(lowest.isfinite() & highest.isfinite())


def assign_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Check tensors and copy them into the model."""
    check_weights(model, weights, where)
    model.load_state_dict(weights)


def fit_positions(weights: dict[str, Tensor], trained: ClipShape, shape: ClipShape) -> None:
    """Interpolate learned positions to the grid of `shape`; sincos ones are not among the weights."""
    positions = weights.get(POSITIONS)
    if shape.grid == trained.grid or shape.positions != "learned" or positions is None:
        return
    # Misshapen: `assign_weights` says so in words.
    if positions.shape == (trained.image_tokens, trained.vision_width):
        weights[POSITIONS] = resize_positions(positions.float(), shape.grid).to(positions.dtype)


def other_tokens(weights: dict[str, Tensor], sources: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The weights with another token table: row i is the mean of the old rows `sources[i]`."""
    table = weights[TOKENS]
    flat = torch.tensor([old for group in sources for old in group], device=table.device)
    starts = torch.tensor([0, *(len(group) for group in sources[:-1])], device=table.device).cumsum(0)
    rows = torch.nn.functional.embedding_bag(flat, table.float(), starts, mode="mean")
    return {**weights, TOKENS: rows.to(table.dtype)}
