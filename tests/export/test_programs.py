"""Exported folders in the programs that they are for: `make test-export` installs these and runs this file."""

import functools
import json
import os
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image
from tiny_model import tiny_model

import m1clip
from m1clip.export.layouts import IMMICH_NAMES, export
from m1clip.model.folder import read_model

# NODE_FOLDER: with node_modules. IMMICH: machine-learning/ of Immich's repository. MODEL: instead
# of a tiny one.
NODE, IMMICH = os.environ.get("NODE_FOLDER", ""), os.environ.get("IMMICH", "")
IMMICH_PYTHON, SCREENSHOT = (
    os.environ.get("IMMICH_PYTHON", "python3"),
    os.environ.get("SCREENSHOT", ""),
)
PROGRAMS = Path(__file__).with_name("programs")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SENTENCE_TRANSFORMERS = Path(os.environ.get("SENTENCE_TRANSFORMERS_PYTHON", "missing"))
FLOAT16 = 10  # in the data types of Core ML programs
LABELS = "a dog runs on the grass,two children play in the snow!,a red car,people at the beach"
TEXTS = os.environ.get("LABELS", LABELS).split(",")
pytestmark = pytest.mark.skipif(
    "NODE_FOLDER" not in os.environ, reason="`make test-export` runs it"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.environ.get("MODEL"):
        return Path(os.environ["MODEL"])
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny_model("clip-bpe-pruned", TEXTS, text_pooling="eot+mean").save(folder)
    return folder


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.environ.get("PHOTO"):
        return Path(os.environ["PHOTO"])
    path = tmp_path_factory.mktemp("photo") / "photo.jpg"
    small = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    Image.fromarray(small).resize((320, 240), Image.Resampling.BICUBIC).save(path, quality=95)
    return path


@functools.cache
def exported(model: Path, to: Any, precision: Any = "fp32") -> Path:
    folder = model.parent / f"{model.name}-{to}-{precision}"
    if not folder.exists():
        export(model, to, folder, precision=precision)
    return folder


def run(*words: str | Path) -> dict[str, Any]:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def cosine(one: Any, other: Any) -> np.ndarray:
    one, other = np.atleast_2d(one), np.atleast_2d(other)
    return (one * other).sum(axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


@pytest.mark.skipif(
    not Path(NODE, "node_modules").is_dir(), reason="npm could not install transformers.js"
)
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "fp32"), ("int8", "q8")])
def test_transformers_js_gives_the_same_vectors(
    model: Path, photo: Path, precision: str, dtype: str
) -> None:
    folder = exported(model, "transformers.js", precision)
    result, ours = (
        run("node", PROGRAMS / "transformers_js.mjs", folder, dtype, photo, *TEXTS),
        m1clip.load(folder),
    )
    tokens = ours.tokenizer(TEXTS)
    assert result["ids"] == tokens[:, : len(result["ids"][0])].tolist()
    # One text at a time, as int8 scales each batch by what it contains.
    assert cosine(result["text"], ours.encode_text(TEXTS)).min() > (
        0.99999 if precision == "fp32" else 0.98
    )
    similarity = cosine(result["image"], ours.encode_image(photo))[0]
    print(f"transformers.js {precision}: image cosine {similarity:.5f}")
    assert similarity > 0.98  # sharp resizes differently from Pillow


@pytest.mark.skipif(
    not Path(NODE, "node_modules").is_dir(), reason="npm could not install transformers.js"
)
@pytest.mark.parametrize("precision", ["fp32", "int8", "fp16"])
def test_pipeline_of_transformers_js_classifies(model: Path, photo: Path, precision: str) -> None:
    folder = exported(model, "transformers.js", precision)
    result = run("node", PROGRAMS / "transformers_js_pipeline.mjs", folder, photo, *TEXTS)["scores"]
    expected = dict(m1clip.load(folder).classify(photo, TEXTS)[0])
    assert result.keys() == expected.keys()
    for label, score in result.items():
        # Sharp resizes differently from Pillow.
        assert score == pytest.approx(expected[label], abs=0.1)


@pytest.mark.skipif(
    not Path(IMMICH, "immich_ml").is_dir(),
    reason="IMMICH is not the machine-learning folder of Immich",
)
def test_immich_gives_the_same_vectors(model: Path, photo: Path) -> None:
    folder = exported(model, "immich")
    result = run(
        IMMICH_PYTHON, PROGRAMS / "immich.py", IMMICH, folder, IMMICH_NAMES[512], photo, *TEXTS
    )
    ours = m1clip.load(folder)
    assert len(result["image"]) == 512
    assert np.abs(np.array(result["text"]) - ours.encode_text(TEXTS)).max() < 1e-5
    assert np.abs(np.array(result["image"]) - ours.encode_image(Image.open(photo))[0]).max() < 1e-4


