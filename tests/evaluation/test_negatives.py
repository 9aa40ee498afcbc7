"""Accuracy by difficulty, counted by hand."""

from __future__ import annotations

import pytest
import torch

from m1clip.evaluation.analysis import negatives_accuracy
from m1clip.evaluation.statistics import wilson

IMAGE = torch.eye(3)
CAPTION = torch.diag(torch.tensor([0.8, 0.6, 0.4]))


def negative(image: int, score: float) -> list[float]:
    return [score if column == image else 0.0 for column in range(3)]


def test_by_hand() -> None:
    # (image, score, label, changed): right when the score is below the true 0.8, 0.6 or 0.4.
    cases = [
        (0, 0.1, "easy", "object"),
        (1, 0.2, "easy", "colour"),
        (2, 0.3, "easy", "object"),
        (0, 0.7, "medium", "colour"),
        (1, 0.9, "medium", "colour"),
        (0, 0.8, "hard", "count"),  # a tie is a miss
        (1, 0.59, "hard", "count"),
        (2, 0.5, "hard", "object"),
    ]
    result = negatives_accuracy(
        IMAGE,
        CAPTION[torch.tensor([case[0] for case in cases])],
        torch.tensor([negative(image, score) for image, score, _, _ in cases]),
        torch.tensor([case[0] for case in cases]),
        [case[2] for case in cases],
        [None if case[3] == "count" and case[1] == 0.59 else case[3] for case in cases],
    )
    assert dict(result) == pytest.approx(
        {
            "negatives/easy": 1,
            "negatives/medium": 1 / 2,
            "negatives/hard": 1 / 3,
            "negatives/changed/colour": 2 / 3,
            "negatives/changed/count": 0,
            "negatives/changed/object": 2 / 3,
        }
    )
    assert [metric.n for metric in result.metrics] == [3, 2, 3, 3, 1, 3]
    assert result["negatives/easy"].interval == wilson(1.0, 3)
    assert all(metric.chance == 0.5 for metric in result.metrics)


def test_several_of_one_image_count_as_one_in_the_interval() -> None:
    negatives = torch.tensor([negative(0, 0.1)] * 4)
    result = negatives_accuracy(IMAGE, CAPTION[[0, 0, 0, 0]], negatives, torch.zeros(4, dtype=torch.long), ["hard"] * 4)
    assert result["negatives/hard"].interval == wilson(1.0, 1)
    assert result["negatives/hard"].n == 4


def test_nan_is_a_miss_and_unknown_labels_come_last() -> None:
    negatives = torch.tensor([negative(0, float("nan")), negative(1, 0.1)])
    result = negatives_accuracy(IMAGE, CAPTION[:2], negatives, torch.tensor([0, 1]), ["absurd", "hard"])
    assert list(result) == [("negatives/hard", 1.0), ("negatives/absurd", 0.0)]


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="label has 1 entries for 2"):
        negatives_accuracy(IMAGE, CAPTION[:2], torch.zeros(2, 3), torch.tensor([0, 1]), ["easy"])
    with pytest.raises(ValueError, match="one true caption a negative"):
        negatives_accuracy(IMAGE, CAPTION[:2], torch.zeros(1, 3), torch.tensor([0]), ["easy"])
