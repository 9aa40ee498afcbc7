"""Core ML packages of both towers: images in, with the preprocessing inside, float16."""

import json
import logging
import warnings
from contextlib import redirect_stderr
from importlib.resources import files
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from m1clip import console
from m1clip.data.images import Preprocess
from m1clip.errors import UserError
from m1clip.export.onnx import TextGraph
from m1clip.inference.onnx_encoder import ArrayEncoder, ArrayPreprocess
from m1clip.io import write_json, write_text
from m1clip.model.clip import CLIP
from m1clip.model.folder import SavedModel

IMAGE_PACKAGE, TEXT_PACKAGE, EXPECTED = "image.mlpackage", "text.mlpackage", "expected.json"
VERIFY = "verify_on_mac.py"
PARITY_TEXTS = ("a dog runs on the grass", "two children play in the snow", "a red car")
LARGEST_DIFFERENCE = 1e-4  # of the exported program and the model, both in float32


class PixelGraph(nn.Module):
    """(1, 3, size, size) pixels from 0 to 255, as Core ML gives an image -> (1, embed_dim) unit
    vectors.
    """

    def __init__(self, clip: CLIP, preprocess: Preprocess) -> None:
        super().__init__()
        mean, std = (
            torch.tensor(values).view(1, 3, 1, 1) for values in (preprocess.mean, preprocess.std)
        )
        self.clip, self.scale, self.shift = clip, 1 / (255 * std), -mean / std

    def forward(self, image: Tensor) -> Tensor:
        return self.clip.encode_image(image * self.scale + self.shift)


class ProgramEncoder(ArrayEncoder):
    """Runs what the packages are converted from, in torch, with weights rounded to float16."""

    def __init__(self, saved: SavedModel) -> None:
        clip = saved.build().half().float()
        self.preprocess = ArrayPreprocess.from_dict(saved.preprocess.to_dict())
        self.tokenizer = saved.tokenizer
        self.context_length = saved.config.context_length
        self.embed_dim = saved.config.embed_dim
        self.logit_scale = float(clip.scale().detach())
        side = self.preprocess.image_size
        self._programs = {
            name: _export(graph, example).module()
            for name, graph, example in (
                ("image", PixelGraph(clip, saved.preprocess), torch.zeros(1, 3, side, side)),
                (
                    "text",
                    TextGraph(clip, self.embed_dim),
                    torch.zeros(1, self.context_length, dtype=torch.int32),
                ),
            )
        }

    def describe(self) -> str:
        """What runs the model, for its repr."""
        return "the program for Core ML"

    def pixels(self, pixels: np.ndarray) -> np.ndarray:
        """(n, size, size, 3) uint8 -> (n, embed_dim) float32 unit vectors."""
        return self._run("image", torch.from_numpy(pixels).permute(0, 3, 1, 2).float().contiguous())

    def tokens(
        self, tokens: np.ndarray, lengths: np.ndarray, max_batch: int | None = None
    ) -> np.ndarray:
        """(n, context_length) token ids -> (n, embed_dim) float32 unit vectors."""
        return self._run("text", torch.from_numpy(tokens).int())

    @torch.no_grad()
    def _run(self, name: str, rows: Tensor) -> np.ndarray:
        return torch.cat([self._programs[name](row[None]) for row in rows]).numpy()


def _export(module: nn.Module, example: Tensor) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(module.eval(), (example,)).run_decompositions({})


def write_coreml(folder: Path, saved: SavedModel) -> list[str]:
    """Two packages, what they must compute for an example, and a script that compares it
    on a Mac.
    """
    if find_spec("coremltools") is None:
        raise UserError("--to coreml needs coremltools: pip install 'm1clip[coreml]'")
    clip, side, context = saved.build(), saved.preprocess.image_size, saved.config.context_length
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    tokens = saved.tokenizer.tokenize(PARITY_TEXTS, context)
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None].float().contiguous()
    console.print(f"writing    {IMAGE_PACKAGE}")
    vector = _write_package(PixelGraph(clip, saved.preprocess), image, folder / IMAGE_PACKAGE)
    console.print(f"writing    {TEXT_PACKAGE}")
    texts = [torch.from_numpy(row)[None].int() for row in tokens]
    _write_package(TextGraph(clip, saved.config.embed_dim), texts[0], folder / TEXT_PACKAGE)
    with torch.no_grad():
        text_vectors = [clip.encode_text(row.long())[0].tolist() for row in texts]
    expected = {
        "pixels": pixels.tolist(),
        "image": vector[0].tolist(),
        "tokens": tokens.tolist(),
        "texts": text_vectors,
    }
    write_text(folder / EXPECTED, json.dumps(expected))
    settings = {
        "image": saved.preprocess.to_dict(),
        "context_length": context,
        "logit_scale": float(clip.scale().detach()),
        "logit_bias": None if clip.logit_bias is None else float(clip.logit_bias.detach()),
        "pad_id": saved.tokenizer.pad_id,
    }
    write_json(folder / "preprocess.json", settings)
    write_text(folder / "tokenizer.json", saved.tokenizer.library().to_str())
    write_text(folder / VERIFY, (files("m1clip.export") / "verify_on_mac.txt").read_text("utf-8"))
    return [
        f"Core ML runs only on Apple computers: python {VERIFY} in the folder compares the vectors"
        " there"
    ]


def _write_package(module: nn.Module, example: Tensor, path: Path) -> Tensor:
    """Convert, read back, check; returns the vector of the example in torch."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)  # no advice on the version of torch
    import coremltools

    image = example.is_floating_point()
    with warnings.catch_warnings(), torch.no_grad(), redirect_stderr(StringIO()):  # progress bars
        warnings.simplefilter("ignore")
        program = _export(module, example)
        expected, actual = module(example), program.module()(example)
        difference = (actual - expected).abs().max()
        if not difference < LARGEST_DIFFERENCE:
            raise UserError(
                f"not exported: the program for {path.name} differs from the model by"
                f" {difference:.2g}"
            )
        if image:
            input_type = coremltools.ImageType(
                "image", tuple(example.shape), color_layout=coremltools.colorlayout.RGB
            )
        else:
            input_type = coremltools.TensorType("tokens", tuple(example.shape), np.int32)
        try:
            package = coremltools.convert(
                program,
                inputs=[input_type],
                outputs=[coremltools.TensorType(name="vector")],
                minimum_deployment_target=coremltools.target.iOS17,
                compute_precision=coremltools.precision.FLOAT16,
            )
        except Exception as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise UserError(
                f"coremltools cannot convert this tower ({type(module).__name__}: {reason})"
            ) from error
    package.save(str(path))
    check_package(path, tuple(example.shape), expected.shape[1])
    return expected


def check_package(path: Path, shape: tuple[int, ...], width: int) -> None:
    """Read a package back: input, output and precision as promised."""
    import coremltools

    spec: Any = coremltools.models.MLModel(str(path), skip_model_load=True).get_spec()
    (input_feature,), (made,) = spec.description.input, spec.description.output
    if len(shape) == 4:
        size = (input_feature.type.imageType.height, input_feature.type.imageType.width)
        fits = (
            size == shape[2:]
            and input_feature.type.imageType.colorSpace == input_feature.type.imageType.RGB
        )
    else:
        fits = tuple(input_feature.type.multiArrayType.shape) == shape
    half = made.type.multiArrayType.dataType == made.type.multiArrayType.FLOAT16
    if not (fits and half and tuple(made.type.multiArrayType.shape) == (1, width)):
        raise UserError(
            f"{path}: coremltools wrote another input or output than asked for; use another version"
            " of it"
        )
