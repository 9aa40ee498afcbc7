"""Analysis functions on small known vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from m1clip.evaluation.analysis import (
    alignment,
    analysis_tables,
    confusions,
    difficulty_by_similarity,
    even_indices,
    fraction_by_group,
    group_masks,
    modality_gap,
    negatives_accuracy,
    recall_by_length,
    uniformity,
)
from m1clip.evaluation.statistics import wilson

EYE = torch.eye(4)
IMAGE_INDEX = torch.arange(4)


def random_units(n: int, d: int, seed: int = 0) -> Tensor:
    return normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_geometry_of_the_embedding_space() -> None:
    assert alignment(EYE, EYE, IMAGE_INDEX) == 0.0
    assert alignment(EYE, EYE.roll(1, 0), IMAGE_INDEX) == pytest.approx(2.0)
    assert alignment(EYE[:2], EYE[[0, 0, 1]], torch.tensor([0, 0, 1])) == 0.0
    assert uniformity(torch.ones(5, 4) / 2) == pytest.approx(0.0)
    assert uniformity(EYE) == pytest.approx(-4.0)  # all squared distances are 2
    assert uniformity(random_units(500, 64)) < -3.5
    assert uniformity(EYE[:1]) == 0.0
    assert modality_gap(EYE, EYE) == 0.0
    assert modality_gap(EYE, EYE + torch.tensor([3.0, 4.0, 0.0, 0.0])) == pytest.approx(5.0)


def test_difficulty_by_caption_similarity() -> None:
    """Captions in close pairs; the model distinguishes pairs, but not the captions of a pair."""
    centers = random_units(20, 32)
    text = normalize(torch.cat([centers, centers + 0.01 * random_units(20, 32, 1)]), dim=1)
    image = text.roll(20, 0)  # each image is closest to the other caption of its pair
    found = difficulty_by_similarity(image, text, torch.arange(40))
    assert found["easy"][0] == 1.0
    assert found["hard"][0] < 0.8
    assert sum(n for _, n in found.values()) == 40 * 39
    perfect = difficulty_by_similarity(text, text, torch.arange(40))
    assert {value for value, _ in perfect.values()} == {1.0}
    assert difficulty_by_similarity(EYE[:1], EYE[:1], torch.zeros(1, dtype=torch.long)) == {}
    same_image = difficulty_by_similarity(EYE, EYE[[0, 0, 1]], torch.tensor([0, 0, 1]))
    assert sum(n for _, n in same_image.values()) == 4, "captions of the same image are not negatives"


def test_recall_by_group_and_by_length() -> None:
    rank = torch.tensor([1, 2, 1, 5, 1, 1])
    masks = group_masks(
        [{"color": ["red", "red"]}, {"color": ["blue"]}, {"color": ["red", "blue"]}], torch.tensor([0, 0, 1, 1, 2, 2])
    )
    found = fraction_by_group(rank == 1, {**masks, "none": torch.zeros(6, dtype=torch.bool)})
    assert found == {"color/blue": [0.75, 4], "color/red": [0.75, 4]}
    lengths = recall_by_length(rank, torch.tensor([3, 3, 5, 5, 9, 9]))
    assert lengths == {"short": [0.5, 2], "middle": [0.5, 2], "long": [1.0, 2]}
    assert list(recall_by_length(rank, torch.full((6,), 7))) == ["all"]


def test_confusions_are_sorted_by_margin_without_duplicate_pairs() -> None:
    text = normalize(
        torch.tensor(
            [
                [1.0, 0.0, 0, 0],  # right
                [1.0, 0.9, 0, 0],  # finds 0 instead of 1, by a little
                [1.0, 0.1, 0, 0],  # finds 0 instead of 1, by far
                [0.0, 0.0, 0.2, 1.0],  # finds 3 instead of 2
            ]
        ),
        dim=1,
    )
    image_index = torch.tensor([0, 1, 1, 2])
    found = confusions(EYE, text, image_index, limit=5)
    assert [(each.caption, each.found, each.right) for each in found] == [(2, 0, 1), (3, 3, 2)]
    assert found[0].margin > found[1].margin > 0
    assert confusions(EYE, text, image_index, limit=1) == found[:1]
    assert confusions(EYE, EYE, IMAGE_INDEX, limit=5) == []


def test_negatives_accuracy_known_values() -> None:
    # (image, score, difficulty, changed): right when the score is below the true 0.8, 0.6 or 0.4.
    cases = [
        (0, 0.1, "easy", "object"),
        (1, 0.2, "easy", "color"),
        (2, 0.3, "easy", "object"),
        (0, 0.7, "medium", "color"),
        (1, 0.9, "medium", "color"),
        (0, 0.8, "hard", "count"),  # a tie is a miss
        (1, 0.59, "hard", None),
        (2, float("nan"), "hard", "object"),  # NaN is a miss
    ]
    image_index = torch.tensor([case[0] for case in cases])
    result = negatives_accuracy(
        torch.eye(3),
        torch.diag(torch.tensor([0.8, 0.6, 0.4]))[image_index],
        torch.eye(3)[image_index] * torch.tensor([case[1] for case in cases])[:, None],
        image_index,
        [case[2] for case in cases],
        [case[3] for case in cases],
    )
    assert dict(result) == pytest.approx(
        {
            "negatives/easy": 1,
            "negatives/medium": 1 / 2,
            "negatives/hard": 1 / 3,
            "negatives/changed_color": 2 / 3,
            "negatives/changed_count": 0,
            "negatives/changed_object": 2 / 3,
        }
    )
    assert [metric.n for metric in result.metrics] == [3, 2, 3, 3, 1, 3]
    assert result["negatives/easy"].interval == wilson(1.0, 3)
    assert all(metric.chance == 0.5 for metric in result.metrics)


def test_negatives_of_one_image_count_once_in_the_interval() -> None:
    true, negative = torch.eye(3)[[0, 0, 0, 0]], torch.zeros(4, 3)
    hard = negatives_accuracy(torch.eye(3), true, negative, torch.zeros(4).long(), ["hard"] * 4, [None] * 4)
    assert (hard["negatives/hard"].interval, hard["negatives/hard"].n) == (wilson(1.0, 1), 4)


def test_even_indices_are_spread_and_distinct() -> None:
    assert even_indices(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert even_indices(3, 5).tolist() == [0, 1, 2]
    assert even_indices(0, 5).tolist() == []
    assert even_indices(5, 0).tolist() == []
    assert len(set(even_indices(1000, 333).tolist())) == 333


def test_analysis_tables_list_weakest_group_first() -> None:
    analysis = {
        "alignment": 0.5,
        "uniformity_image": -2.0,
        "uniformity_text": -2.0,
        "modality_gap": 0.3,
        "difficulty": {"easy": [1.0, 5]},
        "length": {"short": [0.5, 4]},
        "groups": {"color/red": [0.9, 5], "color/blue": [0.1, 5]},
    }
    lines = [line.split() for line in analysis_tables(analysis).splitlines()]
    assert ["modality", "gap", "0.300"] in [line[:3] for line in lines]
    assert ["easy", "100.0%", "5"] in lines
    assert lines[-2:] == [["color:", "blue", "10.0%", "5"], ["color:", "red", "90.0%", "5"]]
