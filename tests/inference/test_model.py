"""Model: encode paths, images, arrays and texts; load, save, classify."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_model import tiny_clip
from tower_run import PIECES

import m1clip
from m1clip.data.captions import tokenize_captions
from m1clip.data.decoding import LazyImages
from m1clip.data.images import BadImage, FileImage, Preprocess
from m1clip.data.prepare import Split
from m1clip.errors import UserError
from m1clip.inference import batches, load
from m1clip.inference.batches import TowerRunner, in_order
from m1clip.inference.features import encode_split
from m1clip.inference.inputs import TEMPLATES, LoadingProcess, default_templates
from m1clip.inference.model import Model
from m1clip.inference.torch_encoder import TorchEncoder
from m1clip.model.clip import build_clip
from m1clip.model.presets import CLIPConfig, HeadConfig, PretrainedImageConfig, PretrainedTextConfig
from m1clip.model.pretrained import registry
from m1clip.model.pretrained.bert import BertSize
from m1clip.text.tokenizers import make_tokenizer, wordpiece_tokenizer

CAPTIONS = [("a red ball", "the ball is red"), ("two green trees and a small house",), ("night",)]
TEXTS = [caption for group in CAPTIONS for caption in group]
TOKENS = "text_tower.tokens.weight"


@pytest.fixture(scope="module")
def model() -> Model:
    """A small model with random weights."""
    tokenizer = make_tokenizer(
        "clip-bpe-pruned", [caption for group in CAPTIONS for caption in group]
    )
    clip = tiny_clip(context_length=24, vocab_size=tokenizer.vocab_size, positions="sincos")
    return Model(TorchEncoder(clip, tokenizer, Preprocess(image_size=32)))


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


def test_saved_model_loads_with_the_same_vectors(
    model: Model, folder: Path, images: list[Path]
) -> None:
    loaded = m1clip.load(folder)
    assert torch.equal(loaded.encode_text(TEXTS), model.encode_text(TEXTS))
    assert torch.equal(loaded.encode_image(images), model.encode_image(images))
    assert loaded.preprocess == model.preprocess
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_vectors_have_unit_length_and_do_not_depend_on_the_batch(
    model: Model, images: list[Path]
) -> None:
    for encode, values in ((model.encode_image, images), (model.encode_text, [*TEXTS, ""])):
        vectors = encode(values)
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(values)))
        assert not torch.allclose(vectors[0], vectors[1], atol=1e-3)
        torch.testing.assert_close(encode(values, batch_size=1), vectors, atol=1e-6, rtol=0)
        assert encode([]).shape == (0, 16)


@pytest.fixture(scope="module")
def pretrained_model() -> Model:
    """EfficientNet and a thin BERT with random weights, whose kernels differ from those of our own towers."""
    tokenizer = wordpiece_tokenizer(PIECES)
    text = PretrainedTextConfig(
        vocab_size=tokenizer.vocab_size, pad_id=tokenizer.pad_id, context_length=24
    )
    head = HeadConfig(kind="adapter", hidden=16)
    towers = {"image_tower": PretrainedImageConfig(image_size=64), "text_tower": text}
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "MINILM", BertSize(width=48, heads=4, hidden=96, positions=32))
        clip = build_clip(
            CLIPConfig(**towers, image_head=head, text_head=head, embed_dim=16)
        ).eval()
    for parameter in clip.parameters():
        if parameter.ndim == 4:
            torch.nn.init.kaiming_normal_(parameter)
        elif parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return Model(TorchEncoder(clip, tokenizer, Preprocess(image_size=64)))


# Largest difference between entries of two unit vectors; products of other shapes are summed in
# another order, and bf16 rounds each of them to 8 bits.
ROUNDING = {"fp32": 1e-5, "bf16": 0.02}
SOME_TEXTS = [
    "",
    "a",
    "night",
    *(" ".join(["two trees and a red ball"] * count) for count in range(1, 7)),
]
SOME_IMAGES = list(np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8))


@pytest.fixture(
    scope="module", params=["own-fp32", "own-bf16", "pretrained-fp32", "pretrained-bf16"]
)
def alone(
    request: pytest.FixtureRequest, model: Model, pretrained_model: Model
) -> tuple[Model, Any, Any]:
    """A model, and its vectors of SOME_TEXTS and of SOME_IMAGES, each encoded alone."""
    towers, precision = request.param.split("-")
    base = model if towers == "own" else pretrained_model
    tested = Model(TorchEncoder(base.clip, base.tokenizer, base.preprocess, precision))
    texts, images = map(tested.encode_text, SOME_TEXTS), map(tested.encode_image, SOME_IMAGES)
    return tested, torch.cat(list(texts)), torch.cat(list(images))


@settings(max_examples=8)
@given(
    texts=st.lists(st.integers(0, len(SOME_TEXTS) - 1), min_size=1, max_size=60),
    images=st.lists(st.integers(0, len(SOME_IMAGES) - 1), min_size=1, max_size=9),
    threads=st.integers(1, 3),
    batch=st.none() | st.integers(1, 7),
)
def test_a_vector_is_the_same_alone_in_any_batch_in_any_order_with_any_threads(
    alone: tuple[Model, Any, Any],
    texts: list[int],
    images: list[int],
    threads: int,
    batch: int | None,
) -> None:
    model, text, image = alone
    tolerance = {"atol": ROUNDING[model.encoder.precision], "rtol": 0}
    torch.set_num_threads(threads)
    try:
        vectors = model.encode_text([SOME_TEXTS[index] for index in texts], batch)
        torch.testing.assert_close(vectors, text[texts], **tolerance)
        vectors = model.encode_image([SOME_IMAGES[index] for index in images], batch)
        torch.testing.assert_close(vectors, image[images], **tolerance)
    finally:
        torch.set_num_threads(1)


def test_each_thread_of_the_pool_keeps_to_one_core() -> None:
    before = torch.get_num_threads()
    try:
        pool = batches._pool(2, os.getpid())

        def threads() -> int:
            torch.ones(100_000).add(1)  # the first operation of a thread initializes it
            return torch.get_num_threads()

        assert {pool.submit(threads).result() for _ in range(8)} == {1}
    finally:
        torch.set_num_threads(before)


def test_bf16_vectors_are_close_to_fp32(
    model: Model, pretrained_model: Model, images: list[Path]
) -> None:
    for base in (model, pretrained_model):
        rough = Model(TorchEncoder(base.clip, base.tokenizer, base.preprocess, "bf16"))
        for encode, exact, values in (
            (rough.encode_text, base.encode_text, TEXTS),
            (rough.encode_image, base.encode_image, images),
        ):
            cosine = (encode(values) * exact(values)).sum(dim=1)  # type: ignore[operator]
            assert 0.998 < float(cosine.min()) < 1 - 1e-8


def test_threads_may_share_a_model(pretrained_model: Model, images: list[Path]) -> None:
    texts = [" ".join(["night ball"] * (1 + number % 20)) for number in range(60)]
    torch.set_num_threads(2)
    try:
        expected = pretrained_model.encode_text(texts), pretrained_model.encode_image(images)
        with ThreadPoolExecutor(4) as pool:
            calls = [
                pool.submit(encode, values)  # type: ignore[arg-type]
                for _ in range(8)
                for encode, values in (
                    (pretrained_model.encode_text, texts),
                    (pretrained_model.encode_image, images),
                )
            ]
            for number, call in enumerate(calls):
                torch.testing.assert_close(call.result(), expected[number % 2], atol=1e-5, rtol=0)
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 2  # a new thread, too
    finally:
        torch.set_num_threads(1)


FORK = """
import os, signal, sys
import numpy as np, torch
import m1clip
from m1clip.inference import torch_encoder
torch_encoder.fastest_precision = lambda kind: "fp32"
torch.set_num_threads(2)
model = m1clip.load(sys.argv[1])
image = np.zeros((32, 32, 3), np.uint8)
expected = model.encode_image(image), model.encode_image([image] * 8), model.encode_text(["night", "a red ball"])
torch.randn(512, 512) @ torch.randn(512, 512)  # starts the threads of OpenMP
child = os.fork()
if child == 0:
    signal.alarm(300)  # ends a process that hangs
    found = model.encode_image(image), model.encode_image([image] * 8), model.encode_text(["night", "a red ball"])
    close = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected))
    torch.randn(512, 512) @ torch.randn(512, 512)
    os._exit(0 if close else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_model_can_be_used_in_a_forked_process(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, str(folder)], timeout=600, check=False)
    assert done.returncode == 0


