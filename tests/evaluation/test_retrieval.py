"""Recall, chance and the shape of the result."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn.functional import normalize

from m1clip.evaluation.retrieval import held_out, median_rank_chance, recall_chance, recall_hits, retrieval


def test_recall_and_median_by_hand() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.2], [0.5, 0.4, 0.3], [0.8, 0.7, 0.6], [0.3, 0.9, 0.1]])
    result = retrieval(torch.eye(3), scores, torch.tensor([0, 0, 1, 2]), at=(1, 2, 10))
    assert dict(result) == pytest.approx(
        {
            "mean_recall": (2 / 4 + 3 / 4 + 1 + 1 / 3 + 2 / 3 + 1) / 6,
            "text_to_image/recall@1": 2 / 4,
            "text_to_image/recall@2": 3 / 4,
            "text_to_image/recall@10": 1,
            "text_to_image/median_rank": 1.5,
            "image_to_text/recall@1": 1 / 3,
            "image_to_text/recall@2": 2 / 3,
            "image_to_text/recall@10": 1,
            "image_to_text/median_rank": 2,
        }
    )


def test_hits_by_hand() -> None:
    hits = recall_hits(torch.tensor([1, 3, 4]), (1, 3, 10), n_candidates=3)
    assert hits.tolist() == [[True, True, True], [False, True, True], [False, False, False]]


def test_chance_equals_a_simulation() -> None:
    captions = torch.tensor([1, 5, 2, 0, 3, 5, 1])
    owner = torch.arange(len(captions)).repeat_interleave(captions)
    generator = torch.Generator().manual_seed(0)
    trials, k = 20_000, 3
    order = torch.rand(trials, len(owner), generator=generator).argsort(dim=1)
    first = owner[order[:, :k]]  # (trials, k)
    asking = captions.nonzero()[:, 0]
    hit = (first[:, :, None] == asking).any(dim=1).double().mean()
    assert recall_chance(k, captions, len(owner)) == pytest.approx(float(hit), abs=0.004)
    place = (owner[order][:, :, None] == asking).double().argmax(dim=1) + 1  # (trials, asking)
    assert median_rank_chance(captions, len(owner)) == place.double().median()


def test_chance_equals_the_binomial_formula() -> None:
    captions = torch.tensor([5, 1, 0, 3])
    expected = sum(1 - math.comb(9 - c, 4) / math.comb(9, 4) for c in (5, 1, 3)) / 3
    assert recall_chance(4, captions, 9) == pytest.approx(expected)
    assert recall_chance(100, captions, 9) == 1
    assert recall_chance(10, torch.ones(500, dtype=torch.long), 500) == pytest.approx(10 / 500)


def test_chance_of_one_right_candidate() -> None:
    one = torch.ones(3, dtype=torch.long)
    assert recall_chance(5, one, 500) == pytest.approx(0.01)
    assert recall_chance(10, one, 4) == 1
    assert median_rank_chance(one, 500) == 250


def test_random_features_score_chance() -> None:
    generator = torch.Generator().manual_seed(1)
    image = normalize(torch.randn(400, 64, generator=generator), dim=1)
    text = normalize(torch.randn(2000, 64, generator=generator), dim=1)
    result = retrieval(image, text, torch.arange(400).repeat_interleave(5))
    for name in ("text_to_image/recall@10", "image_to_text/recall@10", "image_to_text/median_rank"):
        metric = result[name]
        assert metric.interval.low <= metric.chance <= metric.interval.high


def test_result_goes_to_json_and_rows() -> None:
    result = held_out(torch.eye(20), torch.eye(20), torch.arange(20))
    flat = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert flat["text_to_image/recall@1"] == 1
    assert flat["text_to_image/recall@1/chance"] == pytest.approx(0.05)
    assert flat["text_to_image/recall@1/low"] < 1 == flat["text_to_image/recall@1/high"]
    assert flat["in_batch_12/accuracy/n"] == 20
    rows = result.as_rows()
    assert [row["name"] for row in rows] == [name for name, _ in result]
    assert set(rows[0]) == {"name", "value", "low", "high", "chance", "n"}
    with pytest.raises(KeyError, match="there are: mean_recall"):
        result["recall"]


def test_held_out_leaves_in_batch_out_when_there_is_no_batch() -> None:
    names = [name for name, _ in held_out(torch.eye(11), torch.eye(11), torch.arange(11))]
    assert len(names) == 9
    assert not any("in_batch" in name for name in names)
