"""`m1clip export`: a trained model in the format that another program reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from m1clip.data.cache import DecodePlan
from m1clip.errors import UserError
from m1clip.evaluation.evaluate import quiet_decoding
from m1clip.export import Target
from m1clip.export.onnx import write_onnx
from m1clip.export.parity import compare, open_examples, report_table
from m1clip.hardware.facts import Facts
from m1clip.inference import load
from m1clip.inference.encoder import Model
from m1clip.io import atomic_folder, write_json, write_text
from m1clip.model.convert import HUGGING_FACE, OPENCLIP, check_expressible, hf_config, openclip_config, to_theirs
from m1clip.model.folder import (
    BICUBIC,
    HF_WEIGHTS,
    OPENCLIP_CONFIG,
    OPENCLIP_WEIGHTS,
    SavedModel,
    read_model,
    write_model_files,
)
from m1clip.model.presets import with_fields
from m1clip.model.towers import sincos_2d
from m1clip.model.weights import POSITIONS, replace_tokens, write_tensors
from m1clip.text.bpe import BpeTokenizer, hugging_face_files, row_sources

Say = Callable[[str], None]
REPORT = "export.json"
Writer = Callable[[Path, SavedModel, Say], list[str]]  # writes into the folder and returns notes for the user


def convert(
    saved: SavedModel,
    to: Target,
    folder: Path,
    say: Say = lambda line: None,
    check: Callable[[Path], None] = lambda partial: None,
) -> None:
    """Write a model to a new folder, which appears when it is complete and `check` did not raise."""
    if folder.exists():
        raise UserError(f"{folder}: already exists; choose another --out, or delete it first")
    with atomic_folder(folder) as partial:
        for note in WRITERS[to](partial, saved, say):
            say(f"note       {note}")
        check(partial)


def export(
    path: Path,
    to: Target,
    folder: Path,
    image_size: int | None = None,
    data: tuple[str, ...] = (),
    force: bool = False,
    say: Say = lambda line: None,
    decoding: Callable[[Facts], DecodePlan] = quiet_decoding,
) -> None:
    """Convert a model, compare the result with the original and write the comparison to export.json.

    UserError, and no folder, if the result differs, unless `force`.
    """
    saved = read_model(path).resized(image_size)
    original = Model(saved.build(), saved.tokenizer, saved.preprocess, "fp32")
    examples = open_examples(path, data, original, decoding)

    def check(partial: Path) -> None:
        say("comparing  with the original")
        models, folders = (
            {"torch": original, to: load(partial, precision="fp32")},
            {"torch": Path(saved.where), to: partial},
        )
        record = {"format": 1, "to": to, "model": str(path), **compare(models, folders, examples, exact=True)}
        say(f"\n{report_table(record)}\n")
        if record["failures"] and not force:
            raise UserError(f"not exported: {'; '.join(record['failures'])}. --force writes it anyway")
        write_json(partial / REPORT, record)

    convert(saved, to, folder, say, check)


def _write_own(folder: Path, saved: SavedModel, say: Say) -> list[str]:
    write_model_files(folder, saved.build(), saved.tokenizer, saved.preprocess)
    return []


def _as_clip(saved: SavedModel, to: str, crop: str) -> tuple[SavedModel, list[str]]:
    """The model in terms of open_clip and transformers, and what the user should know about it."""
    check_expressible(saved.config, to)
    saved, notes = with_full_vocabulary(with_learned_positions(saved))
    if saved.preprocess.resize not in (crop, "squash"):
        notes.append(
            "for images with an odd margin, the center crops of open_clip and transformers differ by one pixel"
        )
    return saved, notes


def with_learned_positions(saved: SavedModel) -> SavedModel:
    """Fixed positions written out as learned ones: the same model in a form that other formats support."""
    tower = saved.config.image_tower
    if tower.kind != "vit" or tower.positions == "learned":
        return saved
    table = sincos_2d(tower.grid, tower.width)
    positions = table.new_zeros(tower.tokens, tower.width)
    positions[-len(table) :] = table
    config = with_fields(saved.config, positions="learned")
    return replace(saved, config=config, weights={**saved.weights, POSITIONS: positions})


def with_full_vocabulary(saved: SavedModel) -> tuple[SavedModel, list[str]]:
    """CLIP's 49,408 tokens in place of those that the training captions used."""
    old = saved.tokenizer
    if not isinstance(old, BpeTokenizer):
        raise UserError("open_clip and Hugging Face have no character tokenizer; --to safetensors keeps it")
    if old.kept is None:
        return saved, []
    full = BpeTokenizer()
    config = with_fields(saved.config, vocab_size=full.vocab_size)
    note = (
        f"the vocabulary grew from {old.vocab_size:,} to CLIP's {full.vocab_size:,} tokens: text of known tokens "
        f"gives the same vectors; a token that the training captions never used starts as the mean of its parts"
    )
    weights = replace_tokens(saved.weights, row_sources(old, full))
    return replace(saved, config=config, weights=weights, tokenizer=full), [note]


def _write_openclip(folder: Path, saved: SavedModel, say: Say) -> list[str]:
    """A folder for `open_clip.create_model("local-dir:FOLDER")`."""
    saved, notes = _as_clip(saved, "openclip", "shortest")
    weights = to_theirs(saved.weights, OPENCLIP, saved.config)
    write_tensors(folder / OPENCLIP_WEIGHTS[0], weights, {"format": "pt"})
    seen = saved.preprocess
    preprocess = {
        "size": seen.image_size,
        "mode": "RGB",
        "mean": list(seen.mean),
        "std": list(seen.std),
        "interpolation": "bicubic",
        "resize_mode": seen.resize.removesuffix("-floor"),
        "fill_color": 0,
    }
    write_json(folder / OPENCLIP_CONFIG, {"model_cfg": openclip_config(saved.config), "preprocess_cfg": preprocess})
    return notes


def _write_hf(folder: Path, saved: SavedModel, say: Say) -> list[str]:
    """A folder for transformers' `CLIPModel.from_pretrained`."""
    saved, notes = _as_clip(saved, "hf", "shortest-floor")
    seen, tokenizer = saved.preprocess, saved.tokenizer
    if seen.resize == "squash":
        raise UserError("this model squashes images to a square, which CLIPImageProcessor does not support")
    write_tensors(folder / HF_WEIGHTS[0], to_theirs(saved.weights, HUGGING_FACE, saved.config), {"format": "pt"})
    write_json(folder / "config.json", hf_config(saved.config, tokenizer.sot_id, tokenizer.eot_id))
    size = seen.image_size
    preprocess = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": list(seen.mean),
        "image_std": list(seen.std),
    }
    write_json(folder / "preprocessor_config.json", preprocess)
    for name, text in hugging_face_files(saved.config.context_length).items():
        write_text(folder / name, text)
    return notes


WRITERS: dict[Target, Writer] = {
    "onnx": write_onnx,
    "hf": _write_hf,
    "openclip": _write_openclip,
    "safetensors": _write_own,
}