@pytest.mark.skipif(
    not SENTENCE_TRANSFORMERS.is_file(), reason="pip could not install sentence-transformers"
)
@pytest.mark.parametrize("custom", [False, True])
def test_sentence_transformers_gives_the_same_vectors(
    model: Path, custom: bool, photo: Path, tmp_path: Path
) -> None:
    if custom:  # no built-in class has a character tokenizer
        model = tmp_path / "model"
        tiny_model("char", TEXTS).save(model)
    export(model, "sentence-transformers", tmp_path / "out")
    result = run(
        SENTENCE_TRANSFORMERS,
        PROGRAMS / "sentence_transformers_folder.py",
        tmp_path / "out",
        photo,
        *TEXTS,
    )
    ours = m1clip.load(model, precision="fp32")
    assert result["custom"] is (custom or bool(os.environ.get("MODEL")))
    assert result["cosine"] == pytest.approx(1)
    assert np.abs(np.array(result["text"]) - np.asarray(ours.encode_text(TEXTS))).max() < 1e-5
    assert cosine(result["image"], ours.encode_image(Image.open(photo)))[0] > 0.9999
    prompted = np.asarray(ours.encode_text([f"{TEXTS[0]} {text}" for text in TEXTS[1:]]))
    assert np.abs(np.array(result["prompted"]) - prompted).max() < 1e-5


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_page_in_chromium_classifies_without_a_network(
    model: Path, photo: Path, tmp_path: Path
) -> None:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright (pip install playwright)"
    )
    folder = exported(model, "transformers.js", "int8")
    (tmp_path / "node_modules").symlink_to(Path(NODE, "node_modules").resolve())
    (tmp_path / "model").symlink_to(folder.resolve())
    shutil.copy(PROGRAMS / "page.html", tmp_path)
    shutil.copy(photo, tmp_path / "photo.jpg")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}"
    query = urlencode(
        [("image", "/photo.jpg"), ("dtype", "q8"), *(("label", text) for text in TEXTS)]
    )
    try:
        with playwright.sync_playwright() as running:
            browser = running.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"], timeout=120_000
            )
            page = browser.new_page(viewport={"width": 800, "height": 450})
            page.route(
                lambda url: not url.startswith((origin, "blob:", "data:")),
                lambda route: route.abort(),
            )
            page.goto(f"{origin}/page.html?{query}", timeout=120_000)
            page.wait_for_function("window.result || window.failure", timeout=300_000)
            assert page.evaluate("window.failure") is None
            result = page.evaluate("window.result")
            if SCREENSHOT:
                page.screenshot(path=SCREENSHOT)
            browser.close()
    finally:
        server.shutdown()
    expected = dict(m1clip.load(folder).classify(photo, TEXTS)[0])
    assert {row["label"] for row in result} == set(TEXTS)
    for row in result:
        assert row["probability"] == pytest.approx(expected[row["label"]], abs=0.1)


def test_coreml_packages_have_an_image_input_and_half_precision(
    model: Path, tmp_path: Path
) -> None:
    coremltools = pytest.importorskip("coremltools", reason="needs the extra `coreml`")
    export(model, "coreml", tmp_path / "out")
    saved = read_model(model)
    for name in ("image", "text"):
        spec = coremltools.models.MLModel(
            str(tmp_path / "out" / f"{name}.mlpackage"), skip_model_load=True
        ).get_spec()
        blocks = spec.mlProgram.functions["main"].block_specializations.values()
        types = {
            output.type.tensorType.dataType
            for block in blocks
            for op in block.operations
            for output in op.outputs
        }
        assert FLOAT16 in types
        assert spec.description.output[0].type.multiArrayType.shape[1] == saved.config.embed_dim
    expected = json.loads((tmp_path / "out" / "expected.json").read_text())
    pixels = np.array(expected["pixels"], np.uint8)
    ours = m1clip.load(model, precision="fp32")
    assert cosine(expected["image"], ours.encode_image(pixels))[0] > 0.99999
    compile((tmp_path / "out" / "verify_on_mac.py").read_text(), "verify_on_mac.py", "exec")
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    entry = record["runtimes"]["coreml"]
    assert 0.999 < entry["image"]["cosine_min"] <= 1.00001
    assert "image_seconds" not in entry  # only a Mac can time it
    assert record["versions"]["coremltools"]
    assert record["token_ids"]["differ"] == 0