def test_model_with_threads_of_its_own_is_an_error_in_a_forked_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = LoadingProcess()
    process.require_same("an ONNX model")
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(
        UserError, match="an ONNX model cannot be used in a process that was forked"
    ) as caught:
        process.require_same("an ONNX model")
    assert "\n" not in str(caught.value)
    copy.copy(process).require_same("a model of a spawned process")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_changed_weights_give_other_vectors(
    pretrained_model: Model, images: list[Path], precision: Any
) -> None:
    """The encoder keeps copies of the weights for its kernels."""
    changed = Model(
        TorchEncoder(
            copy.deepcopy(pretrained_model.clip),
            pretrained_model.tokenizer,
            Preprocess(image_size=64),
            precision,
        )
    )
    state = {name: tensor.clone() for name, tensor in changed.clip.state_dict().items()}

    def vectors() -> torch.Tensor:
        return torch.cat([changed.encode_text(TEXTS), changed.encode_image(images)])

    first, parameters = vectors(), list(changed.clip.parameters())

    @torch.no_grad()
    def in_place() -> None:
        for parameter in parameters:
            parameter.mul_(-0.5)

    def behind() -> None:
        changed.clip.train()  # as training does, whose optimizers may not count versions
        for parameter in parameters:
            parameter.data.mul_(-0.5)
        changed.clip.eval()

    def replaced() -> None:
        for parameter in parameters:
            parameter.data = parameter.data * -0.5

    for change in (in_place, behind, replaced):
        change()
        assert not torch.allclose(vectors(), first, atol=1e-2), change.__name__
        changed.clip.load_state_dict(state)
        assert torch.equal(vectors(), first)


