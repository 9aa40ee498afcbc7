"""Weights into a model: strictly, with the positions fitted to another image size and the tokens to another table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.model.clip import Clip
from m1clip.model.positions import resize_positions
from m1clip.model.shape import ClipShape

POSITIONS = "image.positions"
TOKENS = "text.tokens.weight"


def empty_clip(shape: ClipShape, eot_id: int, device: torch.device) -> Clip:
    """A Clip whose weights are about to be loaded: memory is taken, no random start is drawn."""
    with torch.device("meta"):
        model = Clip(shape, eot_id)
    model.to_empty(device=device)
    model.image.reset_positions(shape)
    return model


def assign_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Copy tensors into the model; a missing, unknown or misshapen one is an error that names it."""
    own = model.state_dict()
    for odd in sorted(set(own) ^ set(weights)):
        raise UserError(f"{where}: {'missing' if odd in own else 'unknown'} tensor '{odd}'")
    for name, tensor in weights.items():
        if own[name].shape != tensor.shape:
            raise UserError(
                f"{where}: '{name}' is {tuple(tensor.shape)}, the model wants {tuple(own[name].shape)}"
            )
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
