"""Model: vectors from paths, images, arrays and texts as in training's own evaluation; load, save, classify."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_model import tiny_clip

import m1clip
from m1clip.data.cache import LiveImages
from m1clip.data.captions import tokenize_captions
from m1clip.data.images import BadImage, FileImage, Preprocess
from m1clip.data.prepare import Split
from m1clip.errors import UserError
from m1clip.inference.encoder import Model, encode_split, load
from m1clip.text.tokenizers import make_tokenizer

CAPTIONS = [("a red ball", "the ball is red"), ("two green trees and a small house",), ("night",)]


@pytest.fixture(scope="module")
def model() -> Model:
    """A small model with random weights: what it has learned does not matter here."""
    tokenizer = make_tokenizer("bpe-cut", [caption for group in CAPTIONS for caption in group])
    clip = tiny_clip(context_length=24, vocab_size=tokenizer.vocab_size, positions="sincos")
    return Model(clip, tokenizer, Preprocess(image_size=32))


@pytest.fixture
def folder(model: Model, tmp_path: Path) -> Path:
    model.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """One square PNG, one tall PNG, one JPEG so large that it is decoded smaller."""
    rng = np.random.default_rng(0)
    made = []
    for name, shape in (("a.png", (32, 32)), ("b.png", (61, 40)), ("c.jpg", (300, 420))):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        coarse.resize(shape[::-1], Image.Resampling.BICUBIC).save(tmp_path / name)
        made.append(tmp_path / name)
    return made


def test_a_folder_gives_back_the_model(model: Model, folder: Path, images: list[Path]) -> None:
    again = m1clip.load(folder)
    texts = [caption for group in CAPTIONS for caption in group]
    assert torch.equal(again.encode_text(texts), model.encode_text(texts))
    assert torch.equal(again.encode_image(images), model.encode_image(images))
    assert again.preprocess == model.preprocess
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_paths_images_and_arrays_are_the_same_thing(model: Model, images: list[Path]) -> None:
    png = images[:2]
    by_path = model.encode_image(png)
    assert by_path.shape == (2, 16)
    torch.testing.assert_close(by_path.norm(dim=1), torch.ones(2))
    assert torch.equal(model.encode_image([str(path) for path in png]), by_path)
    assert torch.equal(model.encode_image([Image.open(path) for path in png]), by_path)
    assert torch.equal(model.encode_image([np.asarray(Image.open(path)) for path in png]), by_path)
    assert not torch.allclose(by_path[0], by_path[1], atol=1e-3)


def test_texts_are_unit_vectors_and_batches_do_not_matter(model: Model, images: list[Path]) -> None:
    texts = ["a red ball", "night", "two green trees", ""]
    features = model.encode_text(texts)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(model.encode_text(texts, batch_size=1), features, atol=1e-6, rtol=0)
    torch.testing.assert_close(model.encode_image(images, batch_size=2), model.encode_image(images), atol=1e-6, rtol=0)
    assert model.encode_image([]).shape == model.encode_text([]).shape == (0, 16)


def test_encode_images_sees_what_trainings_evaluation_sees(model: Model, images: list[Path]) -> None:
    """Also for JPEG, which is decoded at a smaller size when it is large."""
    refs = [FileImage(str(path)) for path in images]
    table = tokenize_captions(CAPTIONS, model.tokenizer, 24)
    image, text, owner, *_ = encode_split(
        model.clip, Split(LiveImages(refs, 32), table, []), model.preprocess, 2, contextlib.nullcontext
    )
    torch.testing.assert_close(model.encode_image(images), image, atol=1e-6, rtol=0)
    flat = [caption for group in CAPTIONS for caption in group]
    torch.testing.assert_close(model.encode_text(flat), text, atol=1e-6, rtol=1e-5)
    assert owner.tolist() == [0, 0, 1, 2]


def test_encoding_leaves_the_model_as_it_was(model: Model, images: list[Path]) -> None:
    table = tokenize_captions(CAPTIONS, model.tokenizer, 24)
    refs = LiveImages([FileImage(str(path)) for path in images], 32)
    model.clip.train()
    encode_split(model.clip, Split(refs, table, []), model.preprocess, 2, contextlib.nullcontext)
    assert model.clip.training


def test_a_run_loads_its_best_model(model: Model, folder: Path) -> None:
    run = folder.parent / "run"
    shutil.copytree(folder, run / "model")
    assert load(run).encode_text(["night"]).equal(model.encode_text(["night"]))
    shutil.copytree(folder, run / "best")
    weights = load_file(run / "best" / "model.safetensors")
    save_file(
        {**weights, "text_tower.tokens.weight": -weights["text_tower.tokens.weight"]},
        run / "best" / "model.safetensors",
    )
    assert not load(run).encode_text(["night"]).equal(model.encode_text(["night"]))


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 4, 3)), np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((3, 4, 4), np.uint8)],
)
def test_another_kind_of_array_is_refused(model: Model, array: np.ndarray) -> None:
    with pytest.raises(UserError, match=r"an array must be \(height, width, 3\) uint8, not \("):
        model.encode_image([array])


def test_one_or_many_images_of_every_kind(model: Model, images: list[Path]) -> None:
    path = images[0]
    wanted = model.encode_image([path])
    image = Image.open(path).convert("RGB")
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy())
    one = [str(path), path, image, array, tensor, tensor.permute(2, 0, 1)]
    for value in one:
        assert torch.equal(model.encode_image(value), wanted), type(value)
        assert torch.equal(model.encode_image([value]), wanted), type(value)
    twice = torch.cat([wanted, wanted])
    both = torch.stack([tensor, tensor])
    stacks = [
        np.stack([array, array]),
        both,
        both.permute(0, 3, 1, 2),
        (str(path), image),
        iter([path, array]),
        np.array([str(path), str(path)]),
    ]
    for value in stacks:
        torch.testing.assert_close(model.encode_image(value), twice, atol=1e-6, rtol=0)
    assert torch.equal(model.encode_image(one), model.encode_image([path] * len(one)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        b"a.jpg",
        {"a": 1},
        [None],
        [["a.jpg"]],
        [b"x"],
        [3],
        np.array(3),
        torch.tensor(3),
        object(),
        np.zeros((2, 4, 4, 3)),
        torch.zeros(3, 4, 4),
        torch.zeros(3, 4, 4, dtype=torch.bfloat16),
        np.zeros((0, 4, 3), np.uint8),
        [Image.new("RGB", (0, 4))],
        torch.zeros(5, dtype=torch.uint8),
        "nowhere.jpg",
        Path("/"),
        ["a", None],
    ],
)
def test_a_wrong_image_input_is_one_clear_line(model: Model, value: Any) -> None:
    with pytest.raises((UserError, BadImage)) as caught:
        model.encode_image(value)
    assert "\n" not in str(caught.value)
    assert re.search(r"encode_image takes|must be \(height|no pixels|missing|not a file", str(caught.value))


def test_one_or_many_texts(model: Model) -> None:
    wanted = model.encode_text(["night"])
    for value in ("night", ("night",), iter(["night"]), np.array(["night"])):
        assert torch.equal(model.encode_text(value), wanted)
    for wrong in (None, 3, b"night", [3], [None], Path("night"), {"night": 1}, np.zeros(3), torch.zeros(3)):
        with pytest.raises(UserError, match="encode_text takes a text, or a list of texts"):
            model.encode_text(wrong)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_broken_folders_are_one_clear_line(folder: Path, tmp_path: Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(UserError, match=words) as caught:
            load(folder)
        assert "\n" not in str(caught.value)

    with pytest.raises(UserError, match="no trained model found"):
        load(tmp_path / "nowhere")
    whole = (folder / "config.json").read_text()
    edit_config(folder, format=99)
    refused(r"newer m1clip \(format 99")
    for version in (-1, 0, 1.5, "1", True):
        edit_config(folder, format=version)
        refused("format must be an integer of at least 1")
    for text in ("", "[]", "{", '{"format": 1}', '{"format": 1, "model": 3, "preprocess": {}}'):
        (folder / "config.json").write_text(text)
        refused("not a model config")
    saved = json.loads(whole)["model"]
    (folder / "config.json").write_text(whole)
    edit_config(folder, model={**saved, "extra": 1})
    refused("extra")
    for change in ({"width": "x"}, {"pooling": "max"}, {"mlp_ratio": None}, {"patch_bias": 1}):
        edit_config(folder, model={**saved, "image_tower": {**saved["image_tower"], **change}})
        refused(f"config.json: model: image_tower: {next(iter(change))} must be")
    (folder / "config.json").write_text(whole)
    edit_config(folder, preprocess={**json.loads(whole)["preprocess"], "mean": [0.5]})
    refused("config.json: preprocessing: mean must be 3 numbers")
    edit_config(folder, preprocess={**json.loads(whole)["preprocess"], "image_size": 64})
    refused("takes images of 32 pixels, the preprocessing makes 64")
    (folder / "config.json").write_text(whole)
    edit_config(folder, model={**saved, "text_tower": {**saved["text_tower"], "eot_id": 3}})
    refused("in the tokenizer, 3 in the model")
    (folder / "config.json").write_text(whole)
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "logit_scale"}, folder / "model.safetensors")
    refused("missing tensor 'logit_scale'")
    save_file({**weights, "odd": torch.zeros(1)}, folder / "model.safetensors")
    refused("unknown tensor 'odd'")
    save_file({**weights, "text_tower.norm.weight": torch.zeros(3)}, folder / "model.safetensors")
    refused(r"'text_tower.norm.weight' is \(3,\), the model expects \(32,\)")
    table = weights["text_tower.tokens.weight"]
    save_file({**weights, "text_tower.tokens.weight": table.int()}, folder / "model.safetensors")
    refused("'text_tower.tokens.weight' is torch.int32, the model expects floating-point numbers")
    save_file({**weights, "text_tower.tokens.weight": table.double() * 1e300}, folder / "model.safetensors")
    refused("'text_tower.tokens.weight' contains NaN or infinity")
    (folder / "model.safetensors").write_bytes(b"\x00" * 200)
    refused("not a readable safetensors file")


@pytest.mark.parametrize("positions", ["learned", "sincos"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_another_image_size(model: Model, tmp_path: Path, positions: str, pooling: str) -> None:
    size = {"context_length": 24, "vocab_size": model.tokenizer.vocab_size}
    clip = tiny_clip(**size, positions=positions, pooling=pooling)
    Model(clip, model.tokenizer, model.preprocess).save(tmp_path / "model")
    slope = np.indices((64, 64)).sum(axis=0)[..., None] * np.array([2.0, 1.0, 0.5])
    smooth = Image.fromarray(slope.astype(np.uint8))
    trained = load(tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", image_size=32).encode_image([smooth]), trained.encode_image([smooth]))
    larger = load(tmp_path / "model", image_size=64)
    assert larger.preprocess == replace(trained.preprocess, image_size=64)
    features = larger.encode_image([smooth])
    assert features.shape == (1, 16)
    cosine = float((features * trained.encode_image([smooth])).sum())
    assert cosine > 0.95
    larger.save(tmp_path / "larger")
    assert torch.equal(load(tmp_path / "larger").encode_image([smooth]), features)
    with pytest.raises(UserError, match="not a multiple of"):
        load(tmp_path / "model", image_size=50)


def test_preprocess_and_tokenizer_give_what_the_model_takes(model: Model, images: list[Path]) -> None:
    loaded = [Image.open(path).convert("RGB") for path in images[:2]]
    pixels = torch.stack([model.preprocess(image) for image in loaded])
    assert pixels.shape == (2, 3, 32, 32)
    tokens = model.tokenizer(["night", "a red ball"])
    assert (tokens.shape, tokens.dtype) == ((2, 24), torch.int64)
    assert torch.equal(model.tokenizer("night"), tokens[:1])
    with torch.inference_mode():
        torch.testing.assert_close(model.clip.encode_image(pixels), model.encode_image(loaded))
        torch.testing.assert_close(model.clip.encode_text(tokens), model.encode_text(["night", "a red ball"]))


def test_similarity_and_classify(model: Model, images: list[Path]) -> None:
    labels = ["night", "a red ball", "house"]
    cosines = model.similarity(images, labels)
    torch.testing.assert_close(cosines, model.encode_image(images) @ model.encode_text(labels).T)
    for row, found in zip(cosines, model.classify(images, labels), strict=True):
        assert [label for label, _ in found] == [labels[place] for place in row.argsort(descending=True).tolist()]
        assert sum(probability for _, probability in found) == pytest.approx(1.0)
    averaged = model.classify(images[0], labels, templates=["a {}", "the {}"])[0]
    assert {label for label, _ in averaged} == set(labels)
    for wrong in (["night"], "night"):
        with pytest.raises(UserError, match="two or more labels"):
            model.classify(images, wrong)
    with pytest.raises(UserError, match=r"has no \{\}"):
        model.classify(images, labels, templates=["a"])
    assert model.classify(images, labels, templates="{}") == model.classify(images, labels, templates=())
    for wrong in (None, 3, ["night", None]):
        with pytest.raises(UserError, match="classify takes a list of labels"):
            model.classify(images, wrong)


@pytest.mark.parametrize("size", [0, -1, 2.5, None, "8"])
def test_a_wrong_batch_size_is_one_clear_line(model: Model, images: list[Path], size: Any) -> None:
    for encode, values in ((model.encode_image, images), (model.encode_text, ["night"])):
        with pytest.raises(UserError, match="batch_size must be an integer of at least 1"):
            encode(values, batch_size=size)


def test_vectors_that_are_not_finite_are_an_error(folder: Path, images: list[Path]) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: torch.full_like(value, 3e38) for name, value in weights.items()}, folder / "model.safetensors")
    huge = load(folder)  # every weight is finite
    for encode, values in ((huge.encode_image, images), (huge.encode_text, ["night"])):
        with pytest.raises(UserError, match="computes NaN"):
            encode(values)


@pytest.mark.parametrize("device", ["gpu", "", "CPU", "cuda:99"])
def test_a_device_that_is_not_there_is_named(folder: Path, device: str) -> None:
    with pytest.raises(UserError, match=f"device {device!r}: not available here"):
        load(folder, device=device)


def test_the_public_names_keep_their_kind_after_every_import() -> None:
    import importlib

    for module in ("training.run", "evaluation.evaluate", "inference.encoder", "model.presets"):
        importlib.import_module(f"m1clip.{module}")
    for name in ("train", "evaluate", "load", "list_models"):
        assert callable(getattr(m1clip, name))
    assert "ViT-B-32" in m1clip.list_models()
    assert (Path(m1clip.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = m1clip.nothing
