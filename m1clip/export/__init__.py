"""Trained models in the formats of other programs."""

from typing import Literal

Target = Literal["onnx", "hf", "openclip", "safetensors"]
