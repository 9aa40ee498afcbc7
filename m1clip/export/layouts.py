"""`m1clip export`: a trained model in the form that another program reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from m1clip.errors import UserError
from m1clip.inference.encoder import assemble, read_parts
from m1clip.model.convert import POSITIONS, other_tokens
from m1clip.model.folder import Parts, write_foreign
from m1clip.model.presets import Activation
from m1clip.model.pretrained import TowerShape
from m1clip.model.towers import sincos_2d
from m1clip.text.bpe import BpeTokenizer, row_sources

Target = Literal["openclip", "hf", "safetensors"]


def export(
    model: Path, to: Target, folder: Path, image_size: int | None = None, activation: Activation | None = None
) -> list[str]:
    """Write the model into a new folder; gives notes on what is not as it was, for a person."""
    if folder.exists():
        raise UserError(f"{folder}: exists already; choose another --out, or delete it first")
    parts = read_parts(model, activation)
    if to == "safetensors":
        assemble(parts, image_size=image_size).save(folder)
        return []
    if image_size is not None:
        bundle = assemble(parts, image_size=image_size)
        weights = {name: tensor.detach() for name, tensor in bundle.model.state_dict().items()}
        parts = Parts(bundle.model.shape, weights, bundle.tokenizer, bundle.preprocess, parts.where)
    if isinstance(parts.shape, TowerShape):
        towers = f"{parts.shape.image_tower} and {parts.shape.text_tower}"
        raise UserError(f"a model on {towers} has no form in {to}; --to safetensors keeps it whole")
    parts, notes = with_full_vocabulary(with_learned_positions(parts))
    write_foreign(to, folder, parts)
    wanted = "shortest" if to == "openclip" else "shortest-floor"
    if parts.preprocess.resize not in (wanted, "squash"):
        notes.append("where an image's margin is odd, open_clip and transformers crop one pixel apart from each other")
    return notes


def with_learned_positions(parts: Parts) -> Parts:
    """Fixed positions written out as if they had been learned: the same model, in the words of others."""
    shape = parts.shape
    if isinstance(shape, TowerShape) or shape.positions == "learned":
        return parts
    table = sincos_2d(shape.grid, shape.vision_width)
    positions = table.new_zeros(shape.image_tokens, shape.vision_width)
    positions[-len(table) :] = table
    return parts._replace(shape=replace(shape, positions="learned"), weights={**parts.weights, POSITIONS: positions})


def with_full_vocabulary(parts: Parts) -> tuple[Parts, list[str]]:
    """CLIP's 49,408 pieces in the place of those that the training captions used."""
    old = parts.tokenizer
    if not isinstance(old, BpeTokenizer):
        raise UserError("a character tokenizer has no place in the formats of others; --to safetensors keeps it")
    if old.kept is None:
        return parts, []
    full = BpeTokenizer()
    weights = other_tokens(parts.weights, row_sources(old, full))
    shape = replace(parts.shape, vocab_size=full.vocab_size)
    note = (
        f"the vocabulary grew from {old.vocab_size:,} to CLIP's {full.vocab_size:,} pieces: text of known pieces "
        f"gives the same vectors; a piece that the training captions never used starts as the mean of its parts"
    )
    return parts._replace(shape=shape, weights=weights, tokenizer=full), [note]
