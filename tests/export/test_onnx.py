"""`m1clip export --to onnx`, and the exported folder without torch."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_sets import make_set
from PIL import Image
from small_run import ROOT, exit_code, made_once
from tiny_model import tiny_model

import m1clip
from m1clip import console
from m1clip.errors import UserError
from m1clip.export import quantize
from m1clip.export.layouts import convert
from m1clip.inference.model import Model
from m1clip.inference.onnx_encoder import OnnxEncoder
from m1clip.model.folder import read_model
from m1clip.text.tokenizers import make_tokenizer, wordpiece_tokenizer

onnx = pytest.importorskip("onnx", reason="needs the extra `export`")
CAPTIONS = [
    "a red ball on the grass",
    "two cats!",
    "it's a dog, running",
    "a naïve “quote” and a 7",
]
TEXTS = [
    "a red ball",
    "two dogs and seventeen unseen words that go on and on until the context is full",
    "",
]
NOISE = np.random.default_rng(0).integers(0, 256, (3, 40, 51, 3), np.uint8)


def save_and_export(folder: Path) -> None:
    model = tiny_model("clip-bpe-pruned", CAPTIONS, positions="sincos", text_pooling="eot+mean")
    model.save(folder / "model")
    assert exit_code("export", folder / "model", "--to", "onnx") == 0


@pytest.fixture(scope="module")
def trained() -> Path:
    """A model that no test changes."""
    return made_once("onnx", save_and_export) / "model"


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    """The same model in onnxruntime: an export takes seconds, so all xdist workers share it."""
    return trained.with_name("model-onnx")


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def without(modules: str, code: str, *words: str | Path) -> str:
    """Run code in a process that cannot import these modules."""
    block = f"import sys; sys.modules.update(dict.fromkeys({modules.split()!r}))\n"
    command = [sys.executable, "-c", block + code, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_graph_has_the_mean_with_mirror_images(tmp_path: Path) -> None:
    model = tiny_model("clip-bpe-pruned", CAPTIONS, positions="sincos")
    model.clip.config = replace(model.clip.config, mirror=True)
    model.save(tmp_path / "model")
    saved = read_model(tmp_path / "model")
    with console.quiet():
        convert(saved, "onnx", tmp_path / "graphs")
    exported = m1clip.load(tmp_path / "graphs")
    flipped = np.ascontiguousarray(NOISE[:, :, ::-1])
    for images in (NOISE, flipped):
        np.testing.assert_allclose(
            exported.encode_image(images), model.encode_image(NOISE), atol=2e-6
        )


def test_onnx_vectors_match_torch(trained: Path, exported: Path) -> None:
    ours, theirs = m1clip.load(trained), m1clip.load(exported)
    assert isinstance(theirs, Model)
    assert isinstance(theirs.encode_text("a dog"), np.ndarray)
    for batch_size in (1, 2, 64):
        np.testing.assert_allclose(
            theirs.encode_image(NOISE, batch_size), ours.encode_image(NOISE), atol=2e-6
        )
        np.testing.assert_allclose(
            theirs.encode_text(TEXTS, batch_size), ours.encode_text(TEXTS), atol=2e-6
        )
    np.testing.assert_allclose(
        theirs.similarity(NOISE[0], "a dog"), ours.similarity(NOISE[0], "a dog"), atol=2e-6
    )
    one, other = (
        model.classify(NOISE, ["cat", "dog"], ["a {}", "the {}"]) for model in (ours, theirs)
    )
    assert [[name for name, _ in row] for row in one] == [
        [name for name, _ in row] for row in other
    ]
    np.testing.assert_allclose([row[0][1] for row in one], [row[0][1] for row in other], atol=1e-4)
    assert theirs.encode_image([]).shape == ours.encode_image([]).shape
    assert np.array_equal(theirs.tokenizer(TEXTS), ours.tokenizer(TEXTS))
    assert theirs.preprocess(Image.fromarray(NOISE[0])).shape == (32, 32, 3)


def test_onnx_model_has_no_weights_to_move_or_save(exported: Path, tmp_path: Path) -> None:
    model = m1clip.load(exported)
    assert repr(model) == f"Model(32 px images, texts of 16 tokens -> 16 dimensions; {exported})"
    assert model.to("cpu") is model
    for use, words in (
        (lambda: model.to("cuda"), "runs on the CPU only"),
        (lambda: model.save(tmp_path / "model"), "cannot be saved as a model folder"),
        (lambda: model.clip, "has no torch module"),
        (
            lambda: m1clip.evaluate(model, "synthetic", device="cuda"),
            "runs on the CPU; use --device cpu",
        ),
    ):
        with pytest.raises(UserError, match=words) as caught:
            use()
        assert str(caught.value).startswith(f"{exported}: ")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_onnx_model_is_an_error_in_a_forked_process(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = m1clip.load(exported)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    for encode, value in ((model.encode_image, NOISE[0]), (model.encode_text, "a dog")):
        with pytest.raises(
            UserError, match="an ONNX model cannot be used in a process that was forked"
        ):
            encode(value)  # type: ignore[operator]


def test_onnx_example_runs_without_torch_and_m1clip(
    trained: Path, exported: Path, tmp_path: Path
) -> None:
    example = exported / "example.py"
    assert len(example.read_text().splitlines()) <= 45
    Image.fromarray(NOISE[0]).save(tmp_path / "photo.png")
    code = (
        f"import runpy; sys.argv = [''] + sys.argv[1:]; runpy.run_path({str(example)!r},"
        " run_name='__main__')"
    )
    out = without("torch m1clip onnx", code, tmp_path / "photo.png", *TEXTS[:2])
    similarities = [float(line.split()[0]) for line in out.splitlines()]
    np.testing.assert_allclose(
        similarities, m1clip.load(trained).similarity(NOISE[0], TEXTS[:2])[0], atol=6e-4
    )


def test_loading_an_onnx_folder_does_not_import_torch(exported: Path, tmp_path: Path) -> None:
    Image.fromarray(NOISE[0]).save(tmp_path / "photo.png")
    code = (
        "import m1clip; print(m1clip.load(sys.argv[1]).classify(sys.argv[2], ['a', 'b']));"
        " print(list(sys.modules))"
    )
    out = without("torch onnx", code, exported, tmp_path / "photo.png")
    assert "m1clip.data.cache" not in out


def test_eval_of_onnx_folder_matches_model(exported: Path, trained: Path, tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", train=2, val=2, test=24)
    one, other = (m1clip.evaluate(model, data, device="cpu") for model in (trained, exported))
    assert dict(one) == pytest.approx(dict(other), abs=0.1)  # torch may choose bf16


def test_eval_of_an_onnx_folder_does_not_import_torch(exported: Path, tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", train=2, val=2, test=6)
    for name in ("one", "two"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        Image.fromarray(NOISE[0]).save(tmp_path / "classes" / name / "1.png")
    code = """
