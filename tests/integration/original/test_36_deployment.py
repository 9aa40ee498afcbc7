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
    wide = {"vision_width": 192, "text_width": 192}  # the weights are most of the files
    tiny_model("char", ["two red balls"], vision_layers=1, text_layers=1, **wide).save(model)
    with console.quiet():
        int8 = export(model, "onnx", tmp_path / "int8", precision="int8", force=True)
    assert folder_bytes(int8) < 0.6 * folder_bytes(model)
    expected = m1clip.load(model, precision="fp32").encode_image(NOISE).numpy()
    cosine = (expected * m1clip.load(int8).encode_image(NOISE)).sum(axis=1)
    assert 0.9 < cosine.min() < 1.0
