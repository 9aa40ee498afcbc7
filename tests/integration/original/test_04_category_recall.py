"""MISSION 4: recall by category of synthetic images and of class folders inside folders of categories."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_run import finished_run

from m1clip.analyses import ANALYSES
from m1clip.data.sources import open_source
from m1clip.evaluation.evaluate import open_split
from m1clip.evaluation.split_analyses import analyze, category_recall
from m1clip.runlog import read_log
from m1clip.schema import matches_schema

CATEGORIES = {"animals", "food", "nature", "urban"}


def test_recall_by_category_is_measured() -> None:
    run = finished_run()
    (record,) = [line for line in read_log(run) if line["kind"] == "eval"]
    logged = record["analysis"]["category_recall"]
    assert logged.keys() <= CATEGORIES
    assert sum(rate["n"] for rate in logged.values()) == 8, "all validation images"
    assert matches_schema(logged, ANALYSES["category_recall"].schema)
    evaluator = open_split(run, split="train", device_name="cpu")
    features = evaluator.encode()
    recalls = analyze(features, evaluator)["category_recall"]
    assert recalls.keys() == CATEGORIES
    assert all(rate["low"] <= rate["value"] <= rate["high"] for rate in recalls.values())
    perfect = features._replace(image=np.eye(72), text=np.eye(72)[features.image_index])
    assert {rate["value"] for rate in category_recall(evaluator, perfect).values()} == {1.0}
    assert {rate["value"] for rate in recalls.values()} != {1.0}


@pytest.mark.parametrize("split", ["", "train/"])
def test_folders_around_class_folders_are_categories(split: str, tmp_path: Path) -> None:
    names = ("animals/dog/1.jpg", "animals/cat/2.jpg", "food/pizza/3.jpg", "plain/4.jpg")
    for name in names:
        path = tmp_path / split / name
        path.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(path)
    source = open_source(f"classes:{tmp_path}")
    assert [source.category(split + name) for name in names] == ["animals", "animals", "food", ""]
