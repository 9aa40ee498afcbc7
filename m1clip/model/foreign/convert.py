"""Tensors of others under our names, and ours under theirs: by the tables in names.py, strictly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from m1clip.errors import UserError
from m1clip.model.foreign.names import Row, Table
from m1clip.model.shape import ClipShape

Tensors = dict[str, Tensor]
WRAPPER = "module."  # what torch's data-parallel wrappers put before every name
TEXT_PREFIX = "text."  # open_clip's newer class keeps the text tower as a module of its own
TEXT_PARTS = (
    "token_embedding.",
    "positional_embedding",
    "transformer.",
    "ln_final.",
    "text_projection",
    "attn_mask",
)


def rows(table: Table, shape: ClipShape) -> Iterator[Row]:
    """Every row that a model of this shape has, with the numbers of its blocks filled in."""
    for row in table.once:
        if not row.needs or getattr(shape, row.needs):
            yield row
    for block, count in ((table.vision_block, shape.vision_layers), (table.text_block, shape.text_layers)):
        for i in range(count):
            for row in block:
                names = tuple(name.format(i=i) for name in row.theirs)
                yield row._replace(ours=row.ours.format(i=i), theirs=names)


def plain_names(weights: Tensors) -> Tensors:
    """Names without what wrappers put before them: `module.`, and open_clip's `text.` of its newer class."""
    if weights and all(name.startswith(WRAPPER) for name in weights):
        weights = {name.removeprefix(WRAPPER): tensor for name, tensor in weights.items()}
    if "token_embedding.weight" in weights:
        return weights
    return {
        name.removeprefix(TEXT_PREFIX)
        if name.startswith(tuple(TEXT_PREFIX + p for p in TEXT_PARTS))
        else name: t
        for name, t in weights.items()
    }


def to_ours(weights: Tensors, table: Table, shape: ClipShape, where: str) -> Tensors:
    """Our names, in float32; a tensor that is missing, or that nothing asks for, is an error that names it."""
    ours: Tensors = {}
    used: set[str] = set()
    for row in rows(table, shape):
        missing = [name for name in row.theirs if name not in weights]
        if missing:
            raise UserError(f"{where}: missing tensor '{missing[0]}'")
        used.update(row.theirs)
        parts = [weights[name].float() for name in row.theirs]
        ours[row.ours] = _transposed(torch.cat(parts) if row.way == "stack" else parts[0], row)
    for name in sorted(set(weights) - used):
        if not name.endswith(table.ignored):
            raise UserError(f"{where}: unknown tensor '{name}'")
    return ours


def to_theirs(weights: Tensors, table: Table, shape: ClipShape) -> Tensors:
    """The inverse of `to_ours`."""
    theirs: Tensors = {}
    for row in rows(table, shape):
        parts = weights[row.ours].chunk(len(row.theirs)) if row.way == "stack" else [weights[row.ours]]
        for name, part in zip(row.theirs, parts, strict=True):
            theirs[name] = _transposed(part, row).contiguous()
    return theirs


def _transposed(tensor: Tensor, row: Row) -> Tensor:
    return tensor.T.contiguous() if row.way == "transpose" else tensor
