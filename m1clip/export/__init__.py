"""Trained models in the formats of other programs."""

from typing import Literal

Target = Literal[
    "onnx", "transformers.js", "immich", "coreml", "sentence-transformers", "hf", "openclip", "safetensors"
]
Precision = Literal["fp32", "fp16", "int8"]
