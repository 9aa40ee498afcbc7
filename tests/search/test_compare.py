"""Which model to search with after training on labels."""

import pytest

from m1clip.search.compare import ENOUGH_TO_COMPARE, MetricPair, judge

LOWER, HIGHER = (0.4, 0.3, 0.5), (0.5, 0.4, 0.6)
CHANGED = [MetricPair("mean_recall", LOWER, HIGHER)]
SAME = [MetricPair("mean_recall", LOWER, LOWER)]


@pytest.mark.parametrize(
    ("metrics", "gain", "held_out", "use_new", "reason"),
    [
        (CHANGED, (0.10, 0.02, 0.18), ENOUGH_TO_COMPARE, True, "more of the held-out photos"),
        (CHANGED, (0.10, 0.00, 0.18), ENOUGH_TO_COMPARE, False, "may be chance"),
        (CHANGED, (0.10, -0.05, 0.25), ENOUGH_TO_COMPARE, False, "may be chance"),
        (CHANGED, (-0.10, -0.25, 0.05), ENOUGH_TO_COMPARE, False, "may be chance"),
        (CHANGED, (-0.10, -0.18, -0.02), ENOUGH_TO_COMPARE, False, "fewer of the held-out photos"),
        (CHANGED, (0.50, 0.40, 0.60), 1, False, "on 1 held-out photo; 20 are needed"),
        (SAME, (0.0, 0.0, 0.0), ENOUGH_TO_COMPARE, False, "changed nothing"),
    ],
)
def test_new_model_is_advised_only_for_a_gain_above_chance(
    metrics: list[MetricPair],
    gain: tuple[float, float, float],
    held_out: int,
    use_new: bool,
    reason: str,
) -> None:
    verdict = judge(metrics, gain, held_out)
    assert verdict.use_new is use_new
    assert reason in verdict.reason
