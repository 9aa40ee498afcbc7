"""Analysis on vectors written by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from m1clip.evaluation.analysis import (
    alignment,
    analysis_tables,
    as_plain,
    by_attribute,
    confusions,
    difficulty_by_similarity,
    even_indices,
    group_masks,
    modality_gap,
    recall_by_group,
    recall_by_length,
    uniformity,
)

EYE = torch.eye(4)
OWNER = torch.arange(4)


def random_units(n: int, d: int, seed: int = 0) -> Tensor:
    return normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_alignment_is_the_squared_distance_of_pairs() -> None:
    assert alignment(EYE, EYE, OWNER) == 0.0
    assert alignment(EYE, EYE.roll(1, 0), OWNER) == pytest.approx(2.0)
    assert alignment(EYE, -EYE, OWNER) == pytest.approx(4.0)
    assert alignment(EYE[:2], EYE[[0, 0, 1]], torch.tensor([0, 0, 1])) == 0.0


def test_uniformity_is_zero_in_one_place_and_falls_as_points_spread() -> None:
    one_place = torch.ones(5, 4) / 2
    assert uniformity(one_place) == pytest.approx(0.0)
    assert uniformity(EYE) == pytest.approx(-4.0)  # all distances squared are 2
    assert uniformity(random_units(500, 64)) < -3.5
    assert uniformity(EYE[:1]) == 0.0


def test_the_gap_is_the_distance_of_the_means() -> None:
    assert modality_gap(EYE, EYE) == 0.0
    assert modality_gap(EYE, EYE + torch.tensor([3.0, 4.0, 0.0, 0.0])) == pytest.approx(5.0)


def test_similar_captions_are_the_hard_ones() -> None:
    """Captions in close samples; the model tells samples apart, but not the two of a sample."""
    centres = random_units(20, 32)
    text = normalize(torch.cat([centres, centres + 0.01 * random_units(20, 32, 1)]), dim=1)
    image = text.roll(20, 0)  # each image is closest to the other caption of its sample
    found = difficulty_by_similarity(image, text, torch.arange(40))
    assert found["easy"].value == 1.0
    assert found["hard"].value < 0.8
    assert sum(share.n for share in found.values()) == 40 * 39
    perfect = difficulty_by_similarity(text, text, torch.arange(40))
    assert {share.value for share in perfect.values()} == {1.0}
    assert difficulty_by_similarity(EYE[:1], EYE[:1], torch.zeros(1, dtype=torch.long)) == {}


def test_captions_of_the_same_image_are_no_negatives() -> None:
    text = EYE[[0, 0, 1]]
    found = difficulty_by_similarity(EYE, text, torch.tensor([0, 0, 1]))
    assert sum(share.n for share in found.values()) == 4


def test_recall_by_group_and_by_length() -> None:
    rank = torch.tensor([1, 2, 1, 5, 1, 1])
    masks = group_masks(
        [{"colour": ["red", "red"]}, {"colour": ["blue"]}, {"colour": ["red", "blue"]}],
        torch.tensor([0, 0, 1, 1, 2, 2]),
    )
    assert sorted(masks) == ["colour/blue", "colour/red"]
    found = recall_by_group(rank, {**masks, "none": torch.zeros(6, dtype=torch.bool)})
    assert as_plain(found) == {"colour/blue": [0.75, 4], "colour/red": [0.75, 4]}
    assert recall_by_group(rank, masks, k=2)["colour/red"].value == 1.0
    lengths = recall_by_length(rank, torch.tensor([3, 3, 5, 5, 9, 9]))
    assert as_plain(lengths) == {"short": [0.5, 2], "middle": [0.5, 2], "long": [1.0, 2]}
    assert list(recall_by_length(rank, torch.full((6,), 7))) == ["all"]


def test_confusions_are_wrong_the_widest_first_and_each_pair_once() -> None:
    image = EYE
    text = normalize(torch.tensor([
        [1.0, 0.0, 0, 0],  # right
        [1.0, 0.9, 0, 0],  # finds 0 instead of 1, just
        [1.0, 0.1, 0, 0],  # finds 0 instead of 1, by far
        [0.0, 0.0, 0.2, 1.0],  # finds 3 instead of 2
    ]), dim=1)  # fmt: skip
    owner = torch.tensor([0, 1, 1, 2])
    found = confusions(image, text, owner, most=5)
    assert [(each.caption, each.found, each.right) for each in found] == [(2, 0, 1), (3, 3, 2)]
    assert found[0].margin > found[1].margin > 0
    assert confusions(image, text, owner, most=1) == found[:1]
    assert confusions(EYE, EYE, OWNER, most=5) == []


def test_even_places_are_spread_and_distinct() -> None:
    assert even_indices(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert even_indices(3, 5).tolist() == [0, 1, 2]
    assert even_indices(0, 5).tolist() == []
    assert len(set(even_indices(1000, 333).tolist())) == 333


def test_the_tables_say_all_of_it() -> None:
    analysis = {
        "alignment": 0.5, "uniformity_image": -2.0, "uniformity_text": -2.0, "modality_gap": 0.3,
        "difficulty": {"easy": [1.0, 5]}, "length": {"short": [0.5, 4]},
        "groups": {"colour/red": [0.9, 5], "colour/blue": [0.1, 5]},
    }  # fmt: skip
    tables = analysis_tables(analysis)
    assert [table.row_count for _, table in tables] == [4, 1, 1, 2]
    assert [word for word, _ in by_attribute(analysis["groups"])["colour"]] == ["blue", "red"]  # type: ignore[arg-type]
    assert math.isfinite(uniformity(torch.zeros(3, 2)))
