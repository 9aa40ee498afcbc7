"""Folders for transformers.js, Immich and sentence-transformers.

test_programs.py opens them with those programs.
"""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import tiny_model

import m1clip
from m1clip import console
from m1clip.errors import UserError
from m1clip.export import layouts
from m1clip.export.layouts import IMMICH_NAMES, convert, export
from m1clip.model.folder import read_model

pytest.importorskip("onnx", reason="needs the extra `export`")
NOISE = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
TEXTS = ["a red ball", "two cats!", ""]
FILES = {
    "transformers.js": (
        "config.json onnx/text_model.onnx onnx/vision_model.onnx preprocess.json "
        "preprocessor_config.json tokenizer.json tokenizer_config.json"
    ),
    "immich": (
        "config.json preprocess.json textual/model.onnx textual/tokenizer.json"
        " textual/tokenizer_config.json visual/model.onnx visual/preprocess_cfg.json"
    ),
    "sentence-transformers": (
        "config.json merges.txt model.safetensors modules.json preprocessor_config.json "
        "special_tokens_map.json tokenizer_config.json vocab.json"
    ),
}


def save(folder: Path, kind: str = "clip-bpe-pruned") -> Path:
    # One block in each tower: exporting takes as long as there are operations.
    tiny_model(kind, TEXTS[:2], vision_layers=1, text_layers=1).save(folder)
    return folder


@pytest.mark.parametrize("to", FILES)
def test_layouts_of_other_programs_give_the_same_vectors(to: str, tmp_path: Path) -> None:
    model, out = save(tmp_path / "model"), tmp_path / "out"
    with console.capture() as output:
        convert(read_model(model), to, out)  # type: ignore[arg-type]
    said = output.getvalue().splitlines()
    assert " ".join(sorted(str(path.relative_to(out)) for path in out.rglob("*.*"))) == FILES[to]
    ours, theirs = m1clip.load(model, precision="fp32"), m1clip.load(out, precision="fp32")
    for method, inputs in (("encode_image", NOISE), ("encode_text", TEXTS)):
        expected, actual = getattr(ours, method)(inputs), getattr(theirs, method)(inputs)
        np.testing.assert_allclose(actual[:, : expected.shape[1]], expected, atol=2e-6)
        assert actual.shape[1] == (min(IMMICH_NAMES) if to == "immich" else expected.shape[1])
        assert not actual[:, expected.shape[1] :].any()
    assert any("clip/ViT-B-32__openai" in line for line in said) == (to == "immich")


@pytest.mark.parametrize(
    ("precision", "ending", "dtype"), [("int8", "_quantized", "q8"), ("fp16", "_fp16", "fp16")]
)
def test_transformers_js_folder_has_a_graph_of_both_towers(
    precision: Any, ending: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the pipelines look for it: `onnx/model` and the ending of the dtype, with logits as CLIPModel's."""
    onnxruntime = pytest.importorskip("onnxruntime")
    vectors = dict[str, np.ndarray]()

    def compare(runtimes: dict[str, Any], *rest: Any) -> dict[str, Any]:
        vectors.update(
            {
                name: np.asarray(runtime.model.encode_image(NOISE))
                for name, runtime in runtimes.items()
            }
        )
        return {"failures": []}

    monkeypatch.setattr(layouts, "compare", compare)
    monkeypatch.setattr(layouts, "report_table", lambda record: "")
    out = export(save(tmp_path / "model"), "transformers.js", tmp_path / "out", precision=precision)
    # The graphs are converted in place; one that was opened afterwards would be the converted one.
    np.testing.assert_allclose(vectors["onnx fp32"], vectors["torch"], atol=2e-6)
    assert np.abs(vectors[f"transformers.js {precision}"] - vectors["torch"]).max() > 2e-6
    names = ("model", "text_model", "vision_model")
    assert sorted(path.name for path in (out / "onnx").iterdir()) == [
        f"{name}{ending}.onnx" for name in names
    ]
    assert json.loads((out / "config.json").read_text())["transformers.js_config"] == {
        "dtype": dtype
    }
    model = m1clip.load(out)
    session = onnxruntime.InferenceSession(str(out / "onnx" / f"model{ending}.onnx"))
    assert {graph_input.name for graph_input in session.get_inputs()} == {
        "input_ids",
        "pixel_values",
    }
    inputs = {"pixel_values": model.encoder.graph_input(NOISE), "input_ids": model.tokenizer(TEXTS)}
    outputs = dict(
        zip(
            [output.name for output in session.get_outputs()],
            session.run(None, inputs),
            strict=True,
        )
    )
    images, texts = model.encode_image(NOISE), model.encode_text(TEXTS)
    np.testing.assert_allclose(outputs["image_embeds"], images, atol=1e-3)
    np.testing.assert_allclose(outputs["text_embeds"], texts, atol=1e-3)
    logits = model.encoder.logit_scale * outputs["image_embeds"] @ outputs["text_embeds"].T
    np.testing.assert_allclose(outputs["logits_per_image"], logits, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(outputs["logits_per_text"], outputs["logits_per_image"].T)


def test_sentence_transformers_folder_of_other_models_has_code_of_its_own(tmp_path: Path) -> None:
    model, out = save(tmp_path / "model", "char"), tmp_path / "out"
    with console.capture() as output:
        convert(read_model(model), "sentence-transformers", out)
    said = output.getvalue().splitlines()
    assert json.loads((out / "modules.json").read_text())[0]["type"] == "m1clip_module.OnnxClip"
    assert "trust_remote_code" in said[-1]
    functions = runpy.run_path(str(out / "m1clip_module.py"))
    module = functions["OnnxClip"].load(str(out))
    actual = module(module.preprocess(TEXTS))["sentence_embedding"]
    np.testing.assert_allclose(
        actual, m1clip.load(model, precision="fp32").encode_text(TEXTS), atol=2e-6
    )


def test_layouts_refuse_what_the_program_cannot_read(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "char")
    with pytest.raises(UserError, match="no character tokenizer"):
        convert(read_model(model), "openclip", tmp_path / "out")
    with pytest.raises(UserError, match="--int8 is for --to onnx"):
        export(model, "hf", tmp_path / "out", precision="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
