"""Which evaluation has the best model."""

import pytest

from m1clip.evaluation.statistics import Interval, Metric
from m1clip.training.validation import improves


@pytest.mark.parametrize(
    ("value", "images", "later_wins", "expected"),
    [
        (0.6, 1000, True, True),
        (0.4, 4, True, False),
        (0.5, 1000, True, False),
        (0.5, 4, True, True),  # the same score on four images: the model that was trained longer
        (0.5, 4, False, False),  # or the one that it started from
    ],
)
def test_equal_scores_of_a_tiny_split_do_not_end_training(
    value: float, images: int, later_wins: bool, expected: bool
) -> None:
    metric = Metric("mean_recall", value, 0.1, Interval(0.0, 1.0), images)
    assert improves(metric, 0.5, later_wins) == expected
