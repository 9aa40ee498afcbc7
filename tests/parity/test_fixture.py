"""A tiny model gives the outputs of open_clip and transformers that compare.py --record stored."""

from __future__ import annotations

import base64
import gzip
import itertools
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
CLIP_KINDS, SIGLIP_KINDS = ("hf", "openclip"), ("hf-siglip", "openclip-siglip")
KINDS = sorted(FIXTURE)
WEIGHTS = {"openclip": "open_clip_model.safetensors", "hf": "model.safetensors"}
WEIGHTS |= {f"{kind}-siglip": name for kind, name in WEIGHTS.items()}
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
    for name, data in FIXTURE[kind].get("files", {}).items():
        (folder / name).write_bytes(gzip.decompress(base64.b64decode(data)))
    if kind == "hf-siglip":
        (folder / "config.json").write_text(json.dumps(config))
        processor = json.dumps(FIXTURE[kind]["preprocess"])
        (folder / "preprocessor_config.json").write_text(processor)
    elif kind == "openclip-siglip":
        (folder / "open_clip_config.json").write_text(json.dumps(config))
    elif kind == "openclip":
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
    context, eot = bundle.context_length, bundle.tokenizer.eot_id
    for ids, theirs in zip(
        bundle.tokenizer.tokenize(inputs.TEXTS, context).tolist(), recorded["ids"], strict=True
    ):
        end = ids.index(eot) + 1
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
    bias = bundle.clip.logit_bias
    assert (None if bias is None else bias.item()) == recorded.get("bias")


@pytest.mark.parametrize("kind", KINDS)
def test_open_clip_and_hf_folders_give_reference_features(kind: str, tmp_path: Path) -> None:
    check_same(m1clip.load(write(kind, tmp_path / "theirs"), precision="fp32"), kind)


ROUND_TRIPS = [
    (kind, other)
    for kinds in (CLIP_KINDS, SIGLIP_KINDS)
    for kind, other in itertools.product(kinds, repeat=2)
]


@pytest.mark.parametrize(("kind", "other"), ROUND_TRIPS)
def test_conversion_round_trip_is_bit_identical(kind: str, other: str, tmp_path: Path) -> None:
    """Theirs -> ours -> the other library's -> ours -> theirs."""
    convert(read_model(write(kind, tmp_path / "theirs")), "safetensors", tmp_path / "ours")
    to_other, to_kind = (name.removesuffix("-siglip") for name in (other, kind))
    convert(read_model(tmp_path / "ours"), to_other, tmp_path / "other")  # type: ignore[arg-type]
    assert sorted(load_file(tmp_path / "other" / WEIGHTS[other])) == sorted(
        FIXTURE[other]["tensors"]
    )
    convert(read_model(tmp_path / "other"), to_kind, tmp_path / "back")  # type: ignore[arg-type]
    back, expected = load_file(tmp_path / "back" / WEIGHTS[kind]), tensors(kind)
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)
    if "-siglip" in kind:
        check_same(m1clip.load(tmp_path / "back", precision="fp32"), kind)