import os
from m1clip.cli import models
folder, data, classes = sys.argv[1:]
os.chdir(os.path.dirname(classes))
models.evaluate(models.Path(folder), source=(data,), analysis=True)
assert not list(models.Path().glob("*-test-*")), "only where it was asked for"
models.evaluate(models.Path(folder), source=(data,), analysis=True, out=models.Path("figures"))
models.evaluate(models.Path(folder), classes=models.Path(classes))
"""
    out = without("torch onnx", code, exported, data, tmp_path / "classes")
    for words in (
        "text to image, recall@10",
        "modality gap",
        "worst confusions",
        "zero shot, top1",
    ):
        assert words in out
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "retrieval-test-other-data.png",
        "analysis-test-other-data.json",
    }


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "##b", "é", "dog", "!"]


@pytest.mark.parametrize("kind", ["char", "bpe", "clip-bpe-pruned", "wordpiece"])
def test_exported_tokenizer_matches_m1clip(kind: str) -> None:
    ours = wordpiece_tokenizer(PIECES) if kind == "wordpiece" else make_tokenizer(kind, CAPTIONS)
    library, parts = ours.library(), getattr(ours, "parts", None)
    if parts is not None:
        parts = [*parts, [ours.sot_id], [ours.eot_id]]

    @given(st.text(st.sampled_from("abdgo zé日7’“\t\n!.,'&A"), max_size=30))
    def check(text: str) -> None:
        ids = library.encode(text).ids  # from here as example.py does it
        ids = ids if parts is None else [part for token in ids for part in parts[token]]
        assert ids == [ours.sot_id, *ours.encode(text), ours.eot_id]

    check()


def change_graph(path: Path, **changes: Any) -> None:
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    if "domain" in changes:
        model.graph.node[0].domain = changes["domain"]
        model.opset_import.add(domain=changes["domain"], version=1)
    if "location" in changes:
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=changes["location"])
    path.write_bytes(model.SerializeToString())


def break_tokenizer(folder: Path) -> None:
    change_settings(folder, tokenizer={"kind": "fast", "pad_id": 0})
    (folder / "tokenizer.json").write_text("{}")


def change_settings(folder: Path, **changes: Any) -> None:
    path = folder / "preprocess.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def replace_graph(folder: Path, make: Callable[[Path], object]) -> None:
    (folder / "image.onnx").unlink()
    make(folder / "image.onnx")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "text.onnx").unlink(), r"text\.onnx: onnxruntime cannot open it"),
        (
            lambda folder: (folder / "image.onnx").write_bytes(b"no"),
            r"image\.onnx: onnxruntime cannot open it",
        ),
        (
            lambda folder: shutil.copy(folder / "text.onnx", folder / "image.onnx"),
            "not a graph of m1clip export",
        ),
        (
            lambda folder: change_graph(folder / "image.onnx", domain="evil"),
            "evil.*not a registered",
        ),
        (
            lambda folder: change_graph(folder / "text.onnx", location="../w.bin"),
            "escapes model directory",
        ),
        (
            lambda folder: change_graph(folder / "text.onnx", location="/etc/passwd"),
            "Absolute path not allowed",
        ),
        (lambda folder: (folder / "preprocess.json").unlink(), r"preprocess\.json: cannot be read"),
        (
            lambda folder: (folder / "preprocess.json").write_text("[" * 9999),
            "not written by m1clip export",
        ),
        (lambda folder: change_settings(folder, format=2), "newer m1clip"),
        (lambda folder: change_settings(folder, embed_dim=17), "for another preprocess"),
        (lambda folder: change_settings(folder, logit_scale=float("nan")), "wrong type"),
        (lambda folder: change_settings(folder, image={"image_size": 10**9}), "preprocessing"),
        (
            lambda folder: change_settings(
                folder, tokenizer={"kind": "clip-bpe-pruned", "kept": [3]}
            ),
            "increasing",
        ),
        (break_tokenizer, "not a tokenizer"),
        (lambda folder: change_settings(folder, image_graph="../image.onnx"), "outside the folder"),
        (lambda folder: change_settings(folder, text_graph=None), "wrong type"),
        (lambda folder: replace_graph(folder, os.mkfifo), "not a regular file"),
        (lambda folder: replace_graph(folder, Path.mkdir), "not a regular file"),
        (lambda folder: replace_graph(folder, link_to_itself), "not a regular file"),
    ],
)
def test_damaged_onnx_folder_is_a_one_line_error(copied: Path, damage: Any, words: str) -> None:
    (copied.parent / "w.bin").write_bytes(bytes(10**6))
    damage(copied)
    with pytest.raises(UserError, match=words) as error:
        m1clip.load(copied).encode_image(np.zeros((8, 8, 3), np.uint8))
    assert "\n" not in str(error.value)


def test_onnx_folder_rejects_other_image_size_and_device(exported: Path) -> None:
    for options in ({"device": "cuda"}, {"image_size": 64}):
        with pytest.raises(UserError, match="runs on the CPU"):
            m1clip.load(exported, **options)  # type: ignore[arg-type]


def test_interrupted_export_leaves_no_folder(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(line: str) -> None:
        if "text.onnx" in line:
            assert list(tmp_path.glob("out.*.partial/image.onnx"))
            raise KeyboardInterrupt

    monkeypatch.setattr(console, "print", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(read_model(trained), "onnx", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def check_close(folder: Path, float_folder: Path, least_cosine: float) -> None:
    one, other = m1clip.load(float_folder), m1clip.load(folder)
    for method, inputs in (("encode_image", NOISE), ("encode_text", TEXTS)):
        before, after = getattr(one, method)(inputs), getattr(other, method)(inputs)
        assert (before * after).sum(axis=1).min() > least_cosine
        assert not np.array_equal(before, after)
    for name in ("image.onnx", "text.onnx"):
        assert (folder / name).stat().st_size < (float_folder / name).stat().st_size


def test_int8_export_is_smaller_and_close_to_float(
    trained: Path, exported: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert exit_code("export", trained, "--int8", "--out", out) == 0
    assert {path.name for path in out.iterdir()} == {path.name for path in exported.iterdir()}
    check_close(out, exported, 0.98)
    record = json.loads((out / "export.json").read_text())
    assert list(record["runtimes"]) == ["torch", "onnx fp32", "onnx int8"]
    assert record["runtimes"]["onnx fp32"]["image_seconds"]


def test_fp16_graphs_are_smaller_and_close_to_float(exported: Path, copied: Path) -> None:
    quantize.quantize(copied, "fp16", OnnxEncoder(exported), NOISE[:0], "_half")
    for name in ("image", "text"):
        (copied / f"{name}_half.onnx").rename(copied / f"{name}.onnx")
    change_settings(copied, image_graph="image.onnx", text_graph="text.onnx")
    check_close(copied, exported, 0.9999)


def test_int8_shows_what_it_tries_and_hides_what_onnxruntime_logs(
    exported: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.stack([m1clip.load(exported).square(image) for image in NOISE])
    monkeypatch.setattr(quantize, "ENOUGH_COSINE", 2.0)
    convert_text, records, counts = quantize._int8_text, [], []

    def log_as_onnxruntime_does(path: Path) -> None:
        logging.warning("of the root logger")
        logging.getLogger("onnxruntime.quantization").warning("of its own")
        convert_text(path)

    monkeypatch.setattr(quantize, "_int8_text", log_as_onnxruntime_does)
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.root.addHandler(handler)
    level = logging.root.level
    try:
        with console.capture() as output, console.on_progress(lambda *count: counts.append(count)):
            quantize.quantize(copied, "int8", OnnxEncoder(exported), pixels)
        assert logging.root.level == level
        assert handler in logging.root.handlers
    finally:
        logging.root.removeHandler(handler)
    assert records == []
    blocks = counts[1][1] - 1
    assert blocks > 1
    tried = [(done, 1 + blocks) for done in range(1 + blocks)]
    kept = [(done, 1 + 2 * blocks) for done in range(1 + blocks, 1 + 2 * blocks)]
    assert counts == [(0, 1), *tried, *kept, (0, 1)]  # of the image graph, and the text graph
    assert f"trying     {blocks} blocks of layers in float" in output.getvalue()


def test_blocks_that_int8_harms_stay_in_float(
    exported: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, pixels = (
        OnnxEncoder(exported),
        np.stack([m1clip.load(exported).square(image) for image in NOISE]),
    )

    def image_cosine(enough: float) -> tuple[float, list[str]]:
        shutil.copy(exported / "image.onnx", copied)
        shutil.copy(exported / "text.onnx", copied)
        monkeypatch.setattr(quantize, "ENOUGH_COSINE", enough)
        notes = quantize.quantize(copied, "int8", encoder, pixels)
        return float(
            (OnnxEncoder(copied).pixels(pixels) * encoder.pixels(pixels)).sum(axis=1).mean()
        ), notes

    all_int8, no_notes = image_cosine(0.5)
    one, other = (m1clip.load(folder).encode_text(TEXTS) for folder in (exported, copied))
    assert 0.999 < (one * other).sum(axis=1).min() < 1 - 1e-7
    # Alone, in a batch.
    np.testing.assert_allclose(m1clip.load(copied).encode_text(TEXTS[0])[0], other[0], atol=1e-5)
    some, notes = image_cosine((1 + all_int8) / 2)
    assert not no_notes
    assert "stay in float" in notes[0]
    assert some >= (1 + all_int8) / 2


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_rounding_the_weights_does_not_change_the_mean_output(groups: int, tmp_path: Path) -> None:
    """Of a convolution, as its bias is corrected; one that stays in float keeps its bias."""
    rng = np.random.default_rng(groups)
    weight, bias = (
        rng.normal(size=(6, 6 // groups, 1, 1)).astype(np.float32),
        np.ones(6, np.float32),
    )
    weight[:, 0] *= 30  # coarse steps
    inputs = rng.uniform(size=(8, 6, 4, 4)).astype(np.float32)
    shapes = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, 6, 4, 4])
        for name in "xy"
    ]
    tensors = [
        onnx.numpy_helper.from_array(value, name) for value, name in ((weight, "w"), (bias, "b"))
    ]
    layer = onnx.helper.make_node("Conv", ["x", "w", "b"], ["y"], name="layer", group=groups)
    graph = onnx.helper.make_graph([layer], "graph", shapes[:1], shapes[1:], tensors)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10
    )
    means = quantize._mean_inputs(model, tmp_path / "graph.onnx", np.array_split(inputs, 2))
    biases = [
        onnx.numpy_helper.to_array(tensor)
        for tensor in quantize._correct_biases(model, means, []).graph.initializer
    ]
    scale = np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / 127
    exact, rounded = (
        torch.nn.functional.conv2d(*map(torch.tensor, (inputs, *parts)), groups=groups).mean(
            dim=(0, 2, 3)
        )
        for parts in ((weight, bias), (np.round(weight / scale) * scale, biases[1]))
    )
    torch.testing.assert_close(rounded, exact, atol=1e-5, rtol=1e-5)
    same = quantize._correct_biases(model, means, ["layer"]).graph.initializer[1]
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(same), bias)
