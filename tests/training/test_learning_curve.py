"""The learning curve, on constructed features and from the command."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from image_sets import image
from small_run import exit_code, finished_run

import m1clip.training.learning_curve as curve_module
from m1clip.config import Config, TransferConfig, to_toml
from m1clip.errors import UserError
from m1clip.training.how_many import _settings, how_many
from m1clip.training.learning_curve import Pairs, learning_curve

WIDTH = 64


def features(photos: int, noise: float = 6.0, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Images and two captions each, of the same eight causes."""
    random = np.random.default_rng(seed)
    causes = random.normal(size=(photos, 8))
    mix = np.random.default_rng(9).normal(size=(2, 8, WIDTH))
    image_index = np.repeat(np.arange(photos), 2)
    images = causes @ mix[0] + noise * random.normal(size=(photos, WIDTH))
    texts = causes[image_index] @ mix[1] + noise * random.normal(size=(2 * photos, WIDTH))
    return images.astype(np.float32), texts.astype(np.float32), image_index


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def curve() -> curve_module.LearningCurve:
    return learning_curve(*features(80), more=(40, 400))


def test_curve_rises_and_predicts_gains_that_grow(curve: curve_module.LearningCurve) -> None:
    assert (curve.labels, curve.candidates, curve.start) == (80, 20, None)
    sizes = [point.labels for point in curve.points]
    recalls = [point.recall for point in curve.points]
    assert sizes == sorted(sizes)
    assert sizes[-1] < 80
    assert recalls[-1] > recalls[0] + 0.1
    assert all(point.low <= point.recall <= point.high for point in curve.points)
    assert curve.points[-1].recall - 0.02 <= curve.now < 1
    small, large = curve.gains
    assert 0 < small.points < large.points
    assert all(gain.low < gain.points < gain.high for gain in curve.gains)


def test_text_and_dict_have_the_gains(curve: curve_module.LearningCurve) -> None:
    gain = curve.gains[0]
    assert f"40 more captions: {gain.points:+.1f} points [{gain.low:+.1f}, " in str(curve)
    values = json.loads(json.dumps(curve.as_dict()))
    assert values["gains"][0]["points"] == gain.points
    assert values["points"][0].keys() == {"labels", "recall", "low", "high"}


def test_same_seed_gives_the_same_curve(curve: curve_module.LearningCurve) -> None:
    assert learning_curve(*features(80), more=(40, 400)) == curve
    assert learning_curve(*features(80), more=(40, 400), seed=1) != curve


def test_prediction_holds_for_more_photos_of_the_same_kind() -> None:
    """The gain from 80 to 160 photos is in the interval that 80 photos predict."""
    images, texts, index = features(160, noise=6.0)
    gain = learning_curve(images[:80], texts[:160], index[:160], more=(80,)).gains[0]
    test_images, test_texts, test_index = features(600, noise=6.0, seed=5)

    def recall(count: int) -> float:
        pairs = Pairs.select(
            np.vstack([images[:count], test_images]),
            np.vstack([texts[: 2 * count], test_texts]),
            np.concatenate([index[: 2 * count], count + test_index]),
            np.arange(count + 600),
        )
        maps = curve_module._fit_heads(pairs, np.arange(count))
        groups = np.array_split(np.arange(count, count + 600), 30)
        return float(
            np.mean([curve_module._recall(pairs, group, *maps, None).mean() for group in groups])
        )

    assert gain.low < 100 * (recall(160) - recall(80)) < gain.high


def test_fewer_coordinates_than_features_give_the_same_heads() -> None:
    images, texts, index = features(60)
    pairs = Pairs.select(images, texts, index, np.arange(60))
    assert pairs.images.shape[1] < WIDTH
    complete = pairs._replace(
        images=curve_module._standardize(images), texts=curve_module._standardize(texts)
    )
    photos = np.arange(40)
    held_out = np.arange(40, 60)
    recalls = [
        curve_module._recall(
            some_pairs, held_out, *curve_module._fit_heads(some_pairs, photos), None
        )
        for some_pairs in (pairs, complete)
    ]
    assert torch.allclose(*map(torch.from_numpy, recalls))


def test_model_that_knows_the_photos_already_gains_nothing() -> None:
    """With `aligned`, the heads are added to a model, which is never made worse by much."""
    random = np.random.default_rng(0)
    vectors = unit(random.normal(size=(60, 32))).astype(np.float32)
    curve = learning_curve(vectors, vectors, np.arange(60), aligned=True, more=(100,))
    assert curve.start == 1.0
    assert curve.gains[0].low <= 0 <= curve.gains[0].high


def test_captions_improve_a_model_that_knows_little() -> None:
    images, texts, index = features(80)
    curve = learning_curve(unit(images), unit(texts), index, aligned=True)
    assert curve.start is not None
    assert curve.start < 0.4
    assert curve.now > curve.start + 0.2


def test_too_few_photos_are_an_error() -> None:
    with pytest.raises(UserError, match=r"39 photos with captions.*at least 40"):
        learning_curve(*features(39))


def test_constant_features_do_not_fail() -> None:
    images, texts, index = features(40)
    images[:] = 1.0
    curve = learning_curve(images, texts, index)
    assert curve.now < 0.5


def test_command_reads_photos_with_captions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "caption", "source"))
        for number in range(44):
            image(number, (32, 32)).save(tmp_path / f"{number}.png")
            source = "model:x" if number >= 41 else "person"
            writer.writerow((f"{number}.png", f"a red snail number {number}", source))
    model = finished_run() / "model"
    words = ["data", "howmany", str(tmp_path), "--model", str(model), "--more", "50", "--json"]
    assert exit_code(*words) == 0
    shown = capsys.readouterr().out
    values = json.loads(shown[shown.index("{") :])
    assert values["labels"] == 41  # without generated captions
    assert values["gains"][0]["more"] == 50
    assert how_many(tmp_path, model=model, captions="all").labels == 44


def test_curve_is_that_of_general_or_of_the_initial_model_of_a_run(tmp_path: Path) -> None:
    assert _settings(tmp_path, None, "person")[1] == "general"
    for init, expected in ((None, "towers"), ("runs/first", "runs/first")):
        config = Config(transfer=TransferConfig(init=init))
        (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
        assert _settings(tmp_path, None, "person")[1] == expected
    assert _settings(tmp_path, "towers", "person")[1] == "towers"
