"""ONNX graphs of both towers, and the files that other programs need to use them."""

import json
import logging
import warnings
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip import __version__, console
from m1clip.data.augment import render
from m1clip.data.images import Preprocess
from m1clip.errors import UserError
from m1clip.inference.onnx_encoder import ONNX_FORMAT, SETTINGS, read_settings
from m1clip.io import write_json, write_text
from m1clip.model.clip import CLIP
from m1clip.model.folder import SavedModel
from m1clip.text.base import TOKENIZER_FILE
from m1clip.text.bpe import BpeTokenizer

EXAMPLE, TOKEN_PARTS = "example.py", "token_parts.json"
EXTRA = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Layout:
    """Where a program looks for the graphs, and how it names their inputs and outputs."""

    image: str
    text: str
    # (input, output) of the image graph and of the text graph.
    names: tuple[tuple[str, str], tuple[str, str]]
    normalizes: bool = False  # the graph takes uint8 pixels; otherwise the program normalizes them
    int32: bool = False  # token ids


ONNX = Layout(
    "image.onnx", "text.onnx", (("pixels", "vectors"), ("tokens", "vectors")), normalizes=True
)


class ImageGraph(nn.Module):
    """(n, size, size, 3) uint8, or (n, 3, size, size) normalized pixels -> (n, width)
    unit vectors.
    """

    def __init__(self, clip: CLIP, preprocess: Preprocess | None, width: int) -> None:
        super().__init__()
        self.clip, self.preprocess, self.missing = clip, preprocess, width - clip.config.embed_dim

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels if self.preprocess is None else render(pixels, None, self.preprocess)
        vectors = self.clip.encode_image(images)
        return F.pad(vectors, (0, self.missing)) if self.missing else vectors


class TextGraph(nn.Module):
    """(n, length) token ids -> (n, width) unit vectors."""

    def __init__(self, clip: CLIP, width: int) -> None:
        super().__init__()
        self.clip, self.missing = clip, width - clip.config.embed_dim
        self.eot_id = getattr(clip.config.text_tower, "eot_id", None)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        if self.eot_id is not None:
            tokens = with_eot(tokens, self.eot_id)
        vectors = self.clip.encode_text(tokens)
        return F.pad(vectors, (0, self.missing)) if self.missing else vectors


def with_eot(tokens: Tensor, eot_id: int) -> Tensor:
    """End rows without an EOT token with one: transformers.js truncates after it has added the
    token.
    """
    count = (tokens == eot_id).long().sum(dim=1, keepdim=True)  # (n, 1)
    last = torch.where(count > 0, tokens[:, -1:], torch.full_like(count, eot_id))
    return torch.cat([tokens[:, :-1], last], dim=1)


