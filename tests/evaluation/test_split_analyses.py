"""Analysis functions on small known vectors."""

from __future__ import annotations

import numpy as np
import pytest

from m1clip.evaluation.retrieval import recall_by_group, retrieval
from m1clip.evaluation.split_analyses import (
    accuracy_within_batches,
    analysis_table,
    analyze,
    confusions,
    difficulty_by_similarity,
    even_indices,
    negatives_accuracy,
    uniformity,
)
from m1clip.evaluation.statistics import wilson
from m1clip.inference.features import SplitFeatures

EYE = np.eye(4, dtype=np.float32)
IMAGE_INDEX = np.arange(4)


def units(vectors: np.ndarray) -> np.ndarray:
    """(n, d) float32 rows of unit length."""
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def random_units(n: int, d: int, seed: int = 0) -> np.ndarray:
    return units(np.random.default_rng(seed).normal(size=(n, d)))


def test_geometry_of_the_embedding_space() -> None:
    def features(text: np.ndarray) -> SplitFeatures:
        return SplitFeatures(EYE, text, IMAGE_INDEX, IMAGE_INDEX, None)

    analysis = analyze(features(EYE))
    assert (analysis["alignment"], analysis["modality_gap"]) == (0.0, 0.0)
    assert analysis["uniformity_image"] == pytest.approx(-4.0)  # all squared distances are 2
    assert analyze(features(np.roll(EYE, 1, 0)))["alignment"] == pytest.approx(2.0)
    moved = analyze(features(EYE + np.array([3.0, 4.0, 0.0, 0.0])))
    assert moved["modality_gap"] == pytest.approx(5.0)
    assert uniformity(np.ones((5, 4)) / 2) == pytest.approx(0.0)
    assert uniformity(random_units(500, 64)) < -3.5
    assert uniformity(EYE[:1]) == 0.0
    lines = [line.split() for line in analysis_table(moved).splitlines()]
    assert ["modality", "gap", "5.000"] in [line[:3] for line in lines]
    assert ["hard", "100.0%"] in [line[:2] for line in lines]


def test_difficulty_by_caption_similarity() -> None:
    """Captions in close pairs; the model distinguishes pairs, but not the captions of a pair."""
    centers = random_units(20, 32)
    text = units(np.concatenate([centers, centers + 0.01 * random_units(20, 32, 1)]))
    image = np.roll(text, 20, 0)  # each image is closest to the other caption of its pair
    levels = difficulty_by_similarity(image, text, np.arange(40))
    assert levels["easy"]["value"] == 1.0
    assert levels["hard"]["low"] < levels["hard"]["value"] < 0.8 < levels["hard"]["high"]
    assert sum(rate["n"] for rate in levels.values()) == 40 * 39
    assert {rate["chance"] for rate in levels.values()} == {0.5}
    perfect = difficulty_by_similarity(text, text, np.arange(40))
    assert {rate["value"] for rate in perfect.values()} == {1.0}
    assert difficulty_by_similarity(EYE[:1], EYE[:1], np.zeros(1, int)) == {}
    same_image = difficulty_by_similarity(EYE, EYE[[0, 0, 1]], np.array([0, 0, 1]))
    assert sum(rate["n"] for rate in same_image.values()) == 4, (
        "captions of the same image are not negatives"
    )


def test_accuracy_within_batches_has_the_chance_of_its_batch_size() -> None:
    images = random_units(60, 16)
    index = np.arange(60)
    related = SplitFeatures(images, images, index, index, None)
    unrelated = related._replace(text=random_units(60, 16, 1))
    for size in (2, 12, 60, 1000):
        right = accuracy_within_batches(related, size)
        wrong = accuracy_within_batches(unrelated, size)
        assert right is not None
        assert wrong is not None
        assert (right.value, right.chance) == (1.0, pytest.approx(1 / min(size, 60)))
        assert wrong.interval.low <= wrong.chance <= wrong.interval.high
        assert wrong.n == 60
    left_out = accuracy_within_batches(related, 25)
    assert left_out is not None
    assert left_out.n == 50, "a rest that fills no batch is left out"
    assert accuracy_within_batches(related._replace(image_index=np.zeros(60, int)), 12) is None
    # Equal captions are equally right, and a tie of different ones is a miss.
    equal = accuracy_within_batches(unrelated._replace(caption_ids=np.zeros(60, int)), 12)
    assert equal is not None
    assert (equal.value, equal.chance) == (1.0, 1.0)
    collapsed = accuracy_within_batches(unrelated._replace(text=np.ones((60, 16)) / 4), 12)
    assert collapsed is not None
    assert collapsed.value == 0.0


