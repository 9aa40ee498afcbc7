"""36: int8 models are smaller and keep their vectors.

Distillation and Core ML are options of commands.
"""

from pathlib import Path

import numpy as np
import pytest
from tiny_model import tiny_model

import m1clip
from m1clip import console
from m1clip.export.layouts import export
from m1clip.export.parity import folder_bytes

NOISE = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)


def test_int8_model_is_smaller_and_close(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="needs the extra `export`")
    model = tmp_path / "model"
    tiny_model("char", ["two red balls"]).save(model)
    with console.quiet():
        full = export(model, "onnx", tmp_path / "fp32")
        int8 = export(model, "onnx", tmp_path / "int8", precision="int8", force=True)
    assert folder_bytes(int8) < folder_bytes(full)
    expected, actual = (m1clip.load(path).encode_image(NOISE) for path in (full, int8))
    cosine = (expected * actual).sum(axis=1)
    assert 0.9 < cosine.min() < 1.0