def check_installed() -> None:
    """Raise UserError if a package for the export is missing."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise UserError(f"--to onnx needs {', '.join(missing)}: pip install 'm1clip[export]'")


def write_onnx(folder: Path, saved: SavedModel) -> list[str]:
    """image.onnx, text.onnx, tokenizer.json, preprocess.json and example.py.

    Returns notes for the user.
    """
    write_graphs(folder, saved, ONNX)
    library, cut = saved.tokenizer.library(), token_parts(saved)
    if cut is None:
        library.enable_truncation(saved.config.context_length)
    else:
        write_text(folder / TOKEN_PARTS, json.dumps(cut, separators=(",", ":")))
    write_text(folder / TOKENIZER_FILE, library.to_str())
    write_text(folder / EXAMPLE, (files("m1clip.export") / "example.txt").read_text("utf-8"))
    return []


def token_parts(saved: SavedModel) -> list[list[int]] | None:
    """For each of CLIP's tokens, the ids in the model's smaller vocabulary.

    None if it has CLIP's or another.
    """
    tokenizer = saved.tokenizer
    parts = tokenizer.parts if isinstance(tokenizer, BpeTokenizer) else None
    return parts and [*parts, [tokenizer.sot_id], [tokenizer.eot_id]]


def write_graphs(folder: Path, saved: SavedModel, layout: Layout, width: int | None = None) -> None:
    """Both graphs, and preprocess.json, with which `m1clip.load` opens them.

    `width` is that of the vectors.
    """
    check_installed()
    clip, preprocess, context = saved.build(), saved.preprocess, saved.config.context_length
    width, side = width or saved.config.embed_dim, preprocess.image_size
    batch = torch.export.Dim("batch", min=1, max=2**16)
    length = torch.export.Dim("length", min=2, max=context)
    console.print(f"writing    {layout.image}")
    pixels = torch.zeros(2, 3, side, side)
    if layout.normalizes:
        pixels = torch.zeros(2, side, side, 3, dtype=torch.uint8)
    graph = ImageGraph(clip, preprocess if layout.normalizes else None, width)
    with console.progress(f"writing {layout.image}"):
        _write_graph(graph, pixels, layout.names[0], {0: batch}, folder / layout.image)
    console.print(f"writing    {layout.text}")
    tokens = torch.from_numpy(saved.tokenizer.tokenize(["a", "b"], context))
    tokens = tokens.int() if layout.int32 else tokens.long()
    dims: dict[int, object] = {0: batch, 1: length}
    with console.progress(f"writing {layout.text}"):
        _write_graph(TextGraph(clip, width), tokens, layout.names[1], dims, folder / layout.text)
    record = saved.tokenizer.record()
    settings = {
        "format": ONNX_FORMAT,
        "m1clip": __version__,
        "image_graph": layout.image,
        "text_graph": layout.text,
        "image": preprocess.to_dict(),
        "context_length": context,
        "embed_dim": width,
        "logit_scale": float(clip.scale().detach()),
        "logit_bias": None if clip.logit_bias is None else float(clip.logit_bias.detach()),
        "pad_id": saved.tokenizer.pad_id,
        "token_parts": token_parts(saved) is not None,
        # tokenizer.json itself is the library's; this makes m1clip's own tokenizer, with CLIP's
        # text cleaning.
        "tokenizer": {name: value for name, value in record.items() if name != "tokenizer"},
    }
    write_json(folder / SETTINGS, settings)


def write_combined(folder: Path, ending: str = "") -> Path:
    """One graph of both graphs of a folder and their logits, as transformers' CLIPModel.

    Returns its path.

    Ready-made pipelines of transformers.js look for this file. It has its own copy of the weights.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    settings = read_settings(folder)
    path = (folder / settings["image_graph"]).with_name(f"model{ending}.onnx")
    image, text = (
        onnx.compose.add_prefix(
            onnx.load(str(folder / settings[f"{tower}_graph"])),
            f"{tower}/",
            rename_inputs=False,
            rename_outputs=False,
        )
        for tower in ("image", "text")
    )
    image_vectors, text_vectors = image.graph.output[0], text.graph.output[0]
    scale = numpy_helper.from_array(np.array(settings["logit_scale"], np.float32), "logit_scale")
    nodes = [
        *image.graph.node,
        *text.graph.node,
        helper.make_node("Transpose", [text_vectors.name], ["text_columns"], perm=[1, 0]),
        helper.make_node("MatMul", [image_vectors.name, "text_columns"], ["cosines"]),
        helper.make_node("Mul", ["cosines", "logit_scale"], ["logits_per_image"]),
        helper.make_node("Transpose", ["logits_per_image"], ["logits_per_text"], perm=[1, 0]),
    ]
    logits = {"logits_per_image": ["images", "texts"], "logits_per_text": ["texts", "images"]}
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in logits.items()
    ]
    graph = helper.make_graph(
        nodes,
        "clip",
        [*text.graph.input, *image.graph.input],
        [*outputs, text_vectors, image_vectors],
        [*image.graph.initializer, *text.graph.initializer, scale],
    )
    # Both graphs are of one export, so the versions of their operators are the same.
    versions = {opset.domain: opset for model in (image, text) for opset in model.opset_import}
    model = helper.make_model(
        graph, opset_imports=list(versions.values()), ir_version=image.ir_version
    )
    onnx.save(model, str(path))
    return path


def _write_graph(
    module: nn.Module,
    example: Tensor,
    names: tuple[str, str],
    dynamic: dict[int, object],
    path: Path,
) -> None:
    path.parent.mkdir(exist_ok=True)
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
                input_names=[names[0]],
                output_names=[names[1]],
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0][:200]
        raise UserError(
            f"torch cannot export this tower to ONNX ({type(module).__name__}: {reason})"
        ) from error
    finally:
        log.setLevel(level)
    assert program is not None
    program.save(path)  # one file below 2 GB, else with its weights in a file next to it
