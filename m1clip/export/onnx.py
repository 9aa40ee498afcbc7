"""ONNX graphs of both towers, with normalization inside, and the files that other programs need to use them."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from m1clip import __version__
from m1clip.data.augment import render
from m1clip.data.images import Preprocess
from m1clip.errors import UserError
from m1clip.inference.onnx import FORMAT, IMAGE_GRAPH, SETTINGS, TEXT_GRAPH
from m1clip.io import write_json, write_text
from m1clip.model.clip import CLIP
from m1clip.model.folder import SavedModel
from m1clip.text.base import FILE_NAME
from m1clip.text.bpe import BpeTokenizer

EXAMPLE, TOKEN_PARTS = "example.py", "token_parts.json"
EXTRA = ("onnx", "onnxscript", "onnxruntime")


class ImageGraph(nn.Module):
    """(n, size, size, 3) uint8 -> (n, embed_dim) unit vectors."""

    def __init__(self, clip: CLIP, preprocess: Preprocess) -> None:
        super().__init__()
        self.clip, self.preprocess = clip, preprocess

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalize and encode."""
        return self.clip.encode_image(render(pixels, None, self.preprocess))


class TextGraph(nn.Module):
    """(n, length) token ids -> (n, embed_dim) unit vectors."""

    def __init__(self, clip: CLIP) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, tokens: Tensor) -> Tensor:
        """Encode."""
        return self.clip.encode_text(tokens)


def check_installed() -> None:
    """Raise UserError if a package for the export is missing."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise UserError(f"--to onnx needs {', '.join(missing)}: pip install 'm1clip[export]'")


def write_onnx(folder: Path, saved: SavedModel, say: Callable[[str], None]) -> list[str]:
    """image.onnx, text.onnx, tokenizer.json, preprocess.json and example.py; returns notes for the user."""
    check_installed()
    clip, context = saved.build(), saved.config.context_length
    batch = torch.export.Dim("batch", min=1, max=2**16)
    length = torch.export.Dim("length", min=2, max=context)
    side = saved.preprocess.image_size
    say("writing    image.onnx")
    pixels = torch.zeros(2, side, side, 3, dtype=torch.uint8)
    _write_graph(ImageGraph(clip, saved.preprocess), pixels, "pixels", {0: batch}, folder / IMAGE_GRAPH)
    say("writing    text.onnx")
    tokens = torch.from_numpy(saved.tokenizer.tokenize(["a", "b"], context)).long()
    _write_graph(TextGraph(clip), tokens, "tokens", {0: batch, 1: length}, folder / TEXT_GRAPH)
    library = saved.tokenizer.library()
    cut = saved.tokenizer.parts if isinstance(saved.tokenizer, BpeTokenizer) else None
    if cut is None:
        library.enable_truncation(context)
    else:
        parts = [*cut, [saved.tokenizer.sot_id], [saved.tokenizer.eot_id]]
        write_text(folder / TOKEN_PARTS, json.dumps(parts, separators=(",", ":")))
    write_text(folder / FILE_NAME, library.to_str())
    record = saved.tokenizer.record()
    settings = {
        "format": FORMAT,
        "m1clip": __version__,
        "image": saved.preprocess.to_dict(),
        "context_length": context,
        "embed_dim": saved.config.embed_dim,
        "logit_scale": float(clip.scale().detach()),
        "logit_bias": None if clip.logit_bias is None else float(clip.logit_bias.detach()),
        "pad_id": saved.tokenizer.pad_id,
        "token_parts": cut is not None,
        # tokenizer.json itself is the library's; this makes m1clip's own tokenizer, with CLIP's text cleaning.
        "tokenizer": {name: value for name, value in record.items() if name != "tokenizer"},
    }
    write_json(folder / SETTINGS, settings)
    write_text(folder / EXAMPLE, (files("m1clip.export") / "example.txt").read_text("utf-8"))
    return []


def _write_graph(module: nn.Module, example: Tensor, name: str, dynamic: dict[int, object], path: Path) -> None:
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # a line for each library that is not installed
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module.eval(),
                (example,),
                dynamo=True,
                dynamic_shapes=(dynamic,),
                input_names=[name],
                output_names=["vectors"],
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0][:200]
        raise UserError(f"torch cannot export this tower to ONNX ({type(module).__name__}: {reason})") from error
    finally:
        log.setLevel(level)
    assert program is not None
    program.save(path)  # one file below 2 GB, else with its weights in a file next to it
