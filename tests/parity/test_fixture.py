"""A tiny model gives the outputs of open_clip and transformers that compare.py --record stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import m1clip
from m1clip.data.augment import render
from m1clip.data.images import to_square
from m1clip.export.layouts import convert
from m1clip.inference.model import Model
from m1clip.model.folder import read_model

from . import inputs

FIXTURE: dict[str, Any] = json.loads(
    Path(__file__).with_name("fixture.json").read_text(encoding="utf-8")
)
KINDS = sorted(FIXTURE)
WEIGHTS = {"openclip": "open_clip_model.safetensors", "hf": "model.safetensors"}
TOLERANCE = 1e-5


def tensors(kind: str) -> dict[str, torch.Tensor]:
    """The weights under the names of the library."""
    shapes = FIXTURE[kind]["tensors"]
    return {
        name: torch.from_numpy(np.asarray(inputs.tensor(name, shape)))
        for name, shape in shapes.items()
    }


def write(kind: str, folder: Path) -> Path:
    """The model as the library writes it."""
    folder.mkdir()
    save_file(tensors(kind), folder / WEIGHTS[kind])
    config = FIXTURE[kind]["config"]
    if kind == "openclip":
        (folder / "open_clip_config.json").write_text(
            json.dumps({"model_cfg": config, "preprocess_cfg": {}})
        )
    else:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_same(bundle: Model, kind: str) -> None:
    """Features, ids, pixels and scale as recorded."""
    recorded = FIXTURE[kind]
    squares = np.stack(
        [
            to_square(image, bundle.preprocess.image_size, bundle.preprocess.resize)
            for image in inputs.images()
        ]
    )
    pixels = render(torch.from_numpy(squares), None, bundle.preprocess)[:, :, ::7, ::5]
    assert np.abs(pixels.numpy() - np.array(recorded["pixels_7_5"])).max() < TOLERANCE
    for ids, theirs in zip(
        bundle.tokenizer.tokenize(inputs.TEXTS, 24).tolist(), recorded["ids"], strict=True
    ):
        end = ids.index(49407) + 1
        assert ids[:end] == theirs[:end]
    assert (
        np.abs(bundle.encode_image(inputs.images()).numpy() - np.array(recorded["image"])).max()
        < TOLERANCE
    )
    assert (
        np.abs(bundle.encode_text(inputs.TEXTS).numpy() - np.array(recorded["text"])).max()
        < TOLERANCE
    )
    assert abs(float(bundle.clip.logit_scale.detach().exp()) - recorded["scale"]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_open_clip_and_hf_folders_give_reference_features(kind: str, tmp_path: Path) -> None:
    check_same(m1clip.load(write(kind, tmp_path / "theirs")), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_conversion_round_trip_is_bit_identical(kind: str, other: str, tmp_path: Path) -> None:
    """Theirs -> ours -> the other library's -> ours -> theirs."""
    convert(read_model(write(kind, tmp_path / "theirs")), "safetensors", tmp_path / "ours")
    convert(read_model(tmp_path / "ours"), other, tmp_path / "other")  # type: ignore[arg-type]
    assert sorted(load_file(tmp_path / "other" / WEIGHTS[other])) == sorted(
        FIXTURE[other]["tensors"]
    )
    convert(read_model(tmp_path / "other"), kind, tmp_path / "back")  # type: ignore[arg-type]
    back, wanted = load_file(tmp_path / "back" / WEIGHTS[kind]), tensors(kind)
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[name], wanted[name]) for name in wanted)
