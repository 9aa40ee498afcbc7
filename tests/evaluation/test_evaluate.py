"""m1clip.evaluate: a path or a model, on any data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_run import finished_run

import m1clip
from m1clip.errors import UserError
from m1clip.evaluation.evaluate import evaluate, open_split, other_class_vectors
from m1clip.runlog import read_log


@pytest.fixture(scope="module")
def run() -> Path:
    return finished_run({"train.steps": 2})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rows = ["file,caption,split"]
    for number in range(14):
        Image.new("RGB", (40, 30), (18 * number, 60, 90)).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,a square of shade {number},{'test' if number < 12 else 'train'}")
    (tmp_path / "captions.csv").write_text("\n".join(rows))
    return tmp_path


def test_path_and_a_loaded_model_give_the_same_scores(run: Path, photos: Path) -> None:
    scores = evaluate(run / "model", photos / "captions.csv", device="cpu")
    assert scores == evaluate(
        m1clip.load(run / "model"), [str(photos / "captions.csv")], device="cpu"
    )
    assert scores["image_to_text/recall@1"].n == 12
    assert scores["image_to_text/recall@1"].chance == pytest.approx(1 / 12)


def test_classes_of_other_splits_are_candidates(run: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("train/cat", "train/dog", "train/fox", "test/cat", "test/dog")):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (40, 30), (40 * number, 60, 90)).save(tmp_path / name / "1.png")
    evaluator = open_split(run / "model", (f"classes:{tmp_path}",), device_name="cpu")
    others = other_class_vectors(evaluator.model, evaluator.data)
    assert others is not None
    (fox,) = {s.captions[0] for s in evaluator.source.samples("train") if "fox" in s.captions[0]}
    # Bf16 against fp32.
    np.testing.assert_allclose(others, evaluator.model.encode_text([fox]), atol=0.01)
    scores = evaluator.scores(evaluator.encode())
    assert scores["top1_accuracy"].chance == pytest.approx(1 / 3)
    assert sorted(metric.name for metric in scores.classes) == ["cat", "dog"]
    assert (
        sum(metric.value * metric.n for metric in scores.classes)
        == 2 * scores["top1_accuracy"].value
    )


def test_eval_of_a_run_gives_the_scores_of_its_training(run: Path) -> None:
    evaluator = open_split(run, device_name="cpu")
    scores = evaluator.scores(evaluator.encode()).as_dict()
    end = list(read_log(run))[-1]
    assert {name: end[name] for name in scores} == scores


def test_unknown_data_or_split_is_a_one_line_error(run: Path, photos: Path) -> None:
    with pytest.raises(UserError, match=r"has no val split, only"):
        evaluate(run, photos / "captions.csv", split="val", device="cpu")
    with pytest.raises(UserError, match="training data is unknown; specify data with --data"):
        evaluate(run / "model", (), device="cpu")
