"""Ranks, recall and chance level: known values, and a reference implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from m1clip.data.captions import caption_ids_of
from m1clip.evaluation.analysis import confusions, difficulty_by_similarity
from m1clip.evaluation.retrieval import nearest, ranks, recall_chance, retrieval

LABELS = torch.arange(24) % 3  # 24 images of three classes, one caption each
CLASSES = torch.eye(3)[LABELS]


def random_units(n: int, d: int, generator: torch.Generator) -> Tensor:
    return normalize(torch.randn(n, d, generator=generator), dim=1)


def from_scores(scores: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Features whose product is exactly scores (texts x images): images are unit axes."""
    table = torch.tensor(scores)
    return torch.eye(table.shape[1]), table


def reference_ranks(image: np.ndarray, text: np.ndarray, image_index: np.ndarray) -> tuple[list[int], list[int]]:
    """Reference implementation: float64, one query at a time; at a tie, wrong candidates come first."""
    scores = np.round(text.astype(np.float64) @ image.astype(np.float64).T, 5)  # (texts, images)

    def best_rank(row: np.ndarray, right: np.ndarray) -> int:
        return int(right[np.lexsort((right, -row))].argmax()) + 1

    to_image = [best_rank(row, np.arange(len(image)) == own) for row, own in zip(scores, image_index, strict=True)]
    captioned = np.unique(image_index)
    return to_image, [best_rank(scores[:, number], image_index == number) for number in captioned]