def test_equal_texts_are_encoded_once() -> None:
    tokenized = []

    def tower(tokens: torch.Tensor) -> torch.Tensor:
        tokenized.extend(tokens.tolist())
        return tokens.float()

    tokens = np.array(
        [[1, 5, 2, 0], [1, 2, 0, 0], [1, 5, 2, 0], [1, 2, 0, 0], [1, 6, 2, 0]], np.int32
    )
    runner = TowerRunner(tower, tower, Preprocess(image_size=8), torch.device("cpu"))
    assert in_order(runner.tokens(tokens, np.array([3, 2, 3, 2, 3]))).tolist() == tokens.tolist()
    assert sorted(tokenized) == sorted(map(list, {tuple(row) for row in tokens.tolist()}))


def test_encoding_a_split_gives_the_same_vectors(model: Model, images: list[Path]) -> None:
    """Also for JPEG, which is decoded at a smaller size when it is large."""
    refs = LazyImages([FileImage(str(path)) for path in images], 32)
    split = Split(refs, tokenize_captions(CAPTIONS, model.tokenizer, 24), [])
    model.clip.train()
    image, text, image_index, *_ = encode_split(model, split)
    assert model.clip.training
    np.testing.assert_allclose(model.encode_image(images), image, atol=1e-6, rtol=0)
    np.testing.assert_allclose(model.encode_text(TEXTS), text, atol=1e-6, rtol=1e-5)
    assert image_index.tolist() == [0, 0, 1, 2]


def test_run_loads_its_best_model(model: Model, folder: Path) -> None:
    run = folder.parent / "run"
    shutil.copytree(folder, run / "model")
    assert load(run).encode_text("night").equal(model.encode_text("night"))
    shutil.copytree(folder, run / "best")
    weights(TOKENS, -load_file(folder / "model.safetensors")[TOKENS])(run / "best")
    assert not load(run).encode_text("night").equal(model.encode_text("night"))


