"""The comparison at the end of every export."""

import json
from pathlib import Path

import numpy as np
import pytest
from image_sets import break_files, make_set
from small_run import exit_code
from tiny_model import tiny_model

import m1clip
from m1clip.data.images import to_square
from m1clip.errors import UserError
from m1clip.export import layouts
from m1clip.export.parity import open_examples, recall_changes, recall_failures
from m1clip.inference.features import SplitFeatures


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny_model("char", ["two red balls"]).save(folder)
    return folder


def test_a_model_that_differs_is_not_written_unless_forced(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out, writer = (
        make_set(tmp_path / "set", train=2, val=40, test=2),
        tmp_path / "out",
        layouts._write_own,
    )
    words = ("export", model, "--to", "safetensors", "--data", data, "--out", out)

    def damaged(folder: Path, saved: layouts.SavedModel) -> list[str]:
        saved.weights["image_head.weight"][0] *= -1
        return writer(folder, saved)

    monkeypatch.setitem(layouts.WRITERS, "safetensors", damaged)
    assert exit_code(*words) == 2
    assert "not exported: the smallest cosine of image vectors" in capsys.readouterr().err
    assert not out.exists()
    assert exit_code(*words, "--force") == 0
    assert json.loads((out / "export.json").read_text())["failures"]


def test_the_report_is_on_the_screen_and_in_the_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_set(tmp_path / "set", train=2, val=8, test=2)
    assert (
        exit_code("export", model, "--to", "safetensors", "--data", data, "--out", tmp_path / "out")
        == 0
    )
    shown, record = (
        capsys.readouterr().out,
        json.loads((tmp_path / "out" / "export.json").read_text()),
    )
    entry = record["runtimes"]["safetensors"]
    assert entry["image"]["cosine_min"] == pytest.approx(1)
    assert entry["recall@10"]["change"] == 0
    assert entry["image_seconds"]["n"] > 0
    assert record["examples"]["images"] == 8
    for words in (
        "smallest cosine",
        "recall@1",
        "change in points",
        "size on disk",
        "images per second",
        "compared",
    ):
        assert words in shown


def test_captions_with_words_that_only_the_larger_vocabulary_has_are_reported_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [f"image number {number} of val" for number in range(8)]
    tiny_model("clip-bpe-pruned", known).save(tmp_path / "model")
    data = make_set(tmp_path / "set", train=2, val=8, test=2)
    words = ("export", tmp_path / "model", "--to", "openclip", "--data", data)
    assert exit_code(*words, "--out", tmp_path / "out") == 0
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert record["runtimes"]["openclip"]["text"]["cosine_min"] == pytest.approx(1)
    other = record["other_tokens"]
    assert (other["captions"], other["of"]) == (8, 16)  # "the 3th of the val images"
    assert other["cosine_min"] <= other["cosine_mean"] < 0.9999
    assert "8 of 16 captions have other tokens" in capsys.readouterr().out


def test_calibration_takes_the_next_image_for_one_that_cannot_be_read(
    model: Path, tmp_path: Path
) -> None:
    data = make_set(tmp_path / "set", train=9, val=2, test=0)
    break_files(data, [4])
    (data / "images" / "train-0000.jpg").unlink()
    original = m1clip.load(model, precision="fp32")
    examples = open_examples(model, (str(data),), original)
    samples = examples.source.samples("train")
    size, resize = original.preprocess.image_size, original.preprocess.resize

    def expected(numbers: list[int]) -> np.ndarray:
        images = (samples[number].image.open(size) for number in numbers)
        return np.stack([to_square(image, size, resize) for image in images])

    # Images 0, 4 and 8 are evenly spaced; 0 and 4 cannot be read.
    pixels = examples.calibration(original.preprocess, 3)
    np.testing.assert_array_equal(pixels, expected([1, 5, 8]))
    pixels = examples.calibration(original.preprocess, 64)
    np.testing.assert_array_equal(pixels, expected([1, 2, 3, 5, 6, 7, 8]))
    break_files(data, range(9))
    with pytest.raises(UserError, match="none of the 9 train images can be read, and int8 needs"):
        examples.calibration(original.preprocess, 3)


def noisy(features: SplitFeatures, noise: float) -> SplitFeatures:
    image = features.image + noise * np.random.default_rng(7).normal(size=features.image.shape)
    return features._replace(image=units(image))


def units(vectors: np.ndarray) -> np.ndarray:
    """(n, d) float32 rows of unit length."""
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def features() -> SplitFeatures:
    generator = np.random.default_rng(0)
    image = units(generator.normal(size=(200, 16)))
    index = np.repeat(np.arange(200), 3)
    text = units(image[index] + 0.3 * generator.normal(size=(600, 16)))
    return SplitFeatures(image, text, index, np.arange(600), None)


def test_the_interval_of_a_change_in_recall_is_that_of_the_bootstrap(
    features: SplitFeatures,
) -> None:
    after = noisy(features, 0.1)
    metric = recall_changes(features, after)["recall@1"]
    hits = []
    for image, text, *_ in (features, after):
        scores = text @ image.T
        by_text = (
            (scores.argmax(axis=1) == np.repeat(np.arange(200), 3)).reshape(200, 3).mean(axis=1)
        )
        by_image = scores.argmax(axis=0) // 3 == np.arange(200)
        hits.append((by_text + by_image) / 2)
    difference = hits[1] - hits[0]
    drawn = np.random.default_rng(0).integers(0, 200, (4000, 200))
    low, high = np.quantile(difference[drawn].mean(axis=1), (0.025, 0.975))
    assert metric["change"] == pytest.approx(difference.mean())
    assert (metric["low"], metric["high"]) == pytest.approx((low, high), abs=0.01)


def test_recall_below_the_interval_of_the_original_fails(features: SplitFeatures) -> None:
    assert recall_failures(features, features) == []
    assert recall_failures(features, noisy(features, 0.02)) == []
    failures = recall_failures(features, noisy(features, 1.0))
    assert len(failures) == 4
    assert "below the 95% interval of the original's" in failures[0]
