"""Models that encode images and texts, in torch or in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from m1clip.errors import UserError

if TYPE_CHECKING:
    from m1clip.hardware.device import Precision
    from m1clip.inference.encoder import Model
    from m1clip.inference.onnx import OnnxModel


def load(
    path: str | Path,
    device: str = "cpu",
    image_size: int | None = None,
    precision: Precision | Literal["auto"] = "auto",
) -> Model | OnnxModel:
    """Load a model folder, the best model of a run, a model of open_clip or Hugging Face, or an exported ONNX folder.

    `image_size` is for images of another size; `precision` is "fp32", "bf16" or "auto", the faster one on the device.
    An ONNX folder runs in onnxruntime, without torch, and gives numpy arrays.
    """
    from m1clip.inference.inputs import model_path
    from m1clip.inference.onnx import OnnxModel, is_onnx_folder

    folder = model_path(path)
    if not is_onnx_folder(folder):
        from m1clip.inference.encoder import load as load_torch

        return load_torch(folder, device, image_size, precision)
    if device != "cpu" or image_size is not None or precision not in ("auto", "fp32"):
        raise UserError(f"{folder}: an ONNX folder runs on the CPU in fp32, with the image size of its export")
    return OnnxModel(folder)