def test_one_or_many_images_of_every_kind(model: Model, images: list[Path]) -> None:
    path = images[0]
    expected = model.encode_image([path])
    image = Image.open(path).convert("RGB")
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy())
    content = path.read_bytes()
    one = [
        str(path),
        path,
        content,
        bytearray(content),
        image,
        array,
        tensor,
        tensor.permute(2, 0, 1),
    ]
    for value in one:
        assert torch.equal(model.encode_image(value), expected), type(value)
        assert torch.equal(model.encode_image([value]), expected), type(value)
    both = torch.stack([tensor, tensor])
    many = [
        np.stack([array, array]),
        both,
        both.permute(0, 3, 1, 2),
        (str(path), image),
        iter([path, array]),
    ]
    for value in (*many, np.array([str(path), str(path)])):
        torch.testing.assert_close(
            model.encode_image(value), torch.cat([expected, expected]), atol=1e-6, rtol=0
        )
    assert torch.equal(model.encode_image(one), model.encode_image([path] * len(one)))


NOT_IMAGES = [
    *(
        None,
        3,
        b"a.jpg",
        {"a": 1},
        [None],
        [["a.jpg"]],
        [b"x"],
        [3],
        ["a", None],
        object(),
        "nowhere.jpg",
        Path("/"),
    ),
    *(
        np.array(3),
        torch.tensor(3),
        torch.zeros(3, 4, 4),
        torch.zeros(3, 4, 4, dtype=torch.bfloat16),
    ),
    *(np.zeros((2, 4, 4, 3)), np.zeros((0, 4, 3), np.uint8), torch.zeros(5, dtype=torch.uint8)),
    *(
        np.zeros((4, 4, 3)),
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((3, 4, 4), np.uint8),
    ),
    [Image.new("RGB", (0, 4))],
]


@pytest.mark.parametrize("value", NOT_IMAGES)
def test_wrong_image_input_is_a_one_line_error(model: Model, value: Any) -> None:
    with pytest.raises((UserError, BadImage)) as caught:
        model.encode_image(value)
    assert "\n" not in str(caught.value)
    words = (
        r"encode_image takes|must be \(height|no pixels|missing|not a file|^the bytes of an image:"
        r" not an image"
    )
    assert re.search(words, str(caught.value))


def test_one_or_many_texts(model: Model) -> None:
    expected = model.encode_text(["night"])
    for value in ("night", ("night",), iter(["night"]), np.array(["night"])):
        assert torch.equal(model.encode_text(value), expected)
    for wrong in (
        None,
        3,
        b"night",
        [3],
        [None],
        Path("night"),
        {"night": 1},
        np.zeros(3),
        torch.zeros(3),
    ):
        with pytest.raises(UserError, match="encode_text takes a text, or a list of texts"):
            model.encode_text(wrong)


Damage = Callable[[Path], object]


def config(keys: str, value: object) -> Damage:
    def change(folder: Path) -> None:
        record = target = json.loads((folder / "config.json").read_text())
        *parts, last = keys.split(".")
        for part in parts:
            target = target[part]
        target[last] = value
        (folder / "config.json").write_text(json.dumps(record))

    return change


def weights(name: str, tensor: torch.Tensor | None) -> Damage:
    def change(folder: Path) -> None:
        changed = {**load_file(folder / "model.safetensors"), name: tensor}
        save_file(
            {key: value for key, value in changed.items() if value is not None},
            folder / "model.safetensors",
        )

    return change


def text(content: str, file: str = "config.json") -> Damage:
    return lambda folder: (folder / file).write_text(content)


