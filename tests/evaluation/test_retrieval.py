"""Ranks, recall and chance level: known values, and a reference implementation."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m1clip.data.captions import caption_ids_of
from m1clip.evaluation.retrieval import nearest, ranks, recall_chance, retrieval
from m1clip.evaluation.split_analyses import confusions, difficulty_by_similarity

LABELS = np.arange(24) % 3  # 24 images of three classes, one caption each
CLASSES = np.eye(3, dtype=np.float32)[LABELS]


def units(vectors: np.ndarray) -> np.ndarray:
    """(n, d) float32 rows of unit length."""
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def random_units(n: int, d: int, generator: np.random.Generator) -> np.ndarray:
    return units(generator.normal(size=(n, d)))


def from_scores(scores: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Features whose product is exactly scores (texts x images): images are unit axes."""
    table = np.array(scores, np.float32)
    return np.eye(table.shape[1], dtype=np.float32), table


def reference_ranks(
    image: np.ndarray, text: np.ndarray, image_index: np.ndarray
) -> tuple[list[int], list[int]]:
    """Reference implementation: float64, one query at a time.

    At a tie, wrong candidates come first.
    """
    scores = np.round(text.astype(np.float64) @ image.astype(np.float64).T, 5)  # (texts, images)

    def best_rank(row: np.ndarray, right: np.ndarray) -> int:
        return int(right[np.lexsort((right, -row))].argmax()) + 1

    to_image = [
        best_rank(row, np.arange(len(image)) == own)
        for row, own in zip(scores, image_index, strict=True)
    ]
    captioned = np.unique(image_index)
    return to_image, [best_rank(scores[:, number], image_index == number) for number in captioned]


