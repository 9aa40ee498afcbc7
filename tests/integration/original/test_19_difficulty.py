"""MISSION 19: accuracy by difficulty of the negatives, with chance and interval, during training and in eval."""

import numpy as np
from small_run import finished_run

from m1clip.evaluation.evaluate import open_split
from m1clip.evaluation.split_analyses import analyze, difficulty, scene_difficulty
from m1clip.runlog import read_log

LEVELS = ["easy", "medium", "hard"]


def test_accuracy_by_difficulty_is_measured() -> None:
    run = finished_run()
    (record,) = [line for line in read_log(run) if line["kind"] == "eval"]
    for name in ("difficulty", "scene_difficulty"):
        logged = record["analysis"][name]
        assert list(logged) == LEVELS
        assert {rate["chance"] for rate in logged.values()} == {0.5}
        assert all(rate["low"] <= rate["value"] <= rate["high"] for rate in logged.values())
    evaluator = open_split(run, split="train", device_name="cpu")
    features = evaluator.encode()
    analysis = analyze(features, evaluator)
    assert list(analysis["difficulty"]) == list(analysis["scene_difficulty"]) == LEVELS
    hidden = features._replace(image=np.roll(features.image, 1, axis=0))
    assert difficulty(hidden) != analysis["difficulty"]
    assert scene_difficulty(evaluator, hidden) != analysis["scene_difficulty"]
    perfect = features._replace(image=np.eye(72), text=np.eye(72)[features.image_index])
    assert {rate["value"] for rate in difficulty(perfect).values()} == {1.0}
