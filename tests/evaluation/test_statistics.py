"""Coverage of confidence intervals; scores as JSON and as a table."""

from __future__ import annotations

import json

import numpy as np
import pytest

from m1clip.evaluation.retrieval import accuracy_by_class, retrieval
from m1clip.evaluation.statistics import (
    Interval,
    Metric,
    Scores,
    fraction_intervals,
    too_few_to_judge,
    wilson,
)


def test_wilson_interval_known_values() -> None:
    # Values of the closed form, computed separately: 8 of 10, and none of 10.
    assert (wilson(0.8, 10).low, wilson(0.8, 10).high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert (wilson(0.0, 10).low, wilson(0.0, 10).high) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10).high == 1.0


def test_scores_of_very_few_images_come_with_a_note() -> None:
    def scores(images: int) -> Scores:
        recall = Metric("mean_recall", 0.9, 0.5, Interval(0.4, 1.0), images)
        text = Metric("text_to_image/recall@1", 0.9, 0.5, Interval(0.4, 1.0), 5 * images)
        return Scores((recall, text))

    note = "only 4 images: too few to judge a model, as one that is right half of the time would"
    assert f"\n\n{note} score 15 to 85%" in str(scores(4))
    assert "too few" in str(scores(49))
    assert "too few" not in str(scores(50))
    assert too_few_to_judge("1 val and 2 test images", 1).startswith("only 1 val and 2 test images")


def test_interval_coverage_with_correlated_captions() -> None:
    generator = np.random.default_rng(0)
    trials, images, captions, truth = 300, 80, 5, 0.6
    image_index = np.repeat(np.arange(images), captions)
    covered = covered_naive = 0
    for _ in range(trials):
        # In two images of three, all captions hit or miss together; the mean stays at the truth.
        together = generator.random((images, 1)) < truth
        apart = generator.random((images, captions)) < truth
        correlated = generator.random((images, 1)) < 2 / 3
        hits = np.where(correlated, together, apart).flatten()
        interval = fraction_intervals(hits[:, None], image_index)[0]
        covered += interval.low <= truth <= interval.high
        naive = wilson(float(hits.mean()), len(hits))
        covered_naive += naive.low <= truth <= naive.high
    assert 0.91 <= covered / trials <= 0.99
    assert covered_naive / trials < 0.85, (
        "treated as independent, captions give far too narrow an interval"
    )


def test_interval_has_width_for_no_hits_all_hits_and_one_image() -> None:
    image_index = np.repeat(np.arange(100), 3)
    hits = np.stack([np.zeros(300), np.ones(300), np.arange(300) % 2], axis=1).astype(bool)
    none, every, half = fraction_intervals(hits, image_index)
    assert none.low == 0 < none.high < 0.05
    assert 0.95 < every.low < 1 == every.high
    assert half.low < 0.5 < half.high
    single = fraction_intervals(np.array([[True], [False]]), np.array([7, 7]))[0]
    assert 0 < single.low < 0.5 < single.high < 1


def test_scores_as_json() -> None:
    result = retrieval(np.eye(20), np.eye(20), np.arange(20))
    flat = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert flat["text_to_image/recall@1"] == 1
    assert flat["text_to_image/recall@1/chance"] == pytest.approx(0.05)
    assert flat["text_to_image/recall@1/low"] < 1 == flat["text_to_image/recall@1/high"]
    assert flat["mean_recall/n"] == 20
    with pytest.raises(KeyError, match="available: mean_recall"):
        result["recall"]


def test_scores_as_a_table() -> None:
    scores = retrieval(np.eye(20), np.eye(20), np.arange(20))
    scores += Scores((Metric("negatives/[red]", 0.5, 1 / 5000, Interval(0.4, 0.6), 5000),))
    lines = [line.split() for line in str(scores).splitlines()]
    assert lines[0] == ["metric", "value", "95%", "interval", "chance", "n"]
    assert [
        "text",
        "to",
        "image,",
        "recall@1",
        "100.0%",
        "83.9",
        "-",
        "100.0%",
        "5.0%",
        "20",
    ] in lines
    # A small chance level is not shown as zero.
    assert ["negatives,", "[red]", "50.0%", "40.0", "-", "60.0%", "0.02%", "5,000"] in lines


def test_accuracy_of_each_class_is_shown_the_worst_first() -> None:
    labels = np.repeat(np.arange(30), 4)
    hits = np.arange(120) % 4 < 2
    hits[labels == 7] = [False, False, False, True]
    scores = retrieval(np.eye(20), np.eye(20), np.arange(20))
    scores += accuracy_by_class(hits, labels, [f"class {n:02}" for n in range(31)], 31)
    assert len(scores.classes) == 30, "a class without an image has no accuracy"
    assert scores.classes[0].chance == 1 / 31
    lines = str(scores).splitlines()
    head = lines.index("class     top-1  95% interval  images")
    assert lines[head + 1].split() == ["class", "07", "25.0%", "4.6", "-", "69.9%", "4"]
    assert "... and 10 more, none with a lower accuracy" in lines