@st.composite
def feature_sets(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images and captions from a few integer directions, so that ties are common and exact."""
    n_images = draw(st.integers(1, 9))
    counts = draw(st.lists(st.integers(0, 4), min_size=n_images, max_size=n_images).filter(any))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    image_index = generator.permutation(np.repeat(np.arange(n_images), counts))
    width, spread = draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def directions(n: int) -> np.ndarray:
        integers = generator.integers(-spread, spread + 1, (n, width))
        integers[np.abs(integers).sum(axis=1) == 0, 0] = 1
        return units(integers)

    return directions(n_images), directions(len(image_index)), image_index


@settings(max_examples=300, deadline=None)
@given(feature_sets(), st.sampled_from([1, 2, 30, 1 << 24]))
def test_ranks_match_reference(
    features: tuple[np.ndarray, np.ndarray, np.ndarray], max_scores: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m1clip.evaluation.retrieval.MAX_SCORES", max_scores)
        result = ranks(*features)
    to_image, to_text = reference_ranks(*features)
    assert result.text_to_image.tolist() == to_image
    assert result.image_to_text[result.captioned].tolist() == to_text


def test_recall_and_median_rank_known_values() -> None:
    image, text = from_scores([[0.9, 0.1, 0.2], [0.5, 0.4, 0.3], [0.8, 0.7, 0.6], [0.3, 0.9, 0.1]])
    image_index = np.array([0, 0, 1, 2])
    result = ranks(image, text, image_index)
    assert result.text_to_image.tolist() == [1, 1, 2, 3]
    assert result.image_to_text.tolist() == [1, 2, 4]
    assert dict(retrieval(image, text, image_index)) == pytest.approx(
        {
            "mean_recall": (2 / 4 + 1 + 1 + 1 / 3 + 1 + 1) / 6,
            "text_to_image/recall@1": 2 / 4,
            "text_to_image/recall@5": 1,
            "text_to_image/recall@10": 1,
            "image_to_text/recall@1": 1 / 3,
            "image_to_text/recall@5": 1,
            "image_to_text/recall@10": 1,
        }
    )


@pytest.mark.parametrize("width", [7, 500])
@pytest.mark.parametrize("n", [3, 203])
def test_collapsed_model_is_never_above_chance(n: int, width: int) -> None:
    one = random_units(1, width, np.random.default_rng(n))
    image_index = np.repeat(np.arange(n), 2)
    scores = retrieval(one.repeat(n, axis=0), one.repeat(2 * n, axis=0), image_index)
    assert all(metric.value <= metric.chance for metric in scores.metrics)
    assert scores["text_to_image/recall@1"].value == 0


def test_random_features_score_chance() -> None:
    generator = np.random.default_rng(1)
    image, text = random_units(400, 64, generator), random_units(2000, 64, generator)
    result = retrieval(image, text, np.repeat(np.arange(400), 5))
    for name in ("text_to_image/recall@10", "image_to_text/recall@10"):
        metric = result[name]
        assert metric.interval.low <= metric.chance <= metric.interval.high


def test_complete_similarity_matrix_is_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m1clip.evaluation.retrieval.MAX_SCORES", 2000)
    features = random_units(600, 4, np.random.default_rng(0))
    tracemalloc.start()
    try:
        ranks(features, features, np.arange(600))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 2000 * 4 < peak < 600 * 600  # bytes; a matrix of bool would exceed it


def test_nan_is_a_miss_for_its_caption_only() -> None:
    image, text = from_scores([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]])
    text[1] = np.nan
    result = ranks(image, text, np.array([0, 0, 1]))
    assert result.text_to_image.tolist() == [1, 3, 1]
    assert result.image_to_text.tolist() == [1, 1]
    scores = retrieval(image, text[1:], np.array([0, 1]))
    for direction in ("text_to_image", "image_to_text"):
        assert scores[f"{direction}/recall@10"].value == 0.5, (
            "even when k exceeds the number of candidates"
        )
    nothing = retrieval(image * np.nan, text * np.nan, np.array([0, 0, 1]))
    assert all(value == 0 for name, value in nothing if "recall" in name)


@pytest.mark.parametrize("image_index", [[0, 3], [-1, 0], [0]])
def test_invalid_image_index_is_rejected(image_index: list[int]) -> None:
    with pytest.raises(ValueError, match="for 2 texts and 3 images"):
        ranks(np.eye(3), np.eye(3)[:2], np.array(image_index))


def test_nearest_matches_sort_with_nan_last() -> None:
    image, text = from_scores([[0.3, 0.9, 0.6], [0.9, 0.1, 0.2]])
    scores, indices = nearest(text, image, k=2)
    assert indices.tolist() == [[1, 2], [0, 2]]
    np.testing.assert_allclose(scores, [[0.9, 0.6], [0.9, 0.2]], rtol=1e-6)
    image[1] = np.nan
    assert nearest(text, image, k=9)[1].tolist() == [[2, 0, 1], [0, 2, 1]]


def test_chance_matches_simulation_and_binomial_formula() -> None:
    captions = np.array([1, 5, 2, 0, 3, 5, 1])
    image_index = np.repeat(np.arange(len(captions)), captions)
    order = np.random.default_rng(0).random((20_000, len(image_index))).argsort(axis=1)
    queries = np.flatnonzero(captions)
    hit = (image_index[order[:, :3]][:, :, None] == queries).any(axis=1).mean()
    assert recall_chance(3, captions, len(image_index)) == pytest.approx(float(hit), abs=0.004)
    exact = sum(1 - math.comb(17 - c, 4) / math.comb(17, 4) for c in (1, 5, 2, 3, 5, 1)) / 6
    assert recall_chance(4, captions, 17) == pytest.approx(exact)
    assert recall_chance(100, captions, 17) == 1
    one = np.ones(500, int)
    assert recall_chance(10, one, 500) == pytest.approx(10 / 500)


def test_equal_captions_are_all_correct() -> None:
    scores = retrieval(CLASSES, CLASSES, np.arange(24), LABELS, LABELS)
    assert {metric.value for metric in scores.metrics} == {1}
    assert scores["top1_accuracy"].chance == pytest.approx(1 / 3)
    assert scores["image_to_text/recall@1"].chance == pytest.approx(1 / 3)
    assert scores["text_to_image/recall@1"].chance == pytest.approx(8 / 24)
    without_keys = retrieval(CLASSES, CLASSES, np.arange(24))
    assert without_keys["image_to_text/recall@1"].value == 0, "without keys they all tie"


def test_repeated_wrong_caption_counts_once() -> None:
    image = np.array([[0.6, 0.8], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    text = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    keys = caption_ids_of(["a cat", "a dog", " A Dog", "a dog"])
    assert ranks(image, text, np.arange(4), keys).image_to_text.tolist() == [2, 1, 1, 1]


def test_other_image_with_same_caption_is_not_a_confusion() -> None:
    image, text = (
        np.array([[0.9, 0.1], [1.0, 0.0], [0.0, 1.0]]),
        np.array([[1.0, 0], [1.0, 0], [0, 1.0]]),
    )
    keys, image_index = np.array([0, 0, 1]), np.arange(3)
    assert [confusion.caption for confusion in confusions(image, text, image_index, limit=5)] == [0]
    assert confusions(image, text, image_index, keys, limit=5) == []
    compared = difficulty_by_similarity(image, text, image_index, keys)
    assert sum(rate["n"] for rate in compared.values()) == 4


def test_top1_accuracy_is_image_to_text_recall_at_1_with_one_template() -> None:
    image = units(CLASSES + 0.6 * np.random.default_rng(0).normal(size=(24, 3)))
    scores = retrieval(image, CLASSES, np.arange(24), LABELS, LABELS)
    assert 0.3 < scores["top1_accuracy"].value < 1
    assert scores["top1_accuracy"].value == scores["image_to_text/recall@1"].value


def test_classes_without_an_image_are_candidates_for_top1_accuracy() -> None:
    closer = units(np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    scores = retrieval(CLASSES, CLASSES, np.arange(24), LABELS, LABELS, closer)
    assert scores["top1_accuracy"].chance == pytest.approx(1 / 5)
    assert scores["top1_accuracy"].value == pytest.approx(2 / 3), "the first one ties with class 0"


def test_class_is_the_mean_of_its_templates() -> None:
    image = np.array([[1.0, 0.0], [0.0, 1.0]])
    # The last template of class 1 misleads.
    text = np.array([[0.9, 0.1], [0.8, 0.6], [0.1, 0.9], [0.95, 0.05]])
    image_index, labels = np.array([0, 0, 1, 1]), np.array([0, 1])
    assert retrieval(image, text, image_index, None, labels)["top1_accuracy"].value == 1
    assert retrieval(image * np.nan, text, image_index, None, labels)["top1_accuracy"].value == 0