def test_recall_by_category_is_among_all_images() -> None:
    """The captions of one category are right, those of the other are exchanged within it."""
    images = random_units(20, 16)
    text = images.copy()
    text[10:] = np.roll(images[10:], 1, 0)
    features = SplitFeatures(images, text, np.arange(20), np.arange(20), None)
    by_category = recall_by_group(features, ["food"] * 10 + ["urban"] * 9 + [""])
    assert list(by_category) == ["food", "urban"]
    assert (by_category["food"].value, by_category["food"].n) == (1.0, 10)
    assert by_category["urban"].value < 0.8
    assert by_category["urban"].n == 9
    everything = retrieval(*features)["mean_recall"]
    assert by_category["food"].chance == pytest.approx(everything.chance)
    whole = recall_by_group(features, ["all"] * 20)["all"]
    assert (whole.value, whole.interval) == (everything.value, everything.interval)
    # The last five images have no captions: they are candidates, and a group of them has no recall.
    fewer = SplitFeatures(images, text[:15], np.arange(15), np.arange(15), None)
    groups = recall_by_group(fewer, ["food"] * 10 + ["urban"] * 6 + ["nature"] * 4)
    assert {name: metric.n for name, metric in groups.items()} == {"food": 10, "urban": 5}


def test_confusions_are_sorted_by_margin_without_duplicate_pairs() -> None:
    text = units(
        np.array(
            [
                [1.0, 0.0, 0, 0],  # right
                [1.0, 0.9, 0, 0],  # finds 0 instead of 1, by a little
                [1.0, 0.1, 0, 0],  # finds 0 instead of 1, by far
                [0.0, 0.0, 0.2, 1.0],  # finds 3 instead of 2
            ]
        )
    )
    image_index = np.array([0, 1, 1, 2])
    pairs = confusions(EYE, text, image_index, limit=5)
    assert [(confusion.caption, confusion.retrieved, confusion.right) for confusion in pairs] == [
        (2, 0, 1),
        (3, 3, 2),
    ]
    assert pairs[0].margin > pairs[1].margin > 0
    assert confusions(EYE, text, image_index, limit=1) == pairs[:1]
    assert confusions(EYE, EYE, IMAGE_INDEX, limit=5) == []


def test_negatives_accuracy_known_values() -> None:
    # (image, score, changed): right when the score is below the true 0.8, 0.6 or 0.4.
    cases = [
        (0, 0.1, "object"),
        (1, 0.2, "color"),
        (2, 0.9, "color"),
        (0, 0.8, "count"),  # a tie is a miss
        (2, float("nan"), "object"),  # NaN is a miss
    ]
    image_index = np.array([case[0] for case in cases])
    result = negatives_accuracy(
        np.eye(3),
        np.diag(np.array([0.8, 0.6, 0.4]))[image_index],
        np.eye(3)[image_index] * np.array([case[1] for case in cases])[:, None],
        image_index,
        [case[2] for case in cases],
    )
    expected = {"negatives": (2 / 5, 5)}
    expected |= {f"negatives/changed_{name}": rate for name, rate in CHANGED.items()}
    assert {metric.name: (metric.value, metric.n) for metric in result.metrics} == expected
    assert all(metric.chance == 0.5 for metric in result.metrics)


CHANGED = {"color": (1 / 2, 2), "count": (0, 1), "object": (1 / 2, 2)}


def test_negatives_of_one_image_count_once_in_the_interval() -> None:
    true, negative = np.eye(3)[[0, 0, 0, 0]], np.zeros((4, 3))
    metrics = negatives_accuracy(np.eye(3), true, negative, np.zeros(4, int), ["color"] * 4)
    assert (metrics["negatives"].interval, metrics["negatives"].n) == (wilson(1.0, 1), 4)


def test_even_indices_are_spread_and_distinct() -> None:
    assert even_indices(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert even_indices(3, 5).tolist() == [0, 1, 2]
    assert even_indices(0, 5).tolist() == []
    assert even_indices(5, 0).tolist() == []
    assert len(set(even_indices(1000, 333).tolist())) == 333