NORM = "text_tower.norm.weight"
DAMAGE: list[tuple[Damage, str]] = [
    *(
        (config("format", value), "format must be an integer of at least 1")
        for value in (-1, 0, 1.5, "1", True)
    ),
    (config("format", 99), r"newer m1clip \(format 99"),
    (config("model.extra", 1), "extra"),
    (config("model.image_tower.width", "x"), "model: image_tower: width must be"),
    (config("model.image_tower.pooling", "max"), "image_tower: pooling must be"),
    (config("model.image_tower.mlp_ratio", None), "image_tower: mlp_ratio must be"),
    (config("model.image_tower.patch_bias", 1), "image_tower: patch_bias must be"),
    (config("preprocess.mean", [0.5]), "preprocessing: mean must be 3 numbers"),
    (config("preprocess.image_size", 64), "of 32 pixels, the preprocessing makes 64"),
    (config("model.text_tower.eot_id", 3), "in the tokenizer, 3 in the model"),
    *((text(content), "config.json: not a") for content in ("", "[]", "{", '{"format": 1}')),
    (text('{"format": 1, "model": 3, "preprocess": {}}'), "must be objects"),
    (weights("logit_scale", None), "missing tensor 'logit_scale'"),
    (weights("odd", torch.zeros(1)), "unknown tensor 'odd'"),
    (weights(NORM, torch.zeros(3)), rf"'{NORM}' is \(3,\), the model expects \(32,\)"),
    (weights(NORM, torch.ones(32).int()), "torch.int32, the model expects floating-point numbers"),
    (weights(NORM, torch.ones(32).double() * 1e300), "contains NaN or infinity"),
    (text("\0" * 200, "model.safetensors"), "not a readable safetensors file"),
    (shutil.rmtree, "no such file or folder"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_damaged_folder_is_a_one_line_error(folder: Path, damage: Damage, words: str) -> None:
    damage(folder)
    with pytest.raises(UserError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("positions", ["learned", "sincos"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_another_image_size(model: Model, tmp_path: Path, positions: str, pooling: str) -> None:
    size = {"context_length": 24, "vocab_size": model.tokenizer.vocab_size}
    clip = tiny_clip(**size, positions=positions, pooling=pooling)
    Model(TorchEncoder(clip, model.tokenizer, model.preprocess)).save(tmp_path / "model")
    slope = np.indices((64, 64)).sum(axis=0)[..., None] * np.array([2.0, 1.0, 0.5])
    smooth = Image.fromarray(slope.astype(np.uint8))
    trained = load(tmp_path / "model")
    assert torch.equal(
        load(tmp_path / "model", image_size=32).encode_image([smooth]),
        trained.encode_image([smooth]),
    )
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


def test_preprocess_and_tokenizer_give_what_the_model_takes(
    model: Model, images: list[Path]
) -> None:
    loaded = [Image.open(path).convert("RGB") for path in images[:2]]
    pixels = torch.stack([model.preprocess(image) for image in loaded])
    assert pixels.shape == (2, 3, 32, 32)
    tokens = model.tokenizer(["night", "a red ball"])
    assert (tokens.shape, tokens.dtype) == ((2, 24), torch.int64)
    assert torch.equal(model.tokenizer("night"), tokens[:1])
    with torch.inference_mode():
        torch.testing.assert_close(model.clip.encode_image(pixels), model.encode_image(loaded))
        torch.testing.assert_close(
            model.clip.encode_text(tokens), model.encode_text(["night", "a red ball"])
        )


def test_similarity_and_classify(model: Model, images: list[Path]) -> None:
    labels = ["night", "a red ball", "house"]
    cosines = model.similarity(images, labels)
    torch.testing.assert_close(cosines, model.encode_image(images) @ model.encode_text(labels).T)
    for row, scores in zip(cosines, model.classify(images, labels), strict=True):
        assert [label for label, _ in scores] == [
            labels[index] for index in row.argsort(descending=True).tolist()
        ]
        assert sum(probability for _, probability in scores) == pytest.approx(1.0)
    averaged = model.classify(images[0], labels, templates=["a {}", "the {}"])[0]
    assert {label for label, _ in averaged} == set(labels)
    # A label with an article is taken as it is, and so are the others.
    assert model.classify(images, labels, templates="{}") == model.classify(images, labels)


def test_names_are_classified_as_in_eval(model: Model, images: list[Path]) -> None:
    names = ["night", "red ball"]
    assert model.classify(images, names) == model.classify(images, names, TEMPLATES)
    assert model.classify(images, names) != model.classify(images, names, ["{}"])
    assert default_templates(["dog", "two dogs on a beach"]) == ("{}",)
    assert default_templates(["dog", "the cat"]) == ("{}",)
    assert default_templates(["Dog", "A cat"]) == ("{}",)


@pytest.mark.parametrize(
    ("labels", "templates", "words"),
    [
        *((wrong, ["{}"], "two or more labels") for wrong in (["night"], "night")),
        *(
            (wrong, ["{}"], "classify takes a list of labels")
            for wrong in (None, 3, ["night", None])
        ),
        (["night", "day"], ["a"], r"has no \{\}"),
    ],
)
def test_wrong_labels_are_user_errors(
    model: Model, images: list[Path], labels: Any, templates: Any, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        model.classify([], labels, templates)


@pytest.mark.parametrize("size", [0, -1, 2.5, "8"])
def test_wrong_batch_size_is_a_one_line_error(model: Model, images: list[Path], size: Any) -> None:
    for encode, values in ((model.encode_image, images), (model.encode_text, ["night"])):
        with pytest.raises(UserError, match="batch_size must be an integer of at least 1"):
            encode(values, batch_size=size)


def test_vectors_that_are_not_finite_are_an_error(folder: Path, images: list[Path]) -> None:
    file = folder / "model.safetensors"
    save_file({name: torch.full_like(value, 3e38) for name, value in load_file(file).items()}, file)
    huge = load(folder)  # every weight is finite
    for encode, values in ((huge.encode_image, images), (huge.encode_text, ["night"])):
        with pytest.raises(UserError, match="computes NaN"):
            encode(values)


@pytest.mark.parametrize("device", ["", "CPU", "cuda:99", 99, []])
def test_missing_device_is_named(model: Model, folder: Path, device: Any) -> None:
    for move in (lambda: load(folder, device=device), lambda: model.to(device)):
        with pytest.raises(
            UserError, match=f"device {re.escape(repr(str(device)))}: not available here"
        ):
            move()


def test_gpu_means_the_same_as_in_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m1clip.model.folder.device_name", lambda name: {"gpu": "cpu"}[name])
    assert load(folder, device="gpu").device.type == "cpu"


def test_repr_names_sizes_and_device(model: Model) -> None:
    config = model.clip.config
    text = repr(model)
    assert text.startswith(
        f"Model({config.image_size} px images, texts of {config.context_length} tokens"
    )
    assert f"{config.embed_dim} dimensions" in text
    assert text.endswith(" parameters on cpu)")


def test_odd_paths_and_sizes_are_user_errors(model: Model, folder: Path) -> None:
    for call in (lambda: load(None), lambda: model.save(3)):  # type: ignore[arg-type]
        with pytest.raises(UserError, match="takes the path of a model folder"):
            call()
    for size in ("32", 0, 2.5):
        with pytest.raises(UserError, match="image_size must be"):
            load(folder, image_size=size)  # type: ignore[arg-type]


def test_save_replaces_a_model_and_nothing_else(model: Model, folder: Path) -> None:
    model.save(folder)
    photos = folder.parent / "photos"
    photos.mkdir()
    model.save(photos)  # empty
    (photos / "config.json").unlink()
    with pytest.raises(UserError, match="exists and is not a model folder"):
        model.save(photos)
    assert (photos / "model.safetensors").is_file()


def test_public_names_stay_functions_after_every_import() -> None:
    import importlib

    for module in (
        "training.run",
        "evaluation.evaluate",
        "inference.torch_encoder",
        "model.presets",
    ):
        importlib.import_module(f"m1clip.{module}")
    for name in ("train", "evaluate", "load", "list_models", "list_presets", "download"):
        assert callable(getattr(m1clip, name))
    assert "ViT-B-32" in m1clip.list_presets()
    assert "general" in [model.name for model in m1clip.list_models()]
    assert (Path(m1clip.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = m1clip.nothing