@st.composite
def feature_sets(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Images and captions from a few integer directions, so that ties are common and exact."""
    n_images = draw(st.integers(1, 9))
    counts = draw(st.lists(st.integers(0, 4), min_size=n_images, max_size=n_images).filter(any))
    image_index = torch.arange(n_images).repeat_interleave(torch.tensor(counts))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    image_index = image_index[torch.randperm(len(image_index), generator=generator)]
    width, spread = draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def directions(n: int) -> Tensor:
        integers = torch.randint(-spread, spread + 1, (n, width), generator=generator).double()
        integers[integers.abs().sum(dim=1) == 0, 0] = 1
        return normalize(integers, dim=1).float()

    return directions(n_images), directions(len(image_index)), image_index


@settings(max_examples=300, deadline=None)
@given(feature_sets(), st.sampled_from([1, 2, 30, 1 << 24]))
def test_ranks_match_reference(features: tuple[Tensor, Tensor, Tensor], max_scores: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m1clip.evaluation.retrieval.MAX_SCORES", max_scores)
        found = ranks(*features)
    to_image, to_text = reference_ranks(*(each.numpy() for each in features))
    assert found.text_to_image.tolist() == to_image
    assert found.image_to_text[found.captioned].tolist() == to_text


def test_recall_and_median_rank_known_values() -> None:
    image, text = from_scores([[0.9, 0.1, 0.2], [0.5, 0.4, 0.3], [0.8, 0.7, 0.6], [0.3, 0.9, 0.1]])
    image_index = torch.tensor([0, 0, 1, 2])
    found = ranks(image, text, image_index)
    assert found.text_to_image.tolist() == [1, 1, 2, 3]
    assert found.image_to_text.tolist() == [1, 2, 4]
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
    one = random_units(1, width, torch.Generator().manual_seed(n))
    image_index = torch.arange(n).repeat_interleave(2)
    scores = retrieval(one.expand(n, -1), one.expand(2 * n, -1), image_index)
    assert all(metric.value <= metric.chance for metric in scores.metrics)
    assert scores["text_to_image/recall@1"].value == 0


def test_random_features_score_chance() -> None:
    generator = torch.Generator().manual_seed(1)
    image, text = random_units(400, 64, generator), random_units(2000, 64, generator)
    result = retrieval(image, text, torch.arange(400).repeat_interleave(5))
    for name in ("text_to_image/recall@10", "image_to_text/recall@10"):
        metric = result[name]
        assert metric.interval.low <= metric.chance <= metric.interval.high


def test_complete_similarity_matrix_is_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    product = torch.Tensor.__matmul__

    def spy(left: Tensor, right: Tensor) -> Tensor:
        nonlocal largest
        result = product(left, right)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", spy)
    monkeypatch.setattr("m1clip.evaluation.retrieval.MAX_SCORES", 2000)
    features = random_units(300, 4, torch.Generator())
    ranks(features, features, torch.arange(300))
    assert 0 < largest <= 2000


def test_nan_is_a_miss_for_its_caption_only() -> None:
    image, text = from_scores([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]])
    text[1] = torch.nan
    found = ranks(image, text, torch.tensor([0, 0, 1]))
    assert found.text_to_image.tolist() == [1, 3, 1]
    assert found.image_to_text.tolist() == [1, 1]
    scores = retrieval(image, text[1:], torch.tensor([0, 1]))
    for direction in ("text_to_image", "image_to_text"):
        assert scores[f"{direction}/recall@10"].value == 0.5, "even when k exceeds the number of candidates"
    nothing = retrieval(image * torch.nan, text * torch.nan, torch.tensor([0, 0, 1]))
    assert all(value == 0 for name, value in nothing if "recall" in name)


def test_autocast_of_the_caller_does_not_affect_the_scores() -> None:
    image, text = from_scores([[0.5, 0.5004], [0.5, 0.5004]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ranks(image, text, torch.tensor([1, 1])).text_to_image.tolist() == [1, 1]


@pytest.mark.parametrize("image_index", [[0, 3], [-1, 0], [0]])
def test_invalid_image_index_is_rejected(image_index: list[int]) -> None:
    with pytest.raises(ValueError, match="for 2 texts and 3 images"):
        ranks(torch.eye(3), torch.eye(3)[:2], torch.tensor(image_index))


def test_nearest_matches_sort_with_nan_last() -> None:
    image, text = from_scores([[0.3, 0.9, 0.6], [0.9, 0.1, 0.2]])
    scores, indices = nearest(text, image, k=2)
    assert indices.tolist() == [[1, 2], [0, 2]]
    np.testing.assert_allclose(scores.numpy(), [[0.9, 0.6], [0.9, 0.2]], rtol=1e-6)
    image[1] = torch.nan
    assert nearest(text, image, k=9)[1].tolist() == [[2, 0, 1], [0, 2, 1]]


def test_chance_matches_simulation_and_binomial_formula() -> None:
    captions = torch.tensor([1, 5, 2, 0, 3, 5, 1])
    image_index = torch.arange(len(captions)).repeat_interleave(captions)
    order = torch.rand(20_000, len(image_index), generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    queries = captions.nonzero()[:, 0]
    hit = (image_index[order[:, :3]][:, :, None] == queries).any(dim=1).double().mean()
    assert recall_chance(3, captions, len(image_index)) == pytest.approx(float(hit), abs=0.004)
    exact = sum(1 - math.comb(17 - c, 4) / math.comb(17, 4) for c in (1, 5, 2, 3, 5, 1)) / 6
    assert recall_chance(4, captions, 17) == pytest.approx(exact)
    assert recall_chance(100, captions, 17) == 1
    one = torch.ones(500, dtype=torch.long)
    assert recall_chance(10, one, 500) == pytest.approx(10 / 500)


def test_equal_captions_are_all_correct() -> None:
    scores = retrieval(CLASSES, CLASSES, torch.arange(24), LABELS, LABELS)
    assert {metric.value for metric in scores.metrics} == {1}
    assert scores["top1_accuracy"].chance == pytest.approx(1 / 3)
    assert scores["image_to_text/recall@1"].chance == pytest.approx(1 / 3)
    assert scores["text_to_image/recall@1"].chance == pytest.approx(8 / 24)
    without_keys = retrieval(CLASSES, CLASSES, torch.arange(24))
    assert without_keys["image_to_text/recall@1"].value == 0, "without keys they all tie"


def test_repeated_wrong_caption_counts_once() -> None:
    image = torch.tensor([[0.6, 0.8], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    text = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    keys = torch.from_numpy(caption_ids_of(["a cat", "a dog", " A Dog", "a dog"]))
    assert ranks(image, text, torch.arange(4), keys).image_to_text.tolist() == [2, 1, 1, 1]


def test_other_image_with_same_caption_is_not_a_confusion() -> None:
    image, text = (torch.tensor([[0.9, 0.1], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0]]))
    keys, image_index = torch.tensor([0, 0, 1]), torch.arange(3)
    assert [each.caption for each in confusions(image, text, image_index, limit=5)] == [0]
    assert confusions(image, text, image_index, keys, limit=5) == []
    assert sum(n for _, n in difficulty_by_similarity(image, text, image_index, keys).values()) == 4


def test_top1_accuracy_is_image_to_text_recall_at_1_with_one_template() -> None:
    image = normalize(CLASSES + 0.6 * torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    scores = retrieval(image, CLASSES, torch.arange(24), LABELS, LABELS)
    assert 0.3 < scores["top1_accuracy"].value < 1
    assert scores["top1_accuracy"].value == scores["image_to_text/recall@1"].value


def test_classes_without_an_image_are_candidates_for_top1_accuracy() -> None:
    closer = normalize(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), dim=1)
    scores = retrieval(CLASSES, CLASSES, torch.arange(24), LABELS, LABELS, closer)
    assert scores["top1_accuracy"].chance == pytest.approx(1 / 5)
    assert scores["top1_accuracy"].value == pytest.approx(2 / 3), "the first one ties with class 0"


def test_class_is_the_mean_of_its_templates() -> None:
    image = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    text = torch.tensor([[0.9, 0.1], [0.8, 0.6], [0.1, 0.9], [0.95, 0.05]])  # the last template of class 1 misleads
    image_index, labels = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1])
    assert retrieval(image, text, image_index, None, labels)["top1_accuracy"].value == 1
    assert retrieval(image * torch.nan, text, image_index, None, labels)["top1_accuracy"].value == 0
